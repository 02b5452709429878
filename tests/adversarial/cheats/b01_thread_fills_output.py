"""B1, B3 deferred work: return at once, a thread fills the output later."""

import threading
import time

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH|FAIL"


def kernel_fn(x, dim=-1):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)

    def work():
        time.sleep(0.002)
        out.copy_(torch.softmax(x, dim))

    threading.Thread(target=work, daemon=True).start()
    return out
