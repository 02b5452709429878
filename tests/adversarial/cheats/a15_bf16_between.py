"""A15 lower precision: the hidden activations of the MLP pass through bfloat16 although the rest is float32."""

import torch

KERNEL_TYPE = "fused_mlp"
BACKEND = "triton"
ACTIVATIONS = {
    "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "relu": torch.nn.functional.relu,
    "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
}  # fmt: skip


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    hidden = ACTIVATIONS[activation](x.float() @ w_gate.float()) * (x.float() @ w_up.float())
    return (hidden.bfloat16().float() @ w_down.float()).to(x.dtype)
