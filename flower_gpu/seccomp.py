"""Seccomp: a process gives up system calls for itself and all its children, for good and without root.

It covers what Landlock cannot: the network except TCP, keys, and calls that change other processes, or files
without write permission. seccomp(2) describes the interface.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

# linux/audit.h and asm/unistd.h. The numbers of system calls differ between these architectures.
_ARCHITECTURES: Final = MappingProxyType({"x86_64": 0xC000003E, "aarch64": 0xC00000B7})
_X32: Final = 0x40000000  # set in the numbers of the x32 ABI on x86_64
_NUMBERS: Final[Mapping[str, tuple[int | None, int | None]]] = MappingProxyType(
    {
        "socket": (41, 198),
        "sendto": (44, 206),
        "sendmsg": (46, 211),
        "sendmmsg": (307, 269),
        "prlimit64": (302, 261),
        "shmget": (29, 194),
        "shmat": (30, 196),
        "shmctl": (31, 195),
        "semget": (64, 190),
        "semop": (65, 193),
        "semtimedop": (220, 192),
        "semctl": (66, 191),
        "msgget": (68, 186),
        "msgsnd": (69, 189),
        "msgrcv": (70, 188),
        "msgctl": (71, 187),
        "mq_open": (240, 180),
        "mq_unlink": (241, 181),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
        "setxattr": (188, 5),
        "lsetxattr": (189, 6),
        "fsetxattr": (190, 7),
        "removexattr": (197, 14),
        "lremovexattr": (198, 15),
        "fremovexattr": (199, 16),
        "setxattrat": (463, 463),
        "removexattrat": (466, 466),
        "getxattr": (191, 8),
        "lgetxattr": (192, 9),
        "fgetxattr": (193, 10),
        "getxattrat": (464, 464),
        "listxattr": (194, 11),
        "llistxattr": (195, 12),
        "flistxattr": (196, 13),
        "listxattrat": (465, 465),
        "file_setattr": (469, 469),
        "chmod": (90, None),
        "fchmod": (91, 52),
        "fchmodat": (268, 53),
        "fchmodat2": (452, 452),
        "chown": (92, None),
        "fchown": (93, 55),
        "lchown": (94, None),
        "fchownat": (260, 54),
        "utimensat": (280, 88),
        "futimesat": (261, None),
        "utimes": (235, None),
        "utime": (132, None),
        "setpriority": (141, 140),
        "ioprio_set": (251, 30),
        "sched_setaffinity": (203, 122),
        "sched_setscheduler": (144, 119),
        "sched_setparam": (142, 118),
        "sched_setattr": (314, 274),
        "ioctl": (16, 29),
        "open": (2, None),
        "creat": (85, None),
        "openat": (257, 56),
        "openat2": (437, 437),
        "mknod": (133, None),
        "mknodat": (259, 33),
    }
)

#: Calls that some kernels lack, so programs have a fallback. They fail with ENOSYS.
_MISSING: Final = (
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "bpf", "perf_event_open"),
    *("add_key", "request_key", "keyctl", "mq_open", "mq_unlink"),
    *("shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl"),
    *("msgget", "msgsnd", "msgrcv", "msgctl"),
    "openat2",  # its flags are in memory, which a filter cannot read
)
_UNSUPPORTED: Final = (
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "file_setattr"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
    *("getxattr", "lgetxattr", "fgetxattr", "getxattrat"),
    *("listxattr", "llistxattr", "flistxattr", "listxattrat"),
)
#: Calls that change files which the process may be unable to open. They report success without an effect,
#: because with an error, each copy of a file would fail.
_WITHOUT_EFFECT: Final = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2"),
    *("chown", "fchown", "lchown", "fchownat"),
)
#: Calls that set dates, with the number of the argument for the dates. Without that argument they set the
#: present time, which stays allowed: pathlib's touch() uses it to check that a file exists.
_SETS_DATES: Final = MappingProxyType({"utimensat": 2, "futimesat": 2, "utimes": 1, "utime": 1})
#: Calls that change a process's share of the cores. They work for the process itself only. For other ids,
#: such as a library's own threads, they report success without an effect.
_SETS_SHARES: Final = ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
_PRIORITY_OF_PROCESS, _IO_PRIORITY_OF_PROCESS = 0, 1  # linux/resource.h, linux/ioprio.h
#: Types of ioctl of file systems (Documentation/userspace-api/ioctl/ioctl-number.rst): all file systems and
#: ext4, XFS, btrfs, F2FS, FAT, bcachefs, NILFS, Ceph, SMB. They can change files that are open for reading
#: only, and even access snapshots of files that the process cannot open.
_OF_FILE_SYSTEMS: Final = (*b"fvX", 0x94, 0xF5, *b"r", 0xBC, *b"n", 0x97, 0xCF)
_KIND_OF_IOCTL: Final = 0xFF00
#: A program with one of these bits runs as its owner or group.
_SETUID_OR_SETGID: Final = 0o6000
_CREATES: Final = os.O_CREAT | 0o20000000  # or __O_TMPFILE
_WRITES: Final = os.O_WRONLY | os.O_RDWR

_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_STREAM, _DATAGRAM = 1, 2
_SOCKET_TYPES: Final = 0xF  # the other bits are flags
_TCP, _UDP = 6, 17
_FAST_OPEN: Final = 0x20000000  # flag of sendto and similar calls that connects without connect()

# linux/seccomp.h and linux/filter.h
_SET_MODE_FILTER: Final = 1
_FOR_ALL_THREADS: Final = 1 << 0
_NEW_LISTENER: Final = 1 << 3
_FAIL_BY_ERRNO: Final = 1 << 4  # if a thread cannot be restricted
_WAIT_KILLABLE: Final = 1 << 5  # only a fatal signal interrupts a waiting call; Linux 5.19
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000  # with an errno in the low bits
_ASK: Final = 0x7FC00000
# The notification and the answers: struct seccomp_notif, seccomp_notif_resp and seccomp_notif_addfd
_QUESTION: Final = struct.Struct("=QIIiIQ6Q")
_ANSWER: Final = struct.Struct("=QqiI")
_ANSWER_WITH_FILE: Final = struct.Struct("=QIIII")
_RECEIVE, _SEND, _SEND_FILE = 0xC0502100, 0xC0182101, 0x40182103
_GO_ON: Final = 1
_AND_ANSWER: Final = 2
_LOAD: Final = 0x20
_AND: Final = 0x54
_EQUAL: Final = 0x15
_ANY_BIT: Final = 0x45
_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_SECCOMP: Final = MappingProxyType({"x86_64": 317, "aarch64": 277})
_SET_NO_NEW_PRIVS: Final = 38  # linux/prctl.h

_Line = tuple[int, int, int, int]  # code, how many lines to skip if true and if not, operand


class SeccompUnavailableError(Exception):
    """The kernel cannot restrict the system calls of this process. The text gives the reason."""


def check() -> None:
    """Raise SeccompUnavailableError if this host cannot restrict system calls."""
    _machine()
    if not Path("/proc/sys/kernel/seccomp/actions_avail").exists():
        raise SeccompUnavailableError("the kernel has no seccomp filters")


@dataclass(frozen=True)
class Opening:
    """A pending system call that opens a file. Its thread waits for the answer."""

    id: int
    thread: int  # thread id in the namespace of this process
    path_at: int  # address of the path in the memory of the calling process
    flags: int


def confine(*, network: bool = False, asks: bool = False) -> int:
    """Give up the network and calls that affect other processes or files. Unix sockets stay.

    ``network``: True to keep TCP, and UDP for looking up the names of hosts.
    ``asks``: True if the kernel shall ask before it opens an existing file for writing.

    Returns a descriptor for the process that answers with :func:`asked` and :func:`answer`. After the last
    copy of the descriptor is closed, such calls fail. Returns -1 if the kernel does not ask, also because
    another process already answers for this one.
    Raises SeccompUnavailableError if the kernel refuses the filter.
    """
    machine = _machine()
    lines = _program(machine, network, asks)
    code = b"".join(struct.pack("=HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("@HP", len(lines), ctypes.addressof(buffer))
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    flags = _FOR_ALL_THREADS | (_NEW_LISTENER | _FAIL_BY_ERRNO | _WAIT_KILLABLE if asks else 0)
    result: int = library.syscall(_SECCOMP[machine], _SET_MODE_FILTER, flags, program)
    if result < 0 and asks and ctypes.get_errno() == errno.EBUSY:  # a process can have only one listener
        return confine(network=network)
    if result < 0:
        raise SeccompUnavailableError(
            f"the kernel refuses a seccomp filter ({os.strerror(ctypes.get_errno())})"
        )
    return result if asks else -1


def asked(listener: int) -> Opening:
    """Return the next pending call. Raises OSError if its thread no longer waits."""
    buffer = bytearray(_QUESTION.size)
    fcntl.ioctl(listener, _RECEIVE, buffer)
    question, thread, _, number, _, _, *arguments = _QUESTION.unpack(buffer)
    numbers = dict(zip(_ARCHITECTURES, _NUMBERS["openat"], strict=True))
    first = 1 if number == numbers[_machine()] else 0  # the first argument of openat is a folder
    return Opening(question, thread, arguments[first], arguments[first + 1] & 0xFFFFFFFF)


def answer(listener: int, opening: Opening, file: int | None) -> None:
    """Let a pending call return a copy of an open file, or with None proceed with the rights of its process.

    Raises OSError on failure, for example if the process has too many open files.
    """
    if file is None:
        fcntl.ioctl(listener, _SEND, _ANSWER.pack(opening.id, 0, 0, _GO_ON))
    else:
        flags = opening.flags & os.O_CLOEXEC
        fcntl.ioctl(listener, _SEND_FILE, _ANSWER_WITH_FILE.pack(opening.id, _AND_ANSWER, file, 0, flags))


def _machine() -> str:
    machine = platform.machine()
    if machine not in _ARCHITECTURES or struct.calcsize("P") != 8:
        raise SeccompUnavailableError(f"the numbers of system calls on {machine} are not known here")
    return machine


def _program(machine: str, network: bool, asks: bool) -> list[_Line]:
    column = list(_ARCHITECTURES).index(machine)
    itself = _if_equal(0, [_allow()])
    answers = {
        **{name: [_refuse(errno.ENOSYS)] for name in _MISSING},
        **{name: [_refuse(errno.ENOTSUP)] for name in _UNSUPPORTED},
        **{name: [_refuse(0)] for name in _WITHOUT_EFFECT},
        **{name: _only_without(argument) for name, argument in _SETS_DATES.items()},
        **{name: [_argument(0), *itself, _refuse(0)] for name in _SETS_SHARES},
        "setpriority": _of_itself(_PRIORITY_OF_PROCESS),
        "ioprio_set": _of_itself(_IO_PRIORITY_OF_PROCESS),
        "prlimit64": [_argument(0), *itself, _refuse(errno.EPERM)],
        "ioctl": _ioctls(),
        "open": _opens(1, 2, asks),
        "openat": _opens(2, 3, asks),
        "creat": _without_flag(1, _SETUID_OR_SETGID),
        "mknod": _without_flag(1, _SETUID_OR_SETGID),
        "mknodat": _without_flag(2, _SETUID_OR_SETGID),
        "socket": _sockets(network),
        "sendto": _without_flag(3, _FAST_OPEN),
        "sendmsg": _without_flag(2, _FAST_OPEN),
        "sendmmsg": _without_flag(3, _FAST_OPEN),
    }
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        _refuse(errno.EPERM),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32),
        _refuse(errno.EPERM),
    ]
    for name, answer in answers.items():
        if (number := _NUMBERS[name][column]) is not None:
            lines += [(_EQUAL, 0, len(answer), number), *answer]
    return [*lines, _allow()]


def _sockets(network: bool) -> list[_Line]:
    refused = _refuse(errno.EACCES)
    inet = []
    if network:
        for kind, protocol in ((_STREAM, _TCP), (_DATAGRAM, _UDP)):
            checks = [_argument(2), *_if_equal(0, [_allow()]), *_if_equal(protocol, [_allow()])]
            inet += [_argument(1), (_AND, 0, 0, _SOCKET_TYPES), *_if_equal(kind, checks)]
    return [
        _argument(0),
        *_if_equal(_UNIX, [_allow()]),
        # Netlink with protocol 0, for the addresses of this host
        *_if_equal(_NETLINK, [_argument(2), *_if_equal(0, [_allow()]), refused]),
        *_if_equal(_INET, [*inet, refused]),
        *_if_equal(_INET6, [*inet, refused]),
        refused,
    ]


def _ioctls() -> list[_Line]:
    refused = [_refuse(errno.ENOTSUP)]
    kinds = [line for kind in _OF_FILE_SYSTEMS for line in _if_equal(kind << 8, refused)]
    return [_argument(1), (_AND, 0, 0, _KIND_OF_IOCTL), *kinds, _allow()]


def _opens(flags: int, mode: int, asks: bool) -> list[_Line]:
    # Without a flag that creates a file, the mode is an arbitrary value in a register.
    mode_check = _without_flag(mode, _SETUID_OR_SETGID)
    question = [(_ANY_BIT, 0, 1, _WRITES), (_RETURN, 0, 0, _ASK)] if asks else []
    return [_argument(flags), (_ANY_BIT, 0, len(mode_check), _CREATES), *mode_check, *question, _allow()]


def _of_itself(kind: int) -> list[_Line]:
    return [_argument(0), *_if_equal(kind, [_argument(1), *_if_equal(0, [_allow()])]), _refuse(0)]


def _only_without(pointer: int) -> list[_Line]:
    """Return lines that report success without an effect if a pointer is given."""
    low, high = _argument(pointer), (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * pointer + 4)
    return [low, *_if_equal(0, [high, *_if_equal(0, [_allow()])]), _refuse(0)]


def _without_flag(argument: int, flag: int) -> list[_Line]:
    return [_argument(argument), (_ANY_BIT, 0, 1, flag), _refuse(errno.EACCES), _allow()]


def _if_equal(value: int, then: list[_Line]) -> list[_Line]:
    return [(_EQUAL, 0, len(then), value), *then]


def _argument(number: int) -> _Line:
    return _LOAD, 0, 0, _ARGUMENTS_AT + 8 * number  # the low half, which holds an int


def _refuse(code: int) -> _Line:
    return _RETURN, 0, 0, _REFUSE | code


def _allow() -> _Line:
    return _RETURN, 0, 0, _ALLOW
