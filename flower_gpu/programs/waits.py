"""Wake-ups between Flower's programs on one host, so that they need not poll every few seconds.

Flower's programs poll: each asks its SuperLink or SuperNode every few seconds if there is work. Polling often
loads the SuperLink, and polling seldom delays each round. So here a program that creates work wakes the
program that waits for it::

    waiting      for                   woken by                                        where
    SuperExec    a task                its SuperLink or SuperNode (Waker)              superexec
    SuperNode    a message             the ServerApp; a SuperNode that got a message   supernode
    SuperNode    its ClientApp's reply itself, when the last part is stored            supernode
    ServerApp    replies               the SuperNode that has sent a reply             serverapp

A wake-up only says "ask now". A process that is not woken still polls, as in Flower, at intervals that grow
with the time without work (:func:`wait_s`). So a lost wake-up only costs time: the process notices its work
at the next poll. Wake-ups may come early, late, or twice without harm.

The objects: a waiting process binds a datagram socket (:class:`WakeUps`). The process that wakes it sends one
byte to that socket, by a :class:`Waker` for the process that it starts next, or by a :class:`NodeGroup` for
the SuperNodes and the ServerApp of one command.

A sender needs only the name of the socket. Each name is random, and child processes get it in their
environment. The sockets are in Linux's abstract namespace. The kernel removes such a socket when its process
is killed, and the sender need not know how that process was started. Every account of the host can write to
an abstract socket. So the receiver asks the kernel for the sender's account (``SO_PASSCRED``), and only the
same account and root wake it.
"""

from __future__ import annotations

import functools
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from flower_gpu.flower import private_names

#: The longest wait while there may be work. It is Flower's own interval.
LONGEST_S: Final = 3.0
#: A process without work for this long counts as idle.
IDLE_AFTER_S: Final = 60.0
#: After a wake-up, a process counts as having waited no longer than this, so it polls often again.
TOLD_S: Final = 10.0

# The next wait as a fraction of the time since the last work. It limits the relative delay of a lost wake-up.
_WAIT_FRACTION: Final = 0.05

#: Environment variable with the name of the socket that the next process binds.
VARIABLE: Final = "FLOWER_GPU_WAKEUP"
#: Environment variable with the name of a group and its number of SuperNodes.
GROUP_VARIABLE: Final = "FLOWER_GPU_GROUP"

_IS_LINUX: Final = sys.platform == "linux"
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid: see unix(7)


def wait_s(waited_s: float, least_s: float, idle_s: float = LONGEST_S) -> float:
    """Return the seconds until a process polls its SuperLink again; they grow with the time without work.

    docs/how-to/supernodes.md says what a poll costs the SuperLink.

    ``waited_s``: seconds since the last work came.
    ``least_s``: shortest wait.
    ``idle_s``: wait of an idle process.
    """
    if waited_s >= IDLE_AFTER_S:
        return max(least_s, idle_s)
    return max(least_s, min(LONGEST_S, _WAIT_FRACTION * waited_s))


class Waker:
    """A sender of wake-ups to the process that this process starts next."""

    def __init__(self) -> None:
        self._name = _new_name()
        self._sender = _Sender()

    def announce(self) -> None:
        """Put the name of the socket into the environment of all processes that this process starts later."""
        os.environ[VARIABLE] = self._name

    def wake(self) -> None:
        """Wake the process. If it has not started yet, it asks for work when it starts."""
        self._sender.wake([self._name])


class NodeGroup:
    """The SuperNodes that one command has started on this host, and the ServerApp if we started it too."""

    def __init__(self, name: str, nodes: int) -> None:
        self._name = name
        self._nodes = nodes
        self._own_name: str | None = None
        self._sender = _Sender()

    def join(self) -> WakeUps | None:
        """Join as a SuperNode and return its wake-ups; None if the group is full."""
        for name in self._names():
            with suppress(OSError):
                wake_ups = WakeUps(name)
                self._own_name = name
                return wake_ups
        return None

    def lead(self) -> WakeUps | None:
        """Join as the ServerApp and return its wake-ups; None if the group has a ServerApp."""
        with suppress(OSError):
            return WakeUps(self._server)
        return None

    def wake_nodes(self) -> None:
        """Wake all SuperNodes of the group except this process."""
        self._sender.wake(name for name in self._names() if name != self._own_name)

    def wake_server(self) -> None:
        """Wake the ServerApp of the group."""
        self._sender.wake([self._server])

    def _names(self) -> Iterable[str]:
        return (f"{self._name}-{number}" for number in range(self._nodes))

    @property
    def _server(self) -> str:
        return f"{self._name}-server"


def with_group(env: Mapping[str, str], nodes: int) -> dict[str, str]:
    """Return the environment, with a new group of ``nodes`` SuperNodes unless it already names a group."""
    return {GROUP_VARIABLE: f"{_new_name()}:{nodes}", **env}


def group_of(environ: Mapping[str, str]) -> NodeGroup | None:
    """Return the group of this process, or None."""
    name, sign, nodes = environ.get(GROUP_VARIABLE, "").partition(":")
    return NodeGroup(name, int(nodes)) if sign and nodes.isdecimal() and _IS_LINUX else None


class _Sender:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if _IS_LINUX else None

    def wake(self, names: Iterable[str]) -> None:
        if self._socket is None:
            return
        for name in names:
            # Either no process has bound the name, or the socket is full of wake-ups, so another wake-up has
            # no effect.
            with suppress(OSError):
                self._socket.sendto(b"\n", socket.MSG_DONTWAIT, _address(name))


class WakeUps:
    """The socket by which a process is woken; raises OSError if another process has bound the name."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(_address(name))
        except OSError:
            self._socket.close()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Wait for a wake-up and consume it. Return True if one came.

        Wake-ups that came before the call count. Each call consumes only one, because each stands for a task.
        """
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while (remaining_s := deadline - time.monotonic()) > 0:
            if not poll.poll(remaining_s * 1000):
                return False
            if self._sender() in (os.getuid(), 0):
                return True
            # Another account has written. The pause keeps it from taking processor time by writing more.
            time.sleep(min(remaining_s, 0.1))
        return False

    def clear(self) -> None:
        """Consume all wake-ups that have come."""
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(1)

    def _sender(self) -> int | None:
        """Consume a wake-up and return the user id of its sender."""
        with suppress(BlockingIOError):
            _, extras, _, _ = self._socket.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            for level, kind, data in extras:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    return int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1])
        return None


def of_environment() -> WakeUps | None:
    """Return the wake-ups by this process's parent, or None if the parent sends none.

    Their name is removed from the environment, because the children of this process have another parent.
    """
    name = os.environ.pop(VARIABLE, None)
    with suppress(OSError):
        return WakeUps(name) if name and _IS_LINUX else None
    return None


def _new_name() -> str:
    return f"flower-gpu-{secrets.token_hex(16)}"


def _address(name: str) -> str:
    return f"\0{name}"


def call_after(class_path: str, method: str, then: Callable[[], object]) -> bool:
    """Call ``then`` after each call of a method. Return False if this version of Flower lacks the method.

    ``class_path``: class of the method, as ``module:name``.
    """
    original = private_names.find(f"{class_path}.{method}")
    if original is None:
        return False
    kind = private_names.find(class_path)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then()
        return result

    setattr(kind, method, call)
    return True
