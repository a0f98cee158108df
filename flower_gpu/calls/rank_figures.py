"""What the ranks of a call tell of their GPUs, for the worker that stands for them all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flower_gpu.workers import events


class RankFigures:
    """Collects what ranks tell, each of its own GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}
        self._gpus: dict[str, dict[str, Any]] = {}
        self._with_cuda: set[int] = set()
        self._ran_out = False

    def take(self, rank: int, event: Mapping[str, Any]) -> bool:
        """Take an event if it is about a GPU; tell whether it was."""
        kind = event.get("event")
        fields = {key: value for key, value in event.items() if key != "event"}
        with self._lock:
            if kind == "gpu_used":
                self._used.update(fields["used"])
            elif kind == "gpu_memory":
                self._gpus.update({told["uuid"]: told for told in fields["gpus"]})
                if fields["cuda"]:
                    self._with_cuda.add(rank)
            elif kind == "cuda_started":
                if not self._with_cuda:  # of the call, which is the first of them
                    events.send("cuda_started")
                self._with_cuda.add(rank)
            elif kind == "out_of_memory":
                if not self._ran_out:
                    events.send("out_of_memory", **fields, rank=rank)
                self._ran_out = True
            elif kind == "no_cuda":
                events.send("no_cuda", **fields)
            else:
                return kind in ("task_started", "worker_result")
        return True

    def used(self) -> dict[str, int]:
        """Return the bytes that ranks use, by UUID."""
        with self._lock:
            return dict(self._used)

    def gpu(self, uuid: str) -> dict[str, Any] | None:
        """Return a rank's ``gpu_memory`` figures of a GPU."""
        with self._lock:
            return self._gpus.get(uuid)

    @property
    def is_on_cuda(self) -> bool:
        """Whether a rank has used CUDA."""
        return bool(self._with_cuda)


_current: RankFigures | None = None


@contextmanager
def collected() -> Iterator[RankFigures]:
    """Collect what ranks tell in the block; :func:`current` has it afterwards, too, as the call ends then."""
    global _current
    _current = RankFigures()
    yield _current


def current() -> RankFigures | None:
    """Return what ranks of this worker's call have told; None where it has no ranks."""
    return _current


def begin() -> None:
    """Forget what ranks of an earlier call have told."""
    global _current
    _current = None
