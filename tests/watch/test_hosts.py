"""Hosts of a run on a Ray cluster. This machine cannot check whether their processes are alive."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from pathlib import Path

import pytest
from top_traces import Trace

from flower_gpu.gpu.gpus import GPU, Inventory
from flower_gpu.leases.admission import CORES, Part
from flower_gpu.leases.entries import Entry, pid_namespace
from flower_gpu.leases.state import State
from flower_gpu.watch.folds.tally import HOST_LOST
from flower_gpu.watch.followed_run import FollowedRun
from flower_gpu.watch.history import History
from flower_gpu.watch.host_look import Seen
from flower_gpu.watch.top.snapshot import WorkerRow, waiting_rows, worker_rows
from flower_gpu.watch.trackers.points import Points

# This pid exceeds the limit of any kernel, so no process has it.
DEAD_PID = 2**22 + 1
# Number of lines of a call up to the start of its worker.
STARTED = 3


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """The trace of a run of this process on a cluster of the hosts a and b."""
    cluster_trace = Trace(tmp_path, time.time())
    cluster_trace.write("run_started", kind="simulate", name="app", host=platform.node(), pid=os.getpid())
    for host in ("a", "b"):
        cluster_trace.join(host, gpus=2)
    cluster_trace.host = ""
    return cluster_trace


def begin(trace: Trace, host: str, number: int, lines: int = STARTED, **fields: object) -> list[str]:
    """Write the first lines of a call on a host, and return the remaining lines."""
    trace.host = host
    call = list(trace.call(number, uuid=f"{host or 'c'}-0", **fields))  # type: ignore[arg-type]
    trace.write_text("".join(call[:lines]))
    trace.host = ""
    return call[lines:]


def read(trace: Trace) -> FollowedRun:
    run = FollowedRun(trace.path.parent)
    run.label = "app"
    assert run.read_on(math.inf)
    return run


def history_of(trace: Trace, *, keep_finished: bool) -> History:
    history = History(keep_finished=keep_finished)
    history.feed(json.loads(line) for line in trace.path.read_text().splitlines())
    return history


# Calls of a host -------------------------------------------------------------------------------------------


def test_calls_are_counted_by_host(trace: Trace) -> None:
    for number in range(3):
        begin(trace, "a", number, 8)
    begin(trace, "b", 3, 8)
    for outcome in ("error", "out of memory"):
        trace.host = "b"
        trace.write("worker_finished", call=outcome, pid=5, client="1", task="fit", outcome=outcome)
    begin(trace, "b", 4)
    begin(trace, "b", 5, 1)
    begin(trace, "", 7, 8)  # a call of the server
    # Events without the name of a host are ignored.
    trace.write("host_joined")
    trace.write("host_lost", host="")
    history = read(trace).history
    calls_of_b = {"ok": 1, "error": 1, "out of memory": 1}
    assert history.tally.host_calls == {"a": {"ok": 3}, "b": calls_of_b}
    assert [history.calls.in_flight(host) for host in "ab"] == [0, 2]
    assert history.hosts.by_name["a"].concurrency == 4
    assert [(gpu.host, gpu.index) for gpu in history.hosts.gpus_of_run if gpu.host] == [
        *(("a", 0), ("a", 1), ("b", 0), ("b", 1))
    ]


@pytest.mark.parametrize("keep_finished", [True, False])
def test_calls_and_leases_end_with_a_lost_host(trace: Trace, keep_finished: bool) -> None:
    late_lines = begin(trace, "b", 0)
    begin(trace, "b", 1, 1)
    begin(trace, "b", 2, 2)
    trace.host = "b"
    trace.write("cores_requested", call="cores", client="3", task="fit", round=1)
    begin(trace, "a", 4)
    begin(trace, "", 5)
    trace.lose("b")
    # The last lines of the host arrive late.
    trace.write_text("".join(late_lines))
    history = history_of(trace, keep_finished=keep_finished)
    assert [span.host for span in history.calls.running] == ["a", ""]
    assert history.leases.waiting == []
    assert {span.host for span in history.leases.spans if (span.released_at or span.refused_at) is None} == {
        "a",
        "",
    }
    lost = history.hosts.by_name["b"]
    assert (lost.is_lost, lost.lost_reason, lost.concurrency) == (True, "its agent died", 0)
    assert history.calls.done_in_round == {}, "the call counts although another host handles its message"
    assert history.tally.workers_finished == history.tally.host_calls["b"] == {HOST_LOST: 1}
    if keep_finished:
        assert [(span.host, span.outcome) for span in history.calls.workers] == [
            ("b", HOST_LOST),
            ("a", ""),
            ("", ""),
        ]


def test_a_lost_host_may_join_again(trace: Trace) -> None:
    begin(trace, "b", 0, 8)
    trace.lose("b")
    trace.join("b", host_id="another")
    begin(trace, "b", 1)
    history = read(trace).history
    host = history.hosts.by_name["b"]
    assert (host.is_lost, host.concurrency, history.tally.host_calls["b"]) == (False, 4, {"ok": 1})
    assert [worker.host for worker in history.calls.running] == ["b"]
    # Of two hosts with the same name, one is lost and the other stays.
    trace.join("b", host_id="a third")
    trace.lose("b", host_id="another")
    host = read(trace).history.hosts.by_name["b"]
    assert (host.is_lost, host.concurrency) == (False, 4)


def test_hosts_of_a_killed_run_do_not_belong_to_the_resumed_run(trace: Trace) -> None:
    trace.lose("b")
    trace.write("run_started", kind="simulate", name="app", host=platform.node(), pid=os.getpid())
    trace.join("c")
    run = read(trace)
    assert [name for name, host in run.history.hosts.by_name.items() if host.nodes] == ["c"]
    assert list(history_of(trace, keep_finished=True).hosts.by_name) == ["a", "b", "c"]


# Processes of this machine and of other hosts --------------------------------------------------------------


def test_workers_of_other_hosts_are_not_taken_for_processes_of_this_machine(
    trace: Trace,
) -> None:
    begin(trace, "a", 0, pid=DEAD_PID)
    begin(trace, "b", 1, pid=os.getpid())
    begin(trace, "", 2, pid=DEAD_PID)
    begin(trace, "", 3, pid=os.getpid())
    run = read(trace)
    assert [worker.call for worker in run.workers()] == ["c0", "c1", "c3"]
    # This machine is also a host of the cluster. Its agent may be in a container, so its pids prove nothing.
    trace.join(platform.node())
    begin(trace, platform.node(), 4, pid=DEAD_PID)
    trace.lose("b")
    run = read(trace)
    assert [worker.call for worker in run.workers()] == ["c0", "c3", "c4"]
    trace.write("run_finished", outcome="failed", seconds=1.0)
    assert [worker.call for worker in read(trace).workers()] == ["c3"]


def test_all_workers_end_with_a_killed_driver(trace: Trace) -> None:
    trace.write("run_started", kind="simulate", name="app", host=platform.node(), pid=DEAD_PID)
    trace.join("a", gpus=1)
    begin(trace, "a", 0, pid=os.getpid())
    begin(trace, "a", 1, 1)
    run = read(trace)
    assert (run.outcome(), run.workers()) == ("gone", [])
    assert rows_of(run, Seen(trace.time, Inventory((), None, "no driver"))) == []


# `flower-gpu top` ------------------------------------------------------------------------------------------


def entry(ticket: str, pid: int = 7, **more: object) -> Entry:
    """Return an entry of this machine's ledger."""
    fields = {"order": 1, "path": Path(ticket), "user": os.getuid(), "since": time.time(), "gpu_needs": ()}
    return Entry(ticket, pid=pid, pid_namespace=pid_namespace(), **fields | more)  # type: ignore[arg-type]


