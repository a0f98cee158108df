"""One result of what several ranks returned: rank 0's, with the metrics of them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from flower_gpu.errors import InvalidResultError


@dataclass(frozen=True)
class Part:
    """The numbers in a rank's result: all that ranks but the first give back."""

    loss: float | None = None
    num_examples: int | None = None
    metrics: Mapping[Any, float] | None = None


def part_of(value: Any) -> Part:
    """Return the numbers in what a function returned; nothing where it is none of Flower's results."""
    if not (isinstance(value, tuple | list) and len(value) == 3 and isinstance(value[2], Mapping)):
        return Part()
    loss, num_examples, metrics = value
    return Part(
        float(loss) if _is_number(loss) else None,
        int(num_examples) if isinstance(num_examples, Integral) else None,
        numbers_in(metrics),
    )


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that can be averaged."""
    return {name: _plain(value) for name, value in metrics.items() if _is_number(value)}


def merged(values: Sequence[Any]) -> Any:
    """Return rank 0's result with metrics, and loss, averaged over the ranks.

    Raises
    ------
    InvalidResultError
        If they do not agree on the number of examples.
    """
    first, *others = values
    own = part_of(first)
    if own.metrics is None:
        return first
    parts = [own, *others]
    check_num_examples([part.num_examples for part in parts])
    loss, num_examples, metrics = first
    if own.loss is not None:
        loss = mean([part.loss for part in parts], loss)
    return loss, num_examples, {**metrics, **averaged([part.metrics or {} for part in parts])}


def averaged(metrics: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Return the mean of each metric that all ranks have; a number that all have alike stays what it is."""
    first = metrics[0]
    return {
        name: mean([each[name] for each in metrics], value)
        for name, value in first.items()
        if all(name in each for each in metrics)
    }


def mean(numbers: Sequence[float | None], own: Any) -> Any:
    """Return the mean of numbers, or ``own`` where they are all the same."""
    known = [number for number in numbers if number is not None]
    if all(number == known[0] for number in known):
        return own
    return sum(known) / len(known)


def check_num_examples(counts: Sequence[int | None]) -> None:
    """Refuse numbers of examples that differ.

    Raises
    ------
    InvalidResultError
        If they do.
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
