"""Runs the ranks of a call: starts a worker for each rank, and combines their results or errors."""

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

from flower_gpu.calls import grants, leasing
from flower_gpu.calls.gpu_use import THIS_WORKER
from flower_gpu.calls.grants.ranks import OF_RANK, remaining_s
from flower_gpu.errors import WorkerError
from flower_gpu.leases.lease import Lease, Share
from flower_gpu.options import CALL, DEVICES_VARIABLE
from flower_gpu.ranks import results
from flower_gpu.ranks.rank import Rendezvous, meeting_place, remove_stale_nccl_sockets
from flower_gpu.ranks.results import End
from flower_gpu.workers import caller as worker
from flower_gpu.workers import events, methods, threads
from flower_gpu.workers.call import Call, Task
from flower_gpu.workers.life import StopOrder
from flower_gpu.workers.own_process import facts
from flower_gpu.workers.threads import cores, openmp_threads

#: The task of a rank's worker, see :func:`flower_gpu.ranks.rank.main`.
RANK_TASK: Final = "flower_gpu.ranks.rank:main"

# Seconds to wait for the other ranks' errors after a rank that blames others. A lost rank makes the others
# fail, and their errors may arrive first.
_GRACE_S = 1.0
# Events of a rank about its GPU, which the caller combines
_OF_GPU: Final = ("gpu_used", "gpu_memory", "no_cuda")


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
    """Run a function in ``count`` ranks.

    ``timeout_s``: seconds that ranks wait for each other at one point.
    ``task``: task of each rank, which gets the function as an argument.
    ``merged``: combines the results of all ranks into one.

    Raises RankError if a rank failed. The other ranks are ended.
    Raises InvalidResultError if the results of the ranks do not fit together.
    """
    lease = leasing.of_this_process()
    shares = lease.shares if lease is not None and lease.shares else (None,) * count
    # Stays set after the ranks have ended, because their figures count until the end of the call.
    THIS_WORKER.has_ranks = True
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
            values = _run_all(calls)
        finally:
            remove_stale_nccl_sockets()
    return merged(values)


def _call(
    task: Task, rendezvous: Rendezvous, lease: Lease | None, share: Share | None, rest: tuple[Any, ...]
) -> Call:
    """Return the call of one rank, with one GPU of the lease and its part of the cores."""
    rank, count = rendezvous.rank, rendezvous.world_size
    lease_of_rank = None
    if lease is not None and share is not None:
        # Without a ticket: the call's worker writes the reports of all ranks.
        lease_of_rank = replace(lease, shares=(share,), ticket="")
    threads_of_all = openmp_threads(os.environ) or cores()
    prefix = events.log_prefix().removesuffix(": ")
    return Call(
        task,
        (rendezvous, *rest),
        env={
            **threads.environment(max(1, threads_of_all // count)),
            **grants.of_lease(lease_of_rank, os.environ),
            # The guard allows all GPUs of the lease, because ranks exchange gradients through each other's
            # memory.
            **{name: os.environ[name] for name in (DEVICES_VARIABLE,) if name in os.environ},
            **_network(os.environ),
            **OF_RANK,
            # PyTorch would choose its GPU by the LOCAL_RANK of the program that has started the client.
            **({"LOCAL_RANK": "0"} if "LOCAL_RANK" in os.environ else {}),
        },
        setup=grants.SETUP,
        label=f"rank {rank} of {count}" + (f" (GPU {share.index})" if share is not None else ""),
        lease_descriptor=facts.lease_descriptor,
        log_prefix=f"{prefix}, rank {rank}: " if prefix else f"rank {rank}: ",
        takes_over=True,
    )


def _network(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep the connections of ranks on this host."""
    # NCCL's abstract sockets have no permissions, so any account could connect. NCCL 2.30 and later can use
    # files.
    network = {"NCCL_IPC_USE_ABSTRACT_SOCKET": "0"} if os.access("/tmp", os.W_OK) else {}
    with suppress(OSError):
        socket.if_nametoindex("lo")
        network |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    return {name: value for name, value in network.items() if not environ.get(name)}


def _run_all(calls: Sequence[Call]) -> list[Any]:
    """Run the calls at the same time and return their values. End all ranks after the first failure."""
    ended: queue.SimpleQueue[End] = queue.SimpleQueue()
    try:
        order = StopOrder()
    except OSError as error:
        raise WorkerError(f"cannot start ranks: {error}") from error
    threads_by_rank = [
        threading.Thread(target=_run_one, args=(rank, call, order, ended), name=call.label)
        for rank, call in enumerate(calls)
    ]
    started: list[threading.Thread] = []
    ends: dict[int, End] = {}
    try:
        for thread in threads_by_rank:
            try:
                thread.start()
            except RuntimeError as error:  # the limit of threads is reached
                raise WorkerError(f"cannot start ranks: {error}") from error
            started.append(thread)
        # The positions of the other ranks matter only if no rank has given the reason of the failure.
        order.give(asks_where=not _wait(ended, ends, len(calls)))
    finally:
        order.give()
        for thread in started:
            thread.join()
        order.close()
    while not ended.empty():
        end = ended.get()
        ends[end.rank] = end
    if any(end.error is not None for end in ends.values()):
        raise results.combined_error(list(ends.values()))
    return [ends[rank].value for rank in range(len(calls))]


def _wait(ended: queue.SimpleQueue[End], ends: dict[int, End], count: int) -> bool:
    """Wait until all ranks have ended, or one has failed.

    Returns False if no rank has given a reason within :data:`_GRACE_S` after a rank that blames the others.
    """
    deadline: float | None = None
    while len(ends) < count:
        try:
            end = ended.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return False
        ends[end.rank] = end
        if end.error is not None:
            if end.is_decisive:
                return True
            deadline = deadline or time.monotonic() + _GRACE_S
    return True


def _run_one(rank: int, call: Call, order: StopOrder, ended: queue.SimpleQueue[End]) -> None:
    failure: dict[str, Any] = {}
    value, error = None, None
    # The user's choice, or the fork server, which has the libraries loaded. Never a fork of this worker: its
    # other threads read the GPUs meanwhile, and every rank would share its arrays.
    method = methods.choose_in_worker(os.environ.get(CALL["start_method"].variable))
    try:
        value = worker.run(
            call,
            method,
            timeout_s=remaining_s(),
            on_event=partial(_on_event, rank, failure),
            otherwise=methods.SPAWN,
            stopped_by=order,
        )
    except BaseException as caught:
        error = caught
    ended.put(End(rank, call.label, value, error, time.monotonic(), bool(failure.get("of_others"))))


def _on_event(rank: int, failure: dict[str, Any], event: dict[str, Any]) -> None:
    kind = event.get("event")
    if kind == "rank_failed":
        failure.update(event)
    elif kind == "out_of_memory":
        events.send(**event, rank=rank)
    elif kind in _OF_GPU or (kind == "progress" and rank == 0):
        events.send(**event)