def seen(trace: Trace, *holders: Entry, waiting: tuple[Entry, ...] = ()) -> Seen:
    gpu = GPU(5, "here-1", "NVIDIA Stub 16GB", 2**34, 0, 0, None, None, 0, None)
    reports = {holder.id: (holder.pid, {"here-1": 3}) for holder in holders}
    state = State((gpu,), (), (), holders, waiting)
    inventory = Inventory((gpu,), None, None)
    return Seen(trace.time, inventory, state=state, reports=reports)


def rows_of(run: FollowedRun, look: Seen) -> list[WorkerRow]:
    return list(worker_rows(look, [run], others=True))


def test_workers_and_leases_of_other_hosts_come_from_the_trace(trace: Trace) -> None:
    begin(trace, "a", 0)
    begin(trace, "b", 1, 2)
    begin(trace, "b", 2, 7)  # the worker waits for its next message
    # The call of the server is over, because its lease is not in the ledger.
    begin(trace, "", 3, 2)
    trace.host = "b"
    call_fields = {"call": "cpu", "client": "8", "task": "fit", "round": 1}
    trace.write("cores_granted", **call_fields, lease="cores", cores=1.5, host_memory_bytes=9, waited_s=0.0)
    trace.write("worker_started", **call_fields, pid=4, start_method="fork", cores_lease="cores")
    rows = rows_of(read(trace), seen(trace, entry("another")))
    shown = [(row.run, row.host, row.client, row.phase, row.gpus, row.lease_bytes, row.cores) for row in rows]
    assert shown == [
        ("app", "a", "0", "starting", (0,), 2**32, None),
        ("app", "b", "8", "starting", (), None, 1.5),
        ("app", "b", "1", "starting", (0,), 2**32, None),
        ("app", "b", "", "idle", (0,), 2**32, None),
        ("", "", "", "held", (), None, None),
    ]
    assert {row.used_bytes for row in rows} == {None}


