"""Attributes that the kernel passes from a process to its children.

A worker that a fork server forks has the attributes of the server, and so of the process that started the
server. Without care, a caller with few privileges would get a worker with root's capabilities, and a run
under ``chrt --idle`` would leave a server with workers in the idle class. The list of attributes comes from
``fork(2)``, ``proc(5)``, ``credentials(7)`` and ``prctl(2)``. Each attribute belongs to a group:

- Part of a server's identity, because a process without privileges cannot change it, or can only give it up:
  accounts, capabilities, ``no_new_privs``, filters of system calls, the label of a security module, classes
  and priorities of scheduling and I/O, the policy of NUMA memory, personality, mitigations of the processor
  (all in :func:`of_server`). :mod:`.identity` adds namespaces, root folder, control group and limits.
- Set in each worker: :class:`~.identity.Inherited`, with :func:`settable`.
- Not taken over from the caller, because the server is an independent program: session and terminal, parent,
  signals, timers and memory locks, the session's keyring.

The rules of Landlock cannot be read, so they cannot be part of the identity themselves. But a process without
privileges needs ``no_new_privs`` to restrict itself with Landlock, and ``no_new_privs`` is part of the
identity.
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from flower_gpu import landlock

# The last two fields tell the mode and the number of filters for system calls. The filters themselves cannot
# be read.
_PRIVILEGES: Final = (
    "Uid",
    "Gid",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "Seccomp",
    "Seccomp_filters",
)
_MITIGATIONS: Final = ("Speculation_Store_Bypass", "SpeculationIndirectBranch")

# Attributes that prctl(2) returns as a number (linux/prctl.h).
_GET_SECUREBITS, _GET_TIMERSLACK, _MCE_KILL_GET, _GET_THP_DISABLE, _GET_MDWE = 27, 30, 34, 42, 66
_PRCTL_NUMBERS: Final = (_GET_SECUREBITS, _GET_TIMERSLACK, _MCE_KILL_GET, _GET_THP_DISABLE, _GET_MDWE)

# Numbers of ioprio_get(2) and get_mempolicy(2). The C library has no functions for these system calls.
_SYSTEM_CALLS: Final = {"x86_64": (252, 239), "aarch64": (31, 236)}
_IOPRIO_WHO_PROCESS: Final = 1
# Index of the real-time priority in /proc/PID/stat, counted after the name. The scheduling class follows.
_RT_PRIORITY: Final = 37
# Size of a mask of NUMA nodes, in bits. get_mempolicy(2) fails if the kernel supports more nodes.
_NODE_BITS: Final = 4096
_ASK_PERSONALITY: Final = 0xFFFFFFFF

#: Files in /proc/PID with attributes that each process may set.
_SETTABLE: Final = ("oom_score_adj", "coredump_filter")


def status(process: int | str = "thread-self") -> dict[str, str]:
    """Return the fields of ``/proc/PID/status``, by default for the calling thread. Threads may differ."""
    with open(f"/proc/{process}/status", errors="replace") as file:
        fields = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in fields}


def of_server() -> list[Any]:
    """Return the attributes of the calling thread that are part of a server's identity."""
    fields = status()
    if landlock.has_set_no_new_privs:
        # The GPU guard of this worker has set it. It does not matter here, because the workers of a worker
        # set up their own guard.
        fields["NoNewPrivs"] = "0"
    label = ""
    with suppress(OSError):  # The system may have no security module.
        label = Path("/proc/thread-self/attr/current").read_text()
    return [
        [fields.get(name) for name in (*_PRIVILEGES, *_MITIGATIONS, "NoNewPrivs", "Mems_allowed_list")],
        sorted(os.getgroups()),
        label,
        [os.getpriority(os.PRIO_PROCESS, 0), *_scheduling()],
        _of_libc(),
    ]


def _scheduling() -> list[str]:
    """Return the real-time priority and the scheduling class of the calling thread."""
    # os.sched_getscheduler() is not used, because musl does not have it.
    with open("/proc/thread-self/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[_RT_PRIORITY : _RT_PRIORITY + 2]


def may_fork_for(process: int) -> bool:
    """Return True if a fork of this process has no more privileges than a child of ``process``.

    A caller with fewer privileges has another identity, and so uses another server. This check protects
    against code that connects to a server on purpose.

    Raises OSError if that process has ended.
    """
    server, caller = status(), status(process)
    allowed = int(caller["CapPrm"], 16)
    # A program that root starts gets all capabilities of the bounding set.
    if caller["Uid"].split()[1] == "0":
        allowed |= int(caller["CapBnd"], 16)
    is_filtered = caller.get("Seccomp", "0") != "0" and server.get("Seccomp", "0") == "0"
    return not int(server["CapPrm"], 16) & ~allowed and not is_filtered


def settable() -> dict[str, str]:
    """Return the attributes that each worker sets for itself, by the name of the file in ``/proc/self``."""
    values = {}
    for name in _SETTABLE:
        with suppress(OSError):  # The kernel may have been built without it.
            values[name] = Path(f"/proc/self/{name}").read_text().strip()
    return values


def set_anew(values: dict[str, str]) -> None:
    """Set the attributes of :func:`settable`. Skip attributes that this process may not set."""
    for name in _SETTABLE:
        with suppress(OSError, KeyError):
            path = Path(f"/proc/self/{name}")
            # The kernel prints this mask in hexadecimal without a prefix, but needs the prefix to read it.
            text = values[name] if name == "oom_score_adj" else f"0x{int(values[name], 16):x}"
            if path.read_text().strip() != values[name]:
                path.write_text(text)


def _of_libc() -> list[Any]:
    """Return personality, attributes of prctl(2), I/O priority and NUMA memory policy."""
    library = ctypes.CDLL(None)
    values: list[Any] = [library.personality(ctypes.c_ulong(_ASK_PERSONALITY))]
    values += [library.prctl(number, 0, 0, 0, 0) for number in _PRCTL_NUMBERS]
    if numbers := _SYSTEM_CALLS.get(platform.machine()):
        get_io_priority, get_memory_policy = numbers
        values.append(library.syscall(get_io_priority, _IOPRIO_WHO_PROCESS, 0))
        mode, nodes = ctypes.c_int(), (ctypes.c_ulong * (_NODE_BITS // 8 // ctypes.sizeof(ctypes.c_ulong)))()
        library.syscall(get_memory_policy, ctypes.byref(mode), nodes, ctypes.c_ulong(_NODE_BITS), None, 0)
        values += [mode.value, bytes(nodes).hex().rstrip("0")]
    return values
