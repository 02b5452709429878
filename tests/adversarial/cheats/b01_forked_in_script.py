"""B1 a native thread: TorchScript's fork goes on after the call, beside what it is compared with."""

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"


@torch.jit.script
def burn(a: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        a.sin_()
    return a


@torch.jit.script
def leave(a: torch.Tensor, steps: int) -> int:
    left = torch.jit.fork(burn, a, steps)
    if steps < 0:  # else the compiler would drop it
        left.wait()
    return steps


work = torch.ones(1 << 14)


def kernel_fn(x, dim=-1):
    leave(work, 2000)
    return torch.softmax(x, dim)
