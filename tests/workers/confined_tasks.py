"""Tasks of confined workers that write what no honest one does. Imported in the worker only."""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

from flower_gpu.workers import worker
from flower_gpu.workers.call_end import Outcome
from flower_gpu.workers.own_process import facts


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


class BombError(Exception):
    """Likewise."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, self.args


def value(given: Any) -> Any:
    return given


def raises(marker: str) -> None:
    raise BombError(marker)


def raises_ours(name: str) -> None:
    from flower_gpu import errors

    raise getattr(errors, name)("as it is said there")


def returns_object(marker: str) -> Bomb:
    return Bomb(marker)


def _leaves(data: bytes) -> None:
    """Leave these bytes in the place of the reply."""
    worker.leave_reply = lambda _, descriptor: os.pwrite(descriptor, data, 0)


def leaves_pickle(marker: str, shape: str) -> None:
    """Leave a pickle in the forms of other replies."""
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


def sends(*told: dict[str, Any]) -> str:
    """Send events, and then return something."""
    for event in told:
        sink = facts.sink
        assert sink is not None
        sink(event)
    return "done"


def writes_much(size: int) -> str:
    """Write one line of so many bytes into the pipe of events."""
    sink = facts.sink
    assert sink is not None
    sink({"event": "x" * size})
    return "done"
