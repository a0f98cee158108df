"""`flower-gpu top` follows long runs, killed runs and runs that resume in an old folder."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from top_traces import Trace

from flower_gpu.apps.recording import RunningRun
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.leases.admission import CORES, HostNeed
from flower_gpu.leases.ledger import Claimant, Ledger
from flower_gpu.watch.followed_run import FollowedRun, is_there
from flower_gpu.watch.history import History
from flower_gpu.watch.host_look import Seen
from flower_gpu.watch.top.snapshot import RunRow, cores_of, host_row, run_row, worker_rows


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(tmp_path, began=time.time())


def read(folder: Path) -> FollowedRun:
    watch = FollowedRun(folder)
    assert watch.read_on(math.inf)
    return watch


def row_of(watch: FollowedRun, now: float) -> RunRow:
    return run_row(Seen(now, Inventory((), None, "no driver")), watch)


def write_start(trace: Trace, **fields: object) -> None:
    trace.write("run_started", kind="launch", name="app", host=platform.node(), pid=os.getpid(), **fields)


# Finished calls are forgotten -----------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 400))
@settings(max_examples=examples(15))
def test_a_live_history_has_the_same_active_calls_as_a_full_history(seed: int, calls: int, cut: int) -> None:
    """The events of concurrent calls arrive in pieces and may end at any event."""
    random_ = random.Random(seed)
    writer = Trace(Path("nowhere"))
    remaining = [list(writer.call(number, pid=100 + number)) for number in range(calls)]
    lines = []
    while any(remaining):
        lines.append(random_.choice([span for span in remaining if span]).pop(0))
    events = [json.loads(line) for line in lines][:cut]
    whole, live = History(), History(keep_finished=False)
    whole.feed(events)
    position = 0
    while position < len(events):
        step = random_.randint(1, 30)
        live.feed(events[position : position + step])
        position += step
    assert [asdict(span) for span in live.calls.running] == [asdict(span) for span in whole.calls.running]
    assert [asdict(span) for span in live.leases.waiting] == [asdict(span) for span in whole.leases.waiting]
    held = {span.id for span in whole.leases.spans if span.granted_at and not span.released_at}
    assert {span.id for span in live.leases.spans if span.id} == held
    assert len(live.calls.workers) == len(live.calls.running)
    assert len(live.leases.spans) == len(held) + len(live.leases.waiting)
    assert all(len(samples) == 1 for samples in live.hosts.samples.values())
    for uuid, samples in live.hosts.samples.items():
        assert samples == whole.hosts.samples[uuid][-1:]
    assert live.run.last_at == whole.run.last_at


def test_a_restarted_run_has_no_calls_of_the_killed_run(trace: Trace) -> None:
    write_start(trace)
    for line in list(trace.call(0))[:5]:
        trace.write_text(line)
    trace.write("lease_requested", call="w", client="8", task="fit", round=1, caller_pid=7)
    write_start(trace)
    history = read(trace.path.parent).history
    assert (history.calls.running, history.leases.spans, history.leases.waiting) == ([], [], [])


# Long traces ----------------------------------------------------------------------------------------------


def test_a_long_trace_is_read_in_pieces(trace: Trace) -> None:
    text = "".join(line for number in range(1000) for line in trace.call(number))
    trace.write_text(text)
    watch = FollowedRun(trace.path.parent)
    parts = []
    while not watch.read_on(-math.inf):  # one piece at a time
        assert len(watch.history.leases.spans) < 5
        parts.append(watch.read_part)
    assert parts == sorted(parts)
    assert len(parts) > 2
    assert watch.read_part == 1.0
    assert watch.history.calls.workers == []
    # Later lines are read by the next call. A partly written line is read once it is complete.
    text = "".join(list(trace.call(5000, pid=os.getpid()))[:4])
    trace.write_text(text[:-40])
    assert watch.read_on(-math.inf)
    trace.write_text(text[-40:])
    assert watch.read_on(-math.inf)
    assert [(worker.call, worker.phase) for worker in watch.workers()] == [("c5000", "running")]


def test_a_folder_removed_meanwhile_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_start(Trace(folder, time.time()))
    watch = read(folder)
    (folder / "trace.jsonl").unlink()
    folder.rmdir()
    assert watch.read_on(math.inf)
    assert row_of(watch, time.time()).read_part == 1.0


# Processes that are alive ---------------------------------------------------------------------------------


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_a_worker_with_a_dead_process_is_not_shown(trace: Trace, dead_pid: int) -> None:
    trace.write_text("".join(list(trace.call(0, pid=dead_pid))[:3]))
    trace.write_text("".join(list(trace.call(1, pid=os.getpid()))[:3]))
    assert [worker.call for worker in read(trace.path.parent).workers()] == ["c1"]


def test_workers_of_another_host_count_as_alive(trace: Trace, dead_pid: int) -> None:
    trace.write("run_started", kind="launch", name="app", host="elsewhere.example", pid=dead_pid)
    trace.write_text("".join(list(trace.call(0, pid=dead_pid))[:3]))
    watch = read(trace.path.parent)
    assert len(watch.workers()) == 1
    assert watch.outcome() == ""
    trace.write("run_finished", outcome="failed", seconds=1.0)
    watch.read_on(math.inf)
    assert (watch.workers(), watch.outcome()) == ([], "failed")


def test_a_process_counts_as_alive_until_it_ends() -> None:
    began = time.time()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert is_there(process.pid, began)
        # A worker that started long before must have been another process with the same pid.
        assert not is_there(process.pid, began - 3600)
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # The process is a zombie now: it has ended, and its parent has not waited for it.
        is_zombie_there = is_there(process.pid, began)
        process.communicate()
    assert not is_zombie_there
    assert not is_there(process.pid, began)
    assert not is_there(0, began)
    assert not is_there(2**40, began)


# Progress of a run ----------------------------------------------------------------------------------------


def test_rounds_of_a_simulation(trace: Trace) -> None:
    write_start(trace, num_rounds=5)
    trace.write("round_started", round=3, task="train", messages=100)
    for number in range(40):
        trace.write_text("".join(trace.call(number, round=3)))
    row = row_of(read(trace.path.parent), trace.time)
    assert (row.round, row.num_rounds, row.task) == (3, 5, "train")
    assert (row.messages_done, row.messages) == (40, 100)
    trace.write(
        "round_finished", round=3, task="train", messages=100, failed=0, seconds=1.0, metrics={"x": 1.5}
    )
    trace.write("round_finished", round=3, task="evaluate", messages=9, failed=0, metrics={"accuracy": 0.5})
    trace.write("round_finished", round=4, task="train", messages=100, failed=0, metrics={"x": 1.25})
    row = row_of(read(trace.path.parent), trace.time)
    assert (row.messages_done, row.messages) == (None, None)
    assert (row.metrics, row.metrics_round) == ({"accuracy": 0.5}, 3)


def test_cores_of_a_simulation_are_shown_with_the_run_and_not_as_a_worker(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run holds its cores for all of its messages. Cores of other processes are shown as a lease."""
    monkeypatch.setenv("FLOWER_GPU_LEDGER_DIR", str(tmp_path))
    trace.write("run_started", kind="simulate", name="app", host=platform.node(), pid=os.getpid())
    watch, ledger = read(trace.path.parent), Ledger()
    watch.label = "app"
    label = "messages of app"
    ticket = ledger.acquire(Claimant(count=0, host_needs=lambda: (HostNeed(CORES, 1000, 1000),), label=label))
    try:
        seen = Seen(trace.time, Inventory((), None, "no driver"), state=ledger.status())
        assert worker_rows(seen, [watch], others=True) == ()
        assert cores_of(seen, watch) == 1.0
        (row,) = worker_rows(seen, [], others=True)
    finally:
        ledger.release(ticket)
    assert (row.run, row.label, row.phase, row.cores) == ("", label, "held", 1.0)
    resources = host_row(seen)
    assert resources is not None and resources.cores_leased == 1.0
    later = Seen(trace.time, Inventory((), None, "no driver"), state=ledger.status())
    assert cores_of(later, watch) is None


