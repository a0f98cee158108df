"""How Flower's programs hear that there is something to do, in place of their questions every few seconds.

::

    who waits    for what              who wakes it                                    where
    SuperExec    a task                its SuperLink or SuperNode (Waker)              superexec
    SuperNode    a message             the ServerApp; a SuperNode that has found one   supernode
    SuperNode    its ClientApp's reply itself, when the last part is stored            supernode
    ServerApp    replies               the SuperNode that has sent one                 serverapp

A wake-up says "ask now", nothing else. Who is not woken asks at intervals, as in Flower, and ever more seldom
(:func:`wait_s`): a wake-up that is lost costs a wait.

Who wakes has the name of a socket. A name is new each time, and is passed on in the environment. The sockets
are in Linux's abstract namespace. Nothing is left of one when its process is killed, and nobody need know how
that process was started. Every account of the host can write to them, so the kernel says who has written:
only the same account and root wake.
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

#: The longest wait while there may be work: Flower's own.
LONGEST_S: Final = 3.0
#: When nothing came for so long, there is no work.
IDLE_AFTER_S: Final = 60.0
#: What a process has waited at least that was told of work.
TOLD_S: Final = 10.0

_PART: Final = 0.05  # of the time it has waited already: so much later something may be noticed

#: The name of the socket, for the process that is started next.
VARIABLE: Final = "FLOWER_GPU_WAKEUP"
#: The name of a group, and how many SuperNodes it has.
GROUP_VARIABLE: Final = "FLOWER_GPU_GROUP"

_IS_LINUX: Final = sys.platform == "linux"
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid: see unix(7)


def wait_s(waited_s: float, least_s: float, idle_s: float = LONGEST_S) -> float:
    """Return how long a process waits before it asks a SuperLink again: longer, the longer nothing has come.

    What a question costs the SuperLink is in docs/how-to/supernodes.md. ``waited_s`` is how
    long nothing came, ``least_s`` the shortest wait, ``idle_s`` the wait without work.
    """
    if waited_s >= IDLE_AFTER_S:
        return max(least_s, idle_s)
    return max(least_s, min(LONGEST_S, _PART * waited_s))


class Waker:
    """Wakes the process that is started next."""

    def __init__(self) -> None:
        self._name = _new_name()
        self._sender = _Sender()

    def announce(self) -> None:
        """Have processes that this one starts from now on find the name in their environment."""
        os.environ[VARIABLE] = self._name

    def wake(self) -> None:
        """Wake it; if it is not there yet, it looks by itself when it comes."""
        self._sender.wake([self._name])


class NodeGroup:
    """The SuperNodes that one command has started on this host, and the ServerApp where that is ours."""

    def __init__(self, name: str, nodes: int) -> None:
        self._name = name
        self._nodes = nodes
        self._own: str | None = None
        self._sender = _Sender()

    def join(self) -> WakeUps | None:
        """Become one of its SuperNodes; None if there are as many as there may be."""
        for name in self._names():
            with suppress(OSError):
                wake_ups = WakeUps(name)
                self._own = name
                return wake_ups
        return None

    def lead(self) -> WakeUps | None:
        """Become its ServerApp; None if there is one."""
        with suppress(OSError):
            return WakeUps(self._server)
        return None

    def wake_nodes(self) -> None:
        """Wake all its SuperNodes but this one."""
        self._sender.wake(name for name in self._names() if name != self._own)

    def wake_server(self) -> None:
        """Wake its ServerApp."""
        self._sender.wake([self._server])

    def _names(self) -> Iterable[str]:
        return (f"{self._name}-{number}" for number in range(self._nodes))

    @property
    def _server(self) -> str:
        return f"{self._name}-server"


def with_group(env: Mapping[str, str], nodes: int) -> dict[str, str]:
    """Return an environment with a new group of so many SuperNodes, if it has none."""
    return {GROUP_VARIABLE: f"{_new_name()}:{nodes}", **env}


def group_of(environ: Mapping[str, str]) -> NodeGroup | None:
    """Return the group of this process; None where it is in none."""
    name, sign, nodes = environ.get(GROUP_VARIABLE, "").partition(":")
    return NodeGroup(name, int(nodes)) if sign and nodes.isdecimal() and _IS_LINUX else None


class _Sender:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if _IS_LINUX else None

    def wake(self, names: Iterable[str]) -> None:
        if self._socket is None:
            return
        for name in names:
            with suppress(OSError):  # nobody is there, or many wake-ups are, and one more says nothing
                self._socket.sendto(b"\n", socket.MSG_DONTWAIT, _address(name))


class WakeUps:
    """What a process is woken by; raises OSError if the name is taken, by another process."""

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
        """Wait for a wake-up, and take it; tells whether there was one.

        One that came before is there still. Each is taken by one call, since each stands for a task.
        """
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            if not poll.poll(left_s * 1000):
                return False
            if self._sender() in (os.getuid(), 0):
                return True
            time.sleep(min(left_s, 0.1))  # whoever writes this: it takes no processor time
        return False

    def clear(self) -> None:
        """Take all that have come."""
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(1)

    def _sender(self) -> int | None:
        with suppress(BlockingIOError):
            _, extras, _, _ = self._socket.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            for level, kind, data in extras:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    return int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1])
        return None


def found() -> WakeUps | None:
    """Return the wake-ups of this process's parent; None where it wakes nobody.

    They are taken out of the environment: processes below this one have other parents.
    """
    name = os.environ.pop(VARIABLE, None)
    with suppress(OSError):
        return WakeUps(name) if name and _IS_LINUX else None
    return None


def _new_name() -> str:
    return f"flower-gpu-{secrets.token_hex(16)}"


def _address(name: str) -> str:
    return f"\0{name}"


def call_after(where: str, method: str, then: Callable[[], object]) -> bool:
    """Have something called after each call of a method; tells whether there is such a method.

    ``where`` is its class, as ``module:name``. Another version of Flower may lack it.
    """
    called = private_names.find(f"{where}.{method}")
    if called is None:
        return False
    kind = private_names.find(where)

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = called(*args, **kwargs)
        then()
        return result

    setattr(kind, method, call)
    return True
