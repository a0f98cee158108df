"""What the kernel hands from a process to its children.

A worker that a fork server forks has the attributes of the server, and so of the process that started the
server. Without care, a caller with few privileges would get a worker with root's capabilities, and a run
under ``chrt --idle`` would leave a server whose workers have the idle class. This is a walk through
``fork(2)``, ``proc(5)``, ``credentials(7)`` and ``prctl(2)``. Each attribute is one of these:

- Part of a server's identity, because a process without privileges cannot change it, or can only give it up:
  accounts, capabilities, ``no_new_privs``, filters of system calls, the label of a security module, classes
  and priorities of scheduling and I/O, the policy of NUMA memory, personality, mitigations of the processor
  (all in :func:`of_server`), and what :mod:`.identity` adds: namespaces, root folder, control group, limits.
- Set anew in each worker: :class:`~.identity.Inherited`, with :func:`settable`.
- The server's own, because it is a program of its own: session and terminal, parent, signals, timers and
  memory locks, the session's keyring.

The rules of Landlock cannot be read. But a process without privileges needs ``no_new_privs`` to restrict
itself by them, and that is part of the identity.
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from flower_gpu import landlock

# The last two tell of filters of system calls, whose content cannot be read.
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
_OF_PRCTL: Final = (_GET_SECUREBITS, _GET_TIMERSLACK, _MCE_KILL_GET, _GET_THP_DISABLE, _GET_MDWE)

# The numbers of ioprio_get(2) and get_mempolicy(2), which the C library has no functions for.
_SYSTEM_CALLS: Final = {"x86_64": (252, 239), "aarch64": (31, 236)}
_IOPRIO_WHO_PROCESS: Final = 1
_RT_PRIORITY: Final = 37  # the place of this field of proc(5)'s stat after the name; the class follows
_NODE_BITS: Final = 4096  # at least as many as the kernel was built for
_ASK_PERSONALITY: Final = 0xFFFFFFFF

#: Files of proc(5) with an attribute that each process may set.
_SETTABLE: Final = ("oom_score_adj", "coredump_filter")


def status(process: int | str = "thread-self") -> dict[str, str]:
    """Return the kernel's status of a process, by default of the calling thread: threads may differ."""
    with open(f"/proc/{process}/status", errors="replace") as file:
        fields = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in fields}


def of_server() -> list[Any]:
    """Return the attributes of the calling thread that a fork server must have itself."""
    found = status()
    if landlock.has_set_no_new_privs:
        found["NoNewPrivs"] = "0"  # of the GPU guard: the workers of a worker are guarded by themselves
    label = ""
    with suppress(OSError):  # no security module
        label = Path("/proc/thread-self/attr/current").read_text()
    return [
        [found.get(name) for name in (*_PRIVILEGES, *_MITIGATIONS, "NoNewPrivs", "Mems_allowed_list")],
        sorted(os.getgroups()),
        label,
        [os.getpriority(os.PRIO_PROCESS, 0), *_scheduling()],
        _of_libc(),
    ]


def _scheduling() -> list[str]:
    """Return the real-time priority and the scheduling class of the calling thread."""
    # Not by os.sched_getscheduler(): musl does not have it.
    with open("/proc/thread-self/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[_RT_PRIORITY : _RT_PRIORITY + 2]


def may_fork_for(process: int) -> bool:
    """Return True if a fork of this process has no more privileges than a program that ``process`` starts.

    A caller with fewer privileges finds another server by the identity. This check is for code that asks a
    server although it should not.

    Raises OSError if that process has ended.
    """
    own, others = status(), status(process)
    may_have = int(others["CapPrm"], 16)
    if others["Uid"].split()[1] == "0":  # a program of root's begins with what the bounding set allows
        may_have |= int(others["CapBnd"], 16)
    is_filtered = others.get("Seccomp", "0") != "0" and own.get("Seccomp", "0") == "0"
    return not int(own["CapPrm"], 16) & ~may_have and not is_filtered


def settable() -> dict[str, str]:
    """Return the attributes that a worker sets anew, by their files in ``/proc/self``."""
    found = {}
    for name in _SETTABLE:
        with suppress(OSError):  # the kernel was built without it
            found[name] = Path(f"/proc/self/{name}").read_text().strip()
    return found


def set_anew(values: dict[str, str]) -> None:
    """Set the attributes of :func:`settable`, as far as this process may."""
    for name in _SETTABLE:
        with suppress(OSError, KeyError):
            path = Path(f"/proc/self/{name}")
            # The kernel shows this mask in hexadecimal without a prefix, and reads it only with one.
            text = values[name] if name == "oom_score_adj" else f"0x{int(values[name], 16):x}"
            if path.read_text().strip() != values[name]:
                path.write_text(text)


def _of_libc() -> list[Any]:
    """Return personality, attributes of prctl(2), priority of I/O and policy of NUMA memory."""
    library = ctypes.CDLL(None)
    found: list[Any] = [library.personality(ctypes.c_ulong(_ASK_PERSONALITY))]
    found += [library.prctl(number, 0, 0, 0, 0) for number in _OF_PRCTL]
    if numbers := _SYSTEM_CALLS.get(platform.machine()):
        get_io_priority, get_memory_policy = numbers
        found.append(library.syscall(get_io_priority, _IOPRIO_WHO_PROCESS, 0))
        mode, nodes = ctypes.c_int(), (ctypes.c_ulong * (_NODE_BITS // 8 // ctypes.sizeof(ctypes.c_ulong)))()
        library.syscall(get_memory_policy, ctypes.byref(mode), nodes, ctypes.c_ulong(_NODE_BITS), None, 0)
        found += [mode.value, bytes(nodes).hex().rstrip("0")]
    return found
