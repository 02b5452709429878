"""D10 hang the judge: put a pipe where it will look for our last words, and die."""

import os

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"


def kernel_fn(x, dim=-1):
    log = os.path.join(os.environ["HOME"], "output.log")
    os.unlink(log)
    os.mkfifo(log)
    os._exit(1)
