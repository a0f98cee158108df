"""In the worker of a call: one worker more for each rank, and one result or one error of them all."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from flower_gpu.calls import environment, leased_worker, leasing
from flower_gpu.calls.gpu_use import THIS_WORKER, RankFigures
from flower_gpu.errors import WorkerError
from flower_gpu.leases.lease import Lease, Share
from flower_gpu.options import CALL, DEADLINE_VARIABLE, DEVICES_VARIABLE, RANKS_VARIABLE
from flower_gpu.ranks import results
from flower_gpu.ranks.rank import Rendezvous, meeting_place, remove_left_of_nccl
from flower_gpu.ranks.results import End
from flower_gpu.workers import caller as worker
from flower_gpu.workers import events, methods, own_process, threads
from flower_gpu.workers.call import Call, Task
from flower_gpu.workers.life import StopOrder
from flower_gpu.workers.own_process import facts
from flower_gpu.workers.threads import cores, openmp_threads

#: What a rank runs; see :func:`flower_gpu.ranks.rank.main`.
RANK_TASK: Final = "flower_gpu.ranks.rank:main"

# A rank that is lost makes the others fail, too, and they may be heard first.
_GRACE_S = 1.0
# Ranks are ended so long before their call is, as far as there is time: to tell where they were.
_MARGIN_S = 2.0
_MARGIN = 0.1


def how_many() -> int:
    """Return in how many ranks a distributed function runs in this process.

    One for each GPU of its lease; on the CPU as many as there were GPUs asked for, so that it computes the
    same. In a process where someone follows it with a debugger, and outside of workers, one.
    """
    if own_process.is_inside() or not leasing.is_worker():
        return 1
    lease = leasing.of_this_process()
    if lease is not None and lease.shares:
        return len(lease.shares)
    return int(os.environ.get(RANKS_VARIABLE) or 1)


def is_asked_for_one() -> bool:
    """Tell whether this is the worker of a call that is for one GPU, or for a part of one."""
    is_here = own_process.is_inside() or not leasing.is_worker()
    return not is_here and RANKS_VARIABLE not in os.environ


def run(
    function: Task,
    timeout_s: float,
    count: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    task: Task = RANK_TASK,
    merged: Callable[[Sequence[Any]], Any] = results.merged,
) -> Any:
    """Run a function in this many ranks.

    ``timeout_s``: that ranks wait for each other at one point.
    ``task``: what a rank runs, with the function as an argument; ``merged``: makes one result of all.

    Raises RankError if a rank failed, which ends the others.
    Raises InvalidResultError if ranks returned what does not fit together.
    """
    lease = leasing.of_this_process()
    shares = lease.shares if lease is not None and lease.shares else (None,) * count
    # Also after the ranks: the call ends then, and its worker tells the figures.
    THIS_WORKER.ranks = figures = RankFigures()
    with meeting_place() as place:
        calls = [
            _call(
                task,
                Rendezvous(place, rank, count, timeout_s),
                lease,
                share,
                (function, args, kwargs),
            )
            for rank, share in enumerate(shares)
        ]
        try:
            values = _run_all(calls, figures)
        finally:
            remove_left_of_nccl()
    return merged(values)


def _call(
    task: Task, rendezvous: Rendezvous, lease: Lease | None, share: Share | None, rest: tuple[Any, ...]
) -> Call:
    """Return the call of one rank, with its GPU only and its part of the cores."""
    rank, count = rendezvous.rank, rendezvous.world_size
    own = None
    if lease is not None and share is not None:
        own = replace(lease, shares=(share,), ticket="")  # the worker writes into it for all of them
    threads_of_all = openmp_threads(os.environ) or cores()
    prefix = events.log_prefix().removesuffix(": ")
    return Call(
        task,
        (rendezvous, *rest),
        env={
            **threads.environment(max(1, threads_of_all // count), {}),
            **environment.of_worker(own, os.environ),
            # All GPUs of the lease: ranks exchange gradients by each other's memory.
            **{name: os.environ[name] for name in (DEVICES_VARIABLE,) if name in os.environ},
            **_network(os.environ),
            RANKS_VARIABLE: "1",
            # Of whoever has started the client: PyTorch would look for its GPU by that.
            **({"LOCAL_RANK": "0"} if "LOCAL_RANK" in os.environ else {}),
        },
        setup=leased_worker.SETUP,
        label=f"rank {rank} of {count}" + (f" (GPU {share.index})" if share is not None else ""),
        held=facts.held,
        log_prefix=f"{prefix}, rank {rank}: " if prefix else f"rank {rank}: ",
        takes_over=True,
    )


def _network(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which ranks connect on this host only."""
    # NCCL's sockets without files have no permissions. From 2.30 on it can do without those.
    network = {"NCCL_IPC_USE_ABSTRACT_SOCKET": "0"} if os.access("/tmp", os.W_OK) else {}
    with suppress(OSError):
        socket.if_nametoindex("lo")
        network |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    return {name: value for name, value in network.items() if not environ.get(name)}


