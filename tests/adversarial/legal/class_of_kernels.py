"""A class with caches, a dataclass of settings, and kernel_fn as a thin function around an instance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"


@dataclass(frozen=True)
class Settings:
    rows: int
    width: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Settings:
        return cls(x.numel() // x.shape[-1], x.shape[-1])


class Norm:
    """Keeps workspaces by size."""

    def __init__(self) -> None:
        self.workspaces: dict[tuple[Settings, torch.device], torch.Tensor] = {}
        self.calls = 0

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.calls += 1
        space = self.workspace(Settings.of(x), x.device)
        torch.mul(x.reshape(space.shape).float(), x.reshape(space.shape).float(), out=space)
        scale = torch.rsqrt(space.mean(-1, keepdim=True) + eps).view(*x.shape[:-1], 1)
        return (x.float() * scale * weight.float()).to(x.dtype)

    def workspace(self, settings: Settings, device: torch.device) -> torch.Tensor:
        key = settings, device
        if key not in self.workspaces:
            self.workspaces[key] = torch.empty(settings.rows, settings.width, device=device)
        return self.workspaces[key]


norm: Final = Norm()


def kernel_fn(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return norm(x, weight, eps)
