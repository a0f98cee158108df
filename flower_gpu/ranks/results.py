"""Makes one result, or one error, of those of several ranks.

The result is rank 0's, with the metrics of them all. When the failure of one rank makes the others fail as
well, the error names the one that failed first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from flower_gpu.errors import (
    InvalidResultError,
    RankError,
    WorkerDiedError,
    WorkerTaskError,
    WorkerTimeoutError,
    text_of,
)
from flower_gpu.workers.call_end import WorkerStoppedError


@dataclass(frozen=True)
class RankNumbers:
    """The numbers in a rank's result: all that ranks but the first give back."""

    num_examples: int | None = None
    metrics: Mapping[Any, float] | None = None  # the loss is that without a name


def part_of(value: Any) -> RankNumbers:
    """Return the numbers in a function's result; nothing if it is none of Flower's results."""
    if not (isinstance(value, tuple | list) and len(value) == 3 and isinstance(value[2], Mapping)):
        return RankNumbers()
    loss, num_examples, metrics = value
    count = int(num_examples) if isinstance(num_examples, Integral) else None
    return RankNumbers(count, numbers_in({**metrics, None: loss}))


def numbers_in(metrics: Mapping[Any, Any]) -> dict[Any, float]:
    """Return the metrics that can be averaged."""
    return {name: _plain(value) for name, value in metrics.items() if _is_number(value)}


def merged(values: Sequence[Any]) -> Any:
    """Return rank 0's result with metrics, and loss, averaged over the ranks.

    Raises InvalidResultError if they do not agree on the number of examples.
    """
    first, *others = values
    own = part_of(first)
    if own.metrics is None:
        return first
    parts = [own, *others]
    check_num_examples([part.num_examples for part in parts])
    loss, num_examples, metrics = first
    means = averaged([part.metrics or {} for part in parts])
    return means.pop(None, loss), num_examples, {**metrics, **means}


def averaged(metrics: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Return the mean of each metric that all ranks have; equal numbers do not change."""
    first = metrics[0]
    means = {}
    for name, own in first.items():
        if all(name in each for each in metrics):
            numbers = [each[name] for each in metrics]
            means[name] = own if all(number == own for number in numbers) else sum(numbers) / len(numbers)
    return means


def check_num_examples(counts: Sequence[int | None]) -> None:
    """Refuse numbers of examples that differ.

    Raises InvalidResultError if they do.
    """
    told = {count for count in counts if count is not None}
    if len(told) > 1:
        text = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts) if count is not None)
        raise InvalidResultError(
            f"the ranks return different numbers of examples ({text}). Return the number of all examples of "
            "this client, such as len(dataset), or flower_gpu.pytorch.distributed.total(n) of a rank's own"
        )


def _is_number(value: Any) -> bool:
    # Scalars of numpy and of PyTorch on the way; theirs may be texts, dates or complex, too.
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return isinstance(value, Real) and not isinstance(value, bool)


def _plain(value: Any) -> float:
    number = value.item() if hasattr(value, "item") else value
    return number if isinstance(number, int) else float(number)


# NCCL's watchdog ends a process whose partner does not answer, and says so in its output.
_WATCHDOG: Final = re.compile(
    r"Watchdog caught collective|taking the entire process down|WorkNCCL::checkTimeout"
)
_SAME_STEPS: Final = "Ranks must all take the same steps; timeout_s= of distributed says how long they wait"
_FRAME: Final = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)


@dataclass(frozen=True)
class End:
    """The end of a rank, with a value or an error."""

    rank: int
    label: str  # its name in messages
    value: Any
    error: BaseException | None
    at: float  # on the clock of time.monotonic
    says_others: bool = False  # it says itself that another rank did not answer

    @property
    def is_last_word(self) -> bool:
        """Whether this is the reason for the call's failure, before all other ranks' errors."""
        return not (self.is_of_others or isinstance(self.error, WorkerTimeoutError))

    @property
    def is_of_others(self) -> bool:
        """Whether it failed because another rank did."""
        if self.says_others or isinstance(self.error, WorkerStoppedError):
            return True
        return isinstance(self.error, WorkerDiedError) and _WATCHDOG.search(self.error.tail) is not None


def of_all(ends: Sequence[End]) -> BaseException:
    """Return the error of a call whose ranks have ended like this: it names the one that failed first."""
    failed = sorted((end for end in ends if end.error is not None), key=lambda end: end.at)
    own = [end for end in failed if not end.is_of_others]
    timed_out = [end for end in own if isinstance(end.error, WorkerTimeoutError)]
    if own and len(timed_out) < len(own):
        return _error(next(end for end in own if end not in timed_out))
    if timed_out:
        return _late([*timed_out, *(end for end in failed if isinstance(end.error, WorkerStoppedError))])
    # No rank failed by itself: the others waited for a rank that still ran when they gave up.
    waited = [end for end in failed if not isinstance(end.error, WorkerStoppedError)]
    hung = [end for end in failed if isinstance(end.error, WorkerStoppedError)]
    if waited and hung:
        names = " and ".join(f"{end.label} ({where(end)})" for end in hung)
        text = f"{names} did not answer: {waited[0].label} waited for it in vain"
        cause = waited[0].error
        return _caused(f"{text} ({text_of(cause)}). {_SAME_STEPS}", hung[0].rank, cause)
    if waited:
        return _in_vain(waited[0])
    return _error(hung[0])


def where(end: End) -> str:
    """Return where the main thread of a rank was when it was ended, as far as it could tell."""
    found = _FRAME.search(str(end.error))
    return f"at {found['file']}:{found['line']} in {found['name']}" if found else "where it could not say"


def _error(end: End) -> BaseException:
    error = end.error
    assert error is not None
    if not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit: not the rank's
        return error
    names_it = isinstance(error, WorkerDiedError | WorkerTaskError)
    text = str(error) if names_it else f"{end.label}: {text_of(error)}"
    return _caused(text, end.rank, error)


def _in_vain(end: End) -> BaseException:
    """Return the error of a rank that speaks of the others, where none of them was lost or late."""
    if isinstance(end.error, WorkerDiedError):
        return _error(end)
    text = f"{end.label}: {text_of(end.error)}. No other rank failed before. {_SAME_STEPS}"
    return _caused(text, end.rank, end.error)


def _late(ends: Sequence[End]) -> WorkerTimeoutError:
    names = "; ".join(f"{end.label} was {where(end)}" for end in sorted(ends, key=lambda end: end.rank))
    return WorkerTimeoutError(
        f"no result within timeout_s: {names}. All ranks were ended. Raise timeout_s if they were only slow"
    )


def _caused(text: str, rank: int, cause: BaseException | None) -> RankError:
    error = RankError(text, rank)
    error.__cause__ = cause
    return error
