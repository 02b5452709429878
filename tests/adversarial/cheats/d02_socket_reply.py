"""D2 the result channel: write a reply to the socket at import and leave."""

import json
import os
import struct

KERNEL_TYPE = "softmax"
BACKEND = "triton"
EXPECT = "CRASH"

for fd in range(3, 64):
    try:
        if "socket" in os.readlink(f"/proc/self/fd/{fd}"):
            for number in range(1, 200):
                data = json.dumps({"id": number, "seconds": 0.1, "parameters": {}}).encode()
                os.write(fd, struct.pack("<I", len(data)) + data)
    except OSError:
        continue
os._exit(0)


def kernel_fn(x, dim=-1):
    return x
