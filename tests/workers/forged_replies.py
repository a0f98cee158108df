"""Tasks that send what no honest confined worker sends. They are imported in the worker only."""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

from flower_gpu.workers import worker
from flower_gpu.workers.call_end import Outcome
from flower_gpu.workers.own_process import facts


class Bomb:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


class BombError(Exception):
    """An error that creates a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, self.args


def value(argument: Any) -> Any:
    return argument


def raises(marker: str) -> None:
    raise BombError(marker)


def raises_ours(name: str) -> None:
    from flower_gpu import errors

    raise getattr(errors, name)("the text of the error")


def returns_object(marker: str) -> Bomb:
    return Bomb(marker)


def _leaves(data: bytes) -> None:
    """Write these bytes in place of the reply."""
    worker.leave_reply = lambda _, descriptor: os.pwrite(descriptor, data, 0)


def leaves_pickle(marker: str, shape: str) -> None:
    """Reply with a pickle, in several forms that other replies have."""
    bomb = pickle.dumps(Bomb(marker))
    if shape == "bare":
        return _leaves(bomb)
    if shape == "error":
        head = pickle.dumps(Outcome(error_type="x.Y", error_pickle=bomb))
        return _leaves(struct.pack("<8sQ", b"fgplain1", len(head)) + head)
    from flower_gpu.workers import transport

    def leave(_: object, descriptor: int) -> None:
        transport.write_reply(Outcome(value=Bomb(marker)), descriptor)

    worker.leave_reply = leave
    return None


def sends(*sent: dict[str, Any]) -> str:
    """Send events, then return a value."""
    for event in sent:
        sink = facts.sink
        assert sink is not None
        sink(event)
    return "done"


def writes_much(size: int) -> str:
    """Write one line of ``size`` bytes into the pipe of events."""
    sink = facts.sink
    assert sink is not None
    sink({"event": "x" * size})
    return "done"
