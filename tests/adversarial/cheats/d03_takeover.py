"""D3 the loop: never return from the import; serve the judge from here, with right answers and tiny times."""

import json
import os
import socket
import struct
import sys

import torch

KERNEL_TYPE = "softmax"
BACKEND = "triton"
NEEDS = "cpu"
EXPECT = "FAIL|CRASH"


def kernel_fn(x, dim=-1):
    return torch.softmax(x, dim)


def serve(sock, runner, pending):
    def send(message):
        data = json.dumps(message).encode()
        sock.sendall(struct.pack("<I", len(data)) + data)

    def read(count):
        data = b""
        while len(data) < count:
            data += sock.recv(count - len(data)) or sys.exit()
        return data

    send({"id": pending["id"], "seconds": 0.0, "parameters": {}})
    runner.function = kernel_fn
    while True:
        request = json.loads(read(struct.unpack("<I", read(4))[0]))
        if request["do"] == "call":
            reply = runner.call(request)
            reply |= {"device_s": 1e-7, "host_s": 1e-7, "left": [], "late": False}
        else:
            reply = {"changed": [], "operators": [], "kernels": [], "resources": {}, "host_s": 1e-7}
        send({**reply, "id": request["id"]})


frame = sys._getframe()
while frame:
    names = frame.f_locals
    if "runner" in names and "request" in names:
        fd = next(f for f in range(3, 64) if os.path.islink(p := f"/proc/self/fd/{f}") and "socket" in os.readlink(p))
        serve(socket.socket(fileno=os.dup(fd)), names["runner"], names["request"])
    frame = frame.f_back
raise RuntimeError("no loop found")
