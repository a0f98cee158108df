"""Combines the results or errors of all ranks into one.

The result is the result of rank 0, with the metrics of all ranks. If the failure of one rank makes the others
fail, the error names the rank that failed first.
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
    """The numbers in a rank's result. All ranks except rank 0 return only these."""

    num_examples: int | None = None
    metrics: Mapping[Any, float] | None = None  # the key of the loss is None


def part_of(value: Any) -> RankNumbers:
    """Return the numbers in a function's result. They are empty if it is not a result of Flower."""
    if not (isinstance(value, tuple | list) and len(value) == 3 and isinstance(value[2], Mapping)):
        return RankNumbers()
    loss, num_examples, metrics = value
    count = int(num_examples) if isinstance(num_examples, Integral) else None
    return RankNumbers(count, numbers_in({**metrics, None: loss}))


def numbers_in(metrics: Mapping[Any, Any]) -> dict[Any, float]:
    """Return the numeric metrics, which can be averaged."""
    return {name: _plain(value) for name, value in metrics.items() if _is_number(value)}


def merged(values: Sequence[Any]) -> Any:
    """Return the result of rank 0, with metrics and loss averaged over the ranks.

    Raises InvalidResultError if the ranks return different numbers of examples.
    """
    first, *others = values
    first_part = part_of(first)
    if first_part.metrics is None:
        return first
    parts = [first_part, *others]
    check_num_examples([part.num_examples for part in parts])
    loss, num_examples, metrics = first
    means = averaged([part.metrics or {} for part in parts])
    return means.pop(None, loss), num_examples, {**metrics, **means}


def averaged(metrics: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Return the mean of each metric that all ranks have. Equal numbers stay exactly the same."""
    means = {}
    for name, first in metrics[0].items():
        if all(name in metrics_of_rank for metrics_of_rank in metrics):
            numbers = [metrics_of_rank[name] for metrics_of_rank in metrics]
            are_equal = all(number == first for number in numbers)
            means[name] = first if are_equal else sum(numbers) / len(numbers)
    return means


def check_num_examples(counts: Sequence[int | None]) -> None:
    """Raise InvalidResultError if the ranks return different numbers of examples."""
    different = {count for count in counts if count is not None}
    if len(different) > 1:
        text = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts) if count is not None)
        raise InvalidResultError(
            f"the ranks return different numbers of examples ({text}). Return the number of all examples of "
            "this client, such as len(dataset), or flower_gpu.pytorch.distributed.total(n) of a rank's own"
        )


def _is_number(value: Any) -> bool:
    # Scalars of numpy and PyTorch are converted first, because they may also be texts, dates or complex
    # numbers.
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return isinstance(value, Real) and not isinstance(value, bool)


def _plain(value: Any) -> float:
    number = value.item() if hasattr(value, "item") else value
    return number if isinstance(number, int) else float(number)


# NCCL's watchdog ends a process if another rank does not answer, and prints one of these texts.
_WATCHDOG: Final = re.compile(
    r"Watchdog caught collective|taking the entire process down|WorkNCCL::checkTimeout"
)
_SAME_STEPS: Final = "Ranks must all take the same steps; timeout_s= of distributed says how long they wait"
_FRAME: Final = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)


@dataclass(frozen=True)
class End:
    """The end of a rank, with a value or an error."""

    rank: int
    label: str  # name for messages
    value: Any
    error: BaseException | None
    at: float  # on the clock of time.monotonic
    blames_others: bool = False  # the rank reported that another rank did not answer

    @property
    def is_decisive(self) -> bool:
        """True if the error is the reason for the call's failure, whatever the other ranks report."""
        return not (self.is_of_others or isinstance(self.error, WorkerTimeoutError))

    @property
    def is_of_others(self) -> bool:
        """True if the rank failed because another rank did."""
        if self.blames_others or isinstance(self.error, WorkerStoppedError):
            return True
        return isinstance(self.error, WorkerDiedError) and _WATCHDOG.search(self.error.tail) is not None


def combined_error(ends: Sequence[End]) -> BaseException:
    """Return the error of a call with failed ranks. It names the rank that failed first."""
    failed = sorted((end for end in ends if end.error is not None), key=lambda end: end.at)
    by_themselves = [end for end in failed if not end.is_of_others]
    timed_out = [end for end in by_themselves if isinstance(end.error, WorkerTimeoutError)]
    if by_themselves and len(timed_out) < len(by_themselves):
        return _error(next(end for end in by_themselves if end not in timed_out))
    if timed_out:
        return _late([*timed_out, *(end for end in failed if isinstance(end.error, WorkerStoppedError))])
    # No rank failed by itself. Some gave up waiting for ranks that were still running.
    waited = [end for end in failed if not isinstance(end.error, WorkerStoppedError)]
    hung = [end for end in failed if isinstance(end.error, WorkerStoppedError)]
    if waited and hung:
        names = " and ".join(f"{end.label} ({where(end)})" for end in hung)
        text = f"{names} did not answer: {waited[0].label} waited for it in vain"
        cause = waited[0].error
        return _caused(f"{text} ({text_of(cause)}). {_SAME_STEPS}", hung[0].rank, cause)
    if waited:
        return _unexplained(waited[0])
    return _error(hung[0])


def where(end: End) -> str:
    """Return the position of a rank's main thread when the rank was ended."""
    frame = _FRAME.search(str(end.error))
    return f"at {frame['file']}:{frame['line']} in {frame['name']}" if frame else "where it could not say"


def _error(end: End) -> BaseException:
    error = end.error
    assert error is not None
    if not isinstance(error, Exception):  # a KeyboardInterrupt or SystemExit of this process, not of the rank
        return error
    names_rank = isinstance(error, WorkerDiedError | WorkerTaskError)
    text = str(error) if names_rank else f"{end.label}: {text_of(error)}"
    return _caused(text, end.rank, error)


def _unexplained(end: End) -> BaseException:
    """Return the error of a rank that blames the others, although no other rank failed or hung."""
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
