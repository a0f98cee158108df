"""Ways to run one call in a process of its own.

Each way is a function that prepares a caller and returns a function for one call. The returned function gets
the name of the call and the weights, and returns ``(pid, weights)``. Each way imports its own libraries,
because a caller must not hold memory for the other ways.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.shared.weights import Weights

Run = Callable[[str, Weights], tuple[int, Weights]]


@dataclass(frozen=True)
class Way:
    """A way to run calls.

    Parameters
    ----------
    prepare : callable
        Called once in each caller.
    is_slow : bool
        True if each call takes seconds for imports. Such a way runs less often.
    settle_s : float
        Pause after each call, outside of the timing. In it, processes of this way exit that would slow down
        the next way.
    """

    prepare: Callable[[], Run]
    is_slow: bool = False
    settle_s: float = 0.0


def in_process() -> Run:
    from benchmarks.isolation import tasks

    return lambda call, weights: tasks.CALLS[call](weights)


def with_manager(task: Callable[..., Any], *args: Any) -> Any:
    """Run a task as articles about Flower and GPU memory do: a new Manager and a spawned Process per call.

    The weights are an argument of the Process. The result comes back in the Manager's dictionary.
    """
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    manager = context.Manager()
    results = manager.dict()
    process = context.Process(target=_into_dict, args=(task, args, results))
    process.start()
    process.join()
    process.close()
    return results["result"]


def _into_dict(task: Callable[..., Any], args: Any, results: Any) -> None:
    results["result"] = task(*args)


def with_pipe(task: Callable[..., Any], *args: Any) -> Any:
    """Run a task in a spawned Process that sends its result through a Pipe."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_into_pipe, args=(task, args, sender))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    receiver.close()
    return result


def _into_pipe(task: Callable[..., Any], args: Any, sender: Any) -> None:
    sender.send(task(*args))
    sender.close()


def article() -> Run:
    from benchmarks.isolation import tasks

    return lambda call, weights: with_manager(tasks.CALLS[call], weights)


def spawn() -> Run:
    from benchmarks.isolation import tasks

    return lambda call, weights: with_pipe(tasks.CALLS[call], weights)


def executor() -> Run:
    """Keep one executor for all calls, as in its documentation. Each of its processes exits after a call."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from benchmarks.isolation import tasks

    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max_workers=1, max_tasks_per_child=1, mp_context=context)
    return lambda call, weights: pool.submit(tasks.CALLS[call], weights).result()


def loky() -> Run:
    """Shut the executor down after each call, because only that frees its memory."""
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
    # As in flwr-clientapp, the forked process has imported its app.
    from benchmarks.isolation import tasks  # noqa: F401

    return ours("fork")


def ours_guarded() -> Run:
    """Run as on a host with GPUs, where each worker gives up the device files outside of its lease."""
    os.environ["FLOWER_GPU_GUARDED"] = "/dev/full"
    return ours("forkserver")


WAYS = {
    "in-process": Way(in_process),
    "article": Way(article, is_slow=True),
    "spawn": Way(spawn, is_slow=True),
    "executor": Way(executor, is_slow=True, settle_s=0.5),
    "loky": Way(loky, is_slow=True),
    "ours-spawn": Way(partial(ours, "spawn"), is_slow=True),
    "ours-fork": Way(ours_fork),
    "ours-forkserver": Way(partial(ours, "forkserver")),
    "ours-guarded": Way(ours_guarded),
}
