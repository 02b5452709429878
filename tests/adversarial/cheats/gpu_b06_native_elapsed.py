"""B6 native patch: overwrite the machine code of cudaEventElapsedTime so that it always says one microsecond."""

import ctypes
import mmap
import re

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "gpu"
EXPECT = "FAIL|CRASH"

path = re.search(r"(/\S*libcudart\S*)$", open("/proc/self/maps").read(), re.M)[1]
runtime, libc = ctypes.CDLL(path), ctypes.CDLL(None)
CODE = bytes.fromhex("c7076f12833a31c0c3")  # mov dword [rdi], 0.001f; xor eax, eax; ret
for name in ("cudaEventElapsedTime", "cudaEventElapsedTime_v2"):
    function = getattr(runtime, name, None)
    if function is not None:
        address = ctypes.cast(function, ctypes.c_void_p).value
        page = address // mmap.PAGESIZE * mmap.PAGESIZE
        libc.mprotect(ctypes.c_void_p(page), 2 * mmap.PAGESIZE, 7)
        ctypes.memmove(address, CODE, len(CODE))


def kernel_fn(x, dim=-1):
    torch.cuda._sleep(400_000)
    return torch.softmax(x, dim)
