"""How a SuperNode or SuperLink of ours wakes its ``flower-superexec``, which else asks for tasks forever.

::

    parent (SuperNode, SuperLink)                     flower-superexec
      Waker: a new name, in the environment  ──>        WakeUps: a socket of that name
      a task is there: an empty message      ──>        wakes; asks its parent for the task

The socket is a Unix socket in Linux's abstract namespace. Nothing is left of it when its process is killed,
and the parent need not know how the process was started. Every account of the host can write to it, so the
kernel says who has written: only the same account and root wake. Nobody else knows the name beforehand.
"""

from __future__ import annotations

import functools
import importlib
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

#: The name of the socket, for the process that is started next.
VARIABLE: Final = "FLOWER_GPU_WAKEUP"

_IS_LINUX: Final = sys.platform == "linux"
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid: see unix(7)


class Waker:
    """The side of the parent."""

    def __init__(self) -> None:
        self._name = f"flower-gpu-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if _IS_LINUX else None

    def announce(self) -> None:
        """Have processes that this one starts from now on find the name in their environment."""
        if self._socket is not None:
            os.environ[VARIABLE] = self._name

    def wake(self) -> None:
        """Wake who waits; who is not there yet looks by itself when it comes."""
        if self._socket is not None:
            with suppress(OSError):  # nobody is there, or many wake-ups are, and one more says nothing
                self._socket.sendto(b"\n", socket.MSG_DONTWAIT, _address(self._name))


class WakeUps:
    """The side of the process that waits.

    Raises OSError if the name is taken, by another process with the same parent.
    """

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


def _address(name: str) -> str:
    return f"\0{name}"


def call_after(where: tuple[str, str], method: str, then: Callable[[], object]) -> bool:
    """Have something called after each call of a method; tells whether there is such a method.

    ``where`` is its class: the module, and the name there. Another version of Flower may lack it.
    """
    module, name = where
    try:
        kind = getattr(importlib.import_module(module), name)
        called = getattr(kind, method)
    except (ImportError, AttributeError):
        return False

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = called(*args, **kwargs)
        then()
        return result

    setattr(kind, method, call)
    return True
