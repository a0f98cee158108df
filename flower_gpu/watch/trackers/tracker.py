"""What a tracker is given, and what it has to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from flower_gpu.apps.folder import RunFolder

Axis = Literal["round", "seconds"]
ROUND: Final[Axis] = "round"
SECONDS: Final[Axis] = "seconds"  # since the run has begun

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Point:
    """Figures of one moment.

    ``number``: points before this one, also of the run before it was resumed.
    ``axis``: what ``step`` counts: ``"round"`` or ``"seconds"``.
    ``step``: the round, or whole seconds since the run has begun.
    ``time``: Unix seconds.
    ``values``: the figures by name, such as ``train/loss``.
    """

    number: int
    axis: Axis
    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class FailedMessage:
    """A message to a client that failed.

    ``step``: the round; 0 where the message says none.
    ``time``: Unix seconds.
    ``text``: round, type of the message, client and error, in one line.
    """

    step: int
    time: float
    text: str


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows.

    ``folder``: where the run's files are.
    ``app``: the app's name.
    ``config``: what the run was started with, flat; ``app`` is in it, too.
    ``ids``: what :meth:`Tracker.start` returned when the run began; empty for a new run.
    """

    folder: RunFolder
    app: str
    config: Mapping[str, Value]
    ids: Mapping[str, str]

    @property
    def name(self) -> str:
        """What the run is called: its folder's name."""
        return self.folder.path.name


class Tracker(Protocol):
    """One tracker.

    The constructor is called before anything of the run starts: it imports the library, and raises
    :class:`~flower_gpu.errors.ConfigError` where the library cannot be used. The methods are called in one
    thread, one after the other, and may raise any exception.
    """

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open the tracker's own run, or go on with it.

        Returns its ids, and under ``see`` the address or the command by which to look at it.
        """

    def describe(self, config: Mapping[str, Value]) -> None:
        """Take what was not known at the start, such as the strategy."""

    def log(self, points: Sequence[Point]) -> None:
        """Take figures, the oldest first."""

    def failed(self, messages: Sequence[FailedMessage]) -> None:
        """Take failed messages, the oldest first."""

    def close(self, outcome: str) -> None:
        """End the tracker's own run; ``outcome`` is empty for a run that does not say how it has ended."""
