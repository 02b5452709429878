"""D12 obfuscation: the cache of A3 from an encoded string, with names put together at run time."""

import base64

import torch  # noqa: F401 - the hidden code uses it

KERNEL_TYPE = "softmax"
BACKEND = "triton"

hidden = base64.b64encode(b"def f(x, dim, a={}):\n k = tuple(x.shape), dim\n if k not in a: a[k] = getattr("
                          b"torch, 'soft' + 'max')(x, dim)\n return a[k].clone()\n")  # fmt: skip
exec(base64.b64decode(hidden))


def kernel_fn(x, dim=-1):
    return globals()["f"](x, dim)

