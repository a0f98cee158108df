"""One rank: joins the others, runs the user's function, gives back its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flower_gpu.ranks import results
from flower_gpu.ranks.rendezvous import Rendezvous
from flower_gpu.workers import events
from flower_gpu.workers.call import load_task

if TYPE_CHECKING:
    from flower_gpu.ranks.function import Distributed


def main(
    rendezvous: Rendezvous, function: Distributed, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run the function among the others; runs in a worker of its own."""
    value = run(rendezvous, function, args, kwargs)
    return value if rendezvous.rank == 0 else results.part_of(value)


def run(
    rendezvous: Rendezvous,
    function: Distributed,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    part_of: Callable[[Any], results.Part] = results.part_of,
) -> Any:
    """Return what the function returned in this rank."""
    task = load_task(function.task)
    # With the function, its libraries: PyTorch is imported by now, and one that is not is of no use here.
    from flower_gpu.pytorch import group

    try:
        with group.joined(rendezvous.file, rendezvous.rank, rendezvous.world_size, rendezvous.settings):
            value = task(*args, **kwargs)
            group.check_num_examples(part_of(value).num_examples)
            return value
    except Exception as error:
        events.send("rank_failed", of_others=group.is_of_others(error))
        raise
