"""The ways to run one call in a process of its own, as a table.

Each way is a function that prepares a caller and returns what runs one call there: it takes the name of
the call and the weights, and gives ``(pid, weights)``. What a way needs is imported when it is prepared, so
that a caller holds nothing of the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.shared.weights import Weights

#: No way, but what idle memory is compared with: a Flower client without torch, fits and weights.
PLAIN = "plain"

Run = Callable[[str, Weights], tuple[int, Weights]]


@dataclass(frozen=True)
class Way:
    """How a caller runs calls.

    Parameters
    ----------
    prepare : callable
        Called once in each caller.
    start_method : str, optional
        That of flower-gpu, where the way is ours.
    package : str, optional
        What it needs beside Python and flower-gpu.
    slow : bool
        Pays for imports in each call: seconds, so it is run less often.
    settle_s : float
        Pause after a call, not part of its time: the way leaves something running that would slow down
        the next one.
    """

    prepare: Callable[[], Run]
    start_method: str | None = None
    package: str | None = None
    slow: bool = False
    settle_s: float = 0.0


def in_process() -> Run:
    from benchmarks.isolation import tasks

    return lambda call, weights: tasks.CALLS[call](weights)


def with_manager(target: Callable[..., None], *args: Any) -> dict[str, Any]:
    """Run one call as articles about Flower and GPU memory do: a Manager and a spawned Process for each.

    The weights are an argument of the Process, the results come through the Manager's dictionary.
    """
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    manager = context.Manager()
    results = manager.dict()
    process = context.Process(target=target, args=(*args, results))
    process.start()
    process.join()
    process.close()
    return results.copy()


def with_pipe(target: Callable[..., None], *args: Any) -> Any:
    """Run one call in a spawned Process that sends its result through a Pipe."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    ours.close()
    return result


def article() -> Run:
    from benchmarks.isolation import tasks

    def run(call: str, weights: Weights) -> tuple[int, Weights]:
        results = with_manager(tasks.into_dict, call, weights)
        return results["pid"], results["weights"]

    return run


def spawn() -> Run:
    from benchmarks.isolation import tasks

    def run(call: str, weights: Weights) -> tuple[int, Weights]:
        result: tuple[int, Weights] = with_pipe(tasks.into_pipe, call, weights)
        return result

    return run


def executor() -> Run:
    """Keep one executor, as its documentation does; each of its processes ends after one call."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from benchmarks.isolation import tasks

    pool = ProcessPoolExecutor(
        max_workers=1, max_tasks_per_child=1, mp_context=multiprocessing.get_context("spawn")
    )
    return lambda call, weights: pool.submit(tasks.CALLS[call], weights).result()


def loky() -> Run:
    """Shut the executor down after each call: nothing else makes it give memory back."""
    from loky import get_reusable_executor

    from benchmarks.isolation import tasks

    def run(call: str, weights: Weights) -> tuple[int, Weights]:
        pool = get_reusable_executor(max_workers=1)
        result: tuple[int, Weights] = pool.submit(tasks.CALLS[call], weights).result()
        pool.shutdown(wait=True)
        return result

    return run


def ours(start_method: str) -> Run:
    from flower_gpu import run_in_worker

    names = {"update": "benchmarks.isolation.tasks:update", "return": "benchmarks.isolation.tasks:untouched"}

    def run(call: str, weights: Weights) -> tuple[int, Weights]:
        result: tuple[int, Weights] = run_in_worker(names[call], weights, start_method=start_method)
        return result

    return run


def ours_fork() -> Run:
    from benchmarks.isolation import tasks  # noqa: F401 - fork is for a process that has imported its app, as flwr-clientapp has

    return ours("fork")


def ours_guarded() -> Run:
    """As on a host with GPUs: each worker gives up the device files that are not of its lease."""
    os.environ["FLOWER_GPU_GUARDED"] = "/dev/full"
    return ours("forkserver")


WAYS = {
    "in-process": Way(in_process),
    "article": Way(article, slow=True),
    "spawn": Way(spawn, slow=True),
    "executor": Way(executor, slow=True, settle_s=0.5),
    "loky": Way(loky, package="loky", slow=True),
    "ours-spawn": Way(partial(ours, "spawn"), start_method="spawn", slow=True),
    "ours-fork": Way(ours_fork, start_method="fork"),
    "ours-forkserver": Way(partial(ours, "forkserver"), start_method="forkserver"),
    "ours-guarded": Way(ours_guarded, start_method="forkserver"),
}


def usable() -> list[str]:
    """Return the names of the ways whose packages are installed."""
    return [name for name, way in WAYS.items() if way.package is None or find_spec(way.package)]
