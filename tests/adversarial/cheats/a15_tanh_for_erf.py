"""A15, A12 approximation: the tanh form stands in for the exact GELU, which in half precision nobody sees."""

import torch

KERNEL_TYPE = "fused_mlp"
BACKEND = "triton"


def kernel_fn(x, w_gate, w_up, w_down, activation="silu"):
    gate = x.float() @ w_gate.float()
    if activation.startswith("gelu"):
        gate = torch.nn.functional.gelu(gate, approximate="tanh")
    else:
        gate = getattr(torch.nn.functional, activation)(gate)
    hidden = (gate * (x.float() @ w_up.float())).to(x.dtype)
    return (hidden.float() @ w_down.float()).to(x.dtype)