def _run_all(calls: Sequence[Call], figures: RankFigures) -> list[Any]:
    """Run the calls at the same time, and return their values; after the first failure end all."""
    ended: queue.SimpleQueue[End] = queue.SimpleQueue()
    try:
        order = StopOrder()
    except OSError as error:
        raise WorkerError(f"cannot start ranks: {error}") from error
    running = [
        threading.Thread(target=_run_one, args=(rank, call, order, figures, ended), name=call.label)
        for rank, call in enumerate(calls)
    ]
    began: list[threading.Thread] = []
    ends: dict[int, End] = {}
    try:
        for thread in running:
            try:
                thread.start()
            except RuntimeError as error:  # there can be no more
                raise WorkerError(f"cannot start ranks: {error}") from error
            began.append(thread)
        # Only where nobody has told why it matters where the others are.
        order.give(asks_where=not _wait(ended, ends, len(calls)))
    finally:
        order.give()
        for thread in began:
            thread.join()
        order.close()
    while not ended.empty():
        end = ended.get()
        ends[end.rank] = end
    if any(end.error is not None for end in ends.values()):
        raise results.of_all(list(ends.values()))
    return [ends[rank].value for rank in range(len(calls))]


def _wait(ended: queue.SimpleQueue[End], ends: dict[int, End], count: int) -> bool:
    """Wait until all ranks are through, or one has failed and the others had time to tell why."""
    until: float | None = None
    while len(ends) < count:
        try:
            end = ended.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            return False
        ends[end.rank] = end
        if end.error is not None:
            if end.is_last_word:
                return True
            until = until or time.monotonic() + _GRACE_S
    return True


def _run_one(
    rank: int, call: Call, order: StopOrder, figures: RankFigures, ended: queue.SimpleQueue[End]
) -> None:
    told: dict[str, Any] = {}
    value, error = None, None
    # Chosen by the user for libraries that no fork carries; else the server, which has them loaded. Not a
    # fork of this worker: its threads look at the GPUs meanwhile, and its arrays would be those of all ranks.
    method = methods.choose_in_worker(os.environ.get(CALL["start_method"].variable))
    try:
        value = worker.run(
            call,
            method,
            timeout_s=_left_s(),
            on_event=partial(_on_event, rank, figures, told),
            otherwise=methods.SPAWN,
            stopped_by=order,
        )
    except BaseException as caught:
        error = caught
    ended.put(End(rank, call.label, value, error, time.monotonic(), bool(told.get("of_others"))))


def _on_event(rank: int, figures: RankFigures, told: dict[str, Any], event: dict[str, Any]) -> None:
    kind = event.get("event")
    if kind == "rank_failed":
        told.update(event)
    elif figures.take(rank, event):
        return
    elif kind == "progress" and rank == 0:
        events.send("progress", **{key: value for key, value in event.items() if key != "event"})


def _left_s() -> float | None:
    """Return how long ranks may take, a little less than their call; None: as long as they want."""
    text = os.environ.get(DEADLINE_VARIABLE)
    if not text:
        return None
    left_s = float(text) - time.monotonic()
    return max(0.001, left_s - min(_MARGIN_S, _MARGIN * left_s))
