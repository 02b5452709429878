"""D10 hang: the import never ends, and signals are ignored."""

import signal
import time

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "TIMEOUT"
OPTIONS = {"timeout": 3}

for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        continue
time.sleep(3600)


def kernel_fn(x, dim=-1):
    return x
