"""D2 the result channel: answer the next hundred requests in advance, with the ids they are likely to have."""

import json
import os
import struct

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"
sent = []


def kernel_fn(x, dim=-1):
    facts = {
        "type": "torch.Tensor", "dtype": "float16", "shape": list(x.shape), "layout": "torch.strided", "device": "cpu",
        "attributes": [], "aliases_input": False, "aliases_previous": False, "requires_grad": False,
    }  # fmt: skip
    for fd in range(3, 64) if not sent else ():
        if os.path.islink(f"/proc/self/fd/{fd}") and "socket" in os.readlink(f"/proc/self/fd/{fd}"):
            sent.append(fd)
            for number in range(4, 100):
                reply = {"id": number, "device_s": 1e-6, "host_s": 1e-6, "after_s": 0, "before_s": 0, "late": False,
                         "peak_bytes": 0, "left": [], "out": facts}  # fmt: skip
                data = json.dumps(reply).encode()
                os.write(fd, struct.pack("<I", len(data)) + data)
    return torch.softmax(x, dim)
