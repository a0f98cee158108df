"""What happens in a simulated run, as those hear of it who show it and write it down."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flower_gpu.errors import shortened

#: What a metric is: as in Flower's MetricRecord, and the texts that the NumPyClient API allows.
Metric = bool | int | float | str | None | list[int] | list[float]
Metrics = Mapping[str, Metric]

TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
#: The kind of an evaluation that sends no messages.
SERVER_EVALUATE: Final = "server-evaluate"
#: How the error of a message begins that has no reply.
NO_REPLY: Final = "no reply"
#: Why messages have failed whose replies the app has not asked for until its end.
NOT_PULLED: Final = f"{NO_REPLY} was pulled"


@dataclass(frozen=True)
class RunStarted:
    """A strategy has started.

    Parameters
    ----------
    strategy : str
        Name of its class.
    num_rounds : int or None
        How many rounds there will be, where it says so.
    can_resume : bool
        Whether it writes checkpoints, and goes on from one.
    """

    strategy: str
    num_rounds: int | None
    can_resume: bool = False


@dataclass(frozen=True)
class RunResumed:
    """The strategy goes on after a round of an earlier run.

    Parameters
    ----------
    server_round : int
        The last round that was finished then.
    """

    server_round: int


@dataclass(frozen=True)
class PhaseStarted:
    """Messages of one kind are about to be sent, for one round.

    Parameters
    ----------
    server_round : int or None
        The round, where there is one.
    kind : str
        The type of the messages.
    total : int or None
        How many messages, where that is known.
    """

    server_round: int | None
    kind: str
    total: int | None


@dataclass(frozen=True)
class PhaseGrew:
    """More messages have been sent than were announced.

    Parameters
    ----------
    server_round, kind
        Of the phase.
    total : int
        How many messages now.
    """

    server_round: int | None
    kind: str
    total: int


@dataclass(frozen=True)
class Replied:
    """The reply of one client is there, or there will be none.

    Parameters
    ----------
    server_round, kind
        Of the phase.
    partition : int or None
        The client; None where a reply is of no known one.
    error : str or None
        Why it failed.
    metrics : mapping
        What the client reports, where no strategy takes care of that.
    text : str
        All of what ``error`` has the first line of.
    traceback : str
        The worker's, if the client's code has raised an exception.
    """

    server_round: int | None
    kind: str
    partition: int | None
    error: str | None = None
    metrics: Metrics = field(default_factory=dict)
    text: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class PhaseFinished:
    """All messages of a kind for a round are answered, and the replies aggregated.

    Parameters
    ----------
    server_round, kind
        Of the phase.
    clients : int
        How many clients have answered.
    failed : int
        How many have not, or with an error.
    messages : int
        How many messages were sent.
    seconds : float or None
        How long it took, where that is known.
    metrics : mapping
        What the strategy has made of the replies.
    """

    server_round: int | None
    kind: str
    clients: int = 0
    failed: int = 0
    messages: int = 0
    seconds: float | None = None
    metrics: Metrics = field(default_factory=dict)


Event = RunStarted | RunResumed | PhaseStarted | PhaseGrew | Replied | PhaseFinished
OnEvent = Callable[[Event], None]


def clean(metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """Make metrics of Python's own types; a value that is no metric becomes its text."""
    return {str(key): plain(value) for key, value in metrics.items()}


def plain(value: Any) -> Any:
    """Make a metric of Python's own types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # a number of NumPy or torch
        try:
            return plain(value.item())
        except (TypeError, ValueError, RuntimeError):
            pass
    return shortened(str(value))


def finite(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers that are none become null, objects their text."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    found = plain(value)
    return None if isinstance(found, float) and not math.isfinite(found) else found
