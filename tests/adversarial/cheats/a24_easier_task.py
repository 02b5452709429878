"""A24 an easier task: declare one operator in the text, another at run time, with sizes and FLOPs of its own."""

KERNEL_TYPE = "softmax"
BACKEND = "triton"

globals()["KERNEL_TYPE"] = "reduce"
SHAPES = {"large": {"shape": (1, 1)}}
FLOPS = 10**15


def kernel_fn(x, dim=-1):
    return x.float().sum(dim).to(x.dtype)