def test_rounds_of_a_launched_run_whose_app_has_no_workers(trace: Trace) -> None:
    write_start(trace, num_rounds=5)
    trace.write("round_started", round=3, task="train", messages=1)
    trace.write("round_grew", round=3, task="train", messages=2)
    # Only the first reply belongs to the current task. The other two replies must not count.
    for number, task in ((3, "train"), (2, "train"), (3, "evaluate")):
        trace.write("reply", round=number, task=task, node=7, error=None, metrics={})
    row = row_of(read(trace.path.parent), trace.time)
    assert (row.messages_done, row.messages) == (1, 2)


def test_calls_of_a_round_without_a_number_of_messages(trace: Trace) -> None:
    for number in range(5):
        trace.write_text("".join(trace.call(number, round=1)))
    # A call of a slow client, which ends after its round.
    late = list(trace.call(21, round=1))
    trace.write_text("".join(late[:3]))
    for number in range(3):
        trace.write_text("".join(trace.call(10 + number, round=2)))
    trace.write_text("".join(trace.call(20, round=2, task="evaluate")))
    trace.write_text("".join(late[3:]))
    row = row_of(read(trace.path.parent), trace.time)
    assert (row.round, row.calls_done) == (2, {"fit": 3, "evaluate": 1})


def test_outcome_of_a_run(trace: Trace, dead_pid: int) -> None:
    folder = trace.path.parent
    write_start(trace)
    assert read(folder).outcome() == ""
    trace.write("run_finished", outcome="interrupted", seconds=9.0)
    watch = read(folder)
    assert watch.outcome() == "interrupted"
    assert row_of(watch, trace.time + 500).seconds == pytest.approx(1.0)
    trace.write("run_started", kind="launch", name="app", host=platform.node(), pid=dead_pid)
    assert read(folder).outcome() == "gone"
    registered_run = FollowedRun(folder, RunningRun(str(folder), "launch", "app", dead_pid, trace.time))
    registered_run.read_on(math.inf)
    # The registered run holds its lock, so it is alive.
    assert registered_run.outcome() == ""
    registered_run.is_registered = False
    assert registered_run.outcome() == "gone"