def test_a_lease_of_a_cluster_host_on_this_machine_is_shown_once(
    trace: Trace,
) -> None:
    this_host = platform.node()
    trace.join(this_host)
    begin(trace, this_host, 0)
    begin(trace, this_host, 1, 2)
    part = Part("here-1", 2**31, 2**34)
    look = seen(trace, entry("l0", parts=(part, Part(CORES, 500, 8000))), entry("l1", parts=(part,)))
    rows = rows_of(read(trace), look)
    shown = [(row.run, row.host, row.lease, row.gpus, row.lease_bytes, row.used_bytes) for row in rows]
    assert shown == [("app", this_host, f"l{number}", (5,), 2**31, 3) for number in range(2)]
    assert rows[0].cores == 0.5


def test_a_request_on_another_host_does_not_match_a_claim_of_this_machine(
    trace: Trace, tmp_path: Path
) -> None:
    """The request has the pid of a process that waits on this machine for a call of the same name."""
    begin(trace, "a", 1, 1)
    (tmp_path / "w.label").write_text("fit of client 1")
    look = seen(trace, waiting=(entry("w", path=tmp_path / "w.ticket"),))
    assert [row.run for row in waiting_rows(look, [read(trace)])] == [""]
    trace.join(platform.node())
    begin(trace, platform.node(), 101, 1)
    assert [row.run for row in waiting_rows(look, [read(trace)])] == ["app"]


# Trackers --------------------------------------------------------------------------------------------------


def test_gpus_of_each_host_have_separate_points(trace: Trace) -> None:
    history, points = History(keep_finished=False), []
    follow = Points(history)
    for host in ("a", "b"):
        trace.host = host
        trace.write("gpu_sample", gpus=[{"uuid": f"{host}-0", "used_bytes": 2**30}])
    trace.write("run_finished", outcome="completed")
    for line in trace.path.read_text().splitlines():
        history.feed([json.loads(line)])
        points += follow.of(json.loads(line))
    names = {name for name in points[-1].values if name.endswith("used_gib")}
    assert names == {"gpu/a/0/used_gib", "gpu/b/0/used_gib"}
