"""What a kernel's process gives up before it loads the kernel: privileges, and writing outside its own folders.

Everything here is best effort and additional: verdicts rest on fresh inputs, the judge's own memory and its own clock.
Landlock (Linux 5.13+; TCP from 6.7, signals from 6.12) needs no privileges; where the kernel has none, a line says so
in the record. Imports nothing but the standard library: the child loads this file before anything else.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
WRITE_FILE, REMOVE_AND_MAKE, REFER, TRUNCATE = 1 << 1, 0x1FF0, 1 << 13, 1 << 14
ON_FILES = WRITE_FILE | TRUNCATE
BIND_AND_CONNECT_TCP, SCOPE_SOCKETS_AND_SIGNALS = 3, 3
KEPT = 0b100  # DAC_READ_SEARCH: root reads a checkout that belongs to a user
LARGEST_FILE = 4 << 30  # bytes: a kernel that prints without end fills no disk


def _prctl(option: int, argument: int) -> int:
    return ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def drop_privileges() -> None:
    """Almost no capability (a container's root has many), no way to gain one, no core dumps, bounded files.

    With fewer capabilities than the judge, this process may neither trace it nor read its memory, even as root.
    """
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if not KEPT >> capability & 1:
            _prctl(PR_CAPBSET_DROP, capability)
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("<Ii", 0x20080522, 0)  # version 3, this thread; then effective, permitted, inheritable
    if libc.capset(header, struct.pack("<6I", KEPT, KEPT, 0, 0, 0, 0)):
        libc.capset(header, bytes(24))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = LARGEST_FILE if most == resource.RLIM_INFINITY else min(most, LARGEST_FILE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))


def confine(writable: list[str]) -> str:
    """Forbid this process and its children to write outside `writable`, to use TCP, to signal or trace other processes.

    Returns what is in force: "landlock 7", or "" where the kernel offers none.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return ""
    rights = WRITE_FILE | REMOVE_AND_MAKE | REFER * (abi >= 2) | TRUNCATE * (abi >= 3)
    attributes = struct.pack("<QQQ", rights, BIND_AND_CONNECT_TCP * (abi >= 4), SCOPE_SOCKETS_AND_SIGNALS * (abi >= 6))
    ruleset = libc.syscall(CREATE_RULESET, attributes, 8 if abi < 4 else 16 if abi < 6 else 24, 0)
    if ruleset < 0:
        return ""
    for path in writable:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = rights if os.path.isdir(path) else rights & ON_FILES
        libc.syscall(ADD_RULE, ruleset, 1, struct.pack("<Qi", allowed, fd), 0)
        os.close(fd)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    refused = libc.syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return "" if refused else f"landlock {abi}"
