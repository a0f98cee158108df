"""How `flower-gpu top` follows runs: long ones, killed ones, ones that go on in an old folder."""

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


def started(trace: Trace, **fields: object) -> None:
    trace.write("run_started", kind="launch", name="app", host=platform.node(), pid=os.getpid(), **fields)


# What is over is forgotten --------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 400))
@settings(max_examples=examples(15))
def test_what_goes_on_is_the_same_without_what_is_over(seed: int, calls: int, cut: int) -> None:
    """Calls side by side, fed in pieces, up to any event."""
    dice = random.Random(seed)
    written = Trace(Path("nowhere"))
    left = [list(written.call(number, pid=100 + number)) for number in range(calls)]
    lines = []
    while any(left):
        lines.append(dice.choice([one for one in left if one]).pop(0))
    events = [json.loads(line) for line in lines][:cut]
    whole, live = History(), History(keep_finished=False)
    whole.feed(events)
    at = 0
    while at < len(events):
        step = dice.randint(1, 30)
        live.feed(events[at : at + step])
        at += step
    assert [asdict(one) for one in live.running] == [asdict(one) for one in whole.running]
    assert [asdict(one) for one in live.waiting] == [asdict(one) for one in whole.waiting]
    held = {one.id for one in whole.leases if one.granted_at and not one.released_at}
    assert {one.id for one in live.leases if one.id} == held
    assert len(live.workers) == len(live.running)
    assert len(live.leases) == len(held) + len(live.waiting)
    assert all(len(samples) == 1 for samples in live.samples.values())
    for uuid, samples in live.samples.items():
        assert samples == whole.samples[uuid][-1:]
    assert live.last_at == whole.last_at


def test_a_run_that_begins_again_has_nothing_of_the_one_that_was_killed(trace: Trace) -> None:
    started(trace)
    for line in list(trace.call(0))[:5]:
        trace.write_text(line)
    trace.write("lease_requested", call="w", client="8", task="fit", round=1, caller_pid=7)
    started(trace)
    history = read(trace.path.parent).history
    assert (history.running, history.leases, history.waiting) == ([], [], [])


# Long traces ----------------------------------------------------------------------------------------------


def test_a_long_trace_is_read_in_pieces(trace: Trace) -> None:
    text = "".join(line for number in range(1000) for line in trace.call(number))
    trace.write_text(text)
    watch = FollowedRun(trace.path.parent)
    parts = []
    while not watch.read_on(-math.inf):  # one piece at a time
        assert len(watch.history.leases) < 5
        parts.append(watch.read_part)
    assert parts == sorted(parts)
    assert len(parts) > 2
    assert watch.read_part == 1.0
    assert watch.history.workers == []
    # What is written meanwhile is read the next time.
    text = "".join(list(trace.call(5000, pid=os.getpid()))[:4])
    trace.write_text(text[:-40])  # a line that is half written waits for its end
    assert watch.read_on(-math.inf)
    trace.write_text(text[-40:])
    assert watch.read_on(-math.inf)
    assert [(worker.call, worker.phase) for worker in watch.workers()] == [("c5000", "running")]


def test_a_folder_that_is_removed_meanwhile_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    started(Trace(folder, time.time()))
    watch = read(folder)
    (folder / "trace.jsonl").unlink()
    folder.rmdir()
    assert watch.read_on(math.inf)
    assert row_of(watch, time.time()).read_part == 1.0


# Who is there ---------------------------------------------------------------------------------------------


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_a_worker_whose_process_is_gone_is_not_shown(trace: Trace, dead_pid: int) -> None:
    trace.write_text("".join(list(trace.call(0, pid=dead_pid))[:3]))
    trace.write_text("".join(list(trace.call(1, pid=os.getpid()))[:3]))
    assert [worker.call for worker in read(trace.path.parent).workers()] == ["c1"]


def test_processes_of_another_host_cannot_be_looked_for(trace: Trace, dead_pid: int) -> None:
    trace.write("run_started", kind="launch", name="app", host="elsewhere.example", pid=dead_pid)
    trace.write_text("".join(list(trace.call(0, pid=dead_pid))[:3]))
    watch = read(trace.path.parent)
    assert len(watch.workers()) == 1
    assert watch.outcome() == ""
    trace.write("run_finished", outcome="failed", seconds=1.0)
    watch.read_on(math.inf)
    assert (watch.workers(), watch.outcome()) == ([], "failed")


def test_a_process_is_there_until_it_ends() -> None:
    began = time.time()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert is_there(process.pid, began)
        # One that was there long before had this number, which is another one's now.
        assert not is_there(process.pid, began - 3600)
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        is_zombie_there = is_there(process.pid, began)  # it has ended, and nobody has waited for it
        process.communicate()
    assert not is_zombie_there
    assert not is_there(process.pid, began)
    assert not is_there(0, began)
    assert not is_there(2**40, began)


# How far it is --------------------------------------------------------------------------------------------


def test_rounds_of_a_simulation(trace: Trace) -> None:
    started(trace, num_rounds=5)
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


def test_cores_of_a_simulation_are_the_runs_and_no_worker_of_it(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds them for all its messages. Those of another process are shown as a lease."""
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
    gone = Seen(trace.time, Inventory((), None, "no driver"), state=ledger.status())
    assert cores_of(gone, watch) is None


def test_rounds_of_a_launched_run_whose_app_has_no_workers(trace: Trace) -> None:
    started(trace, num_rounds=5)
    trace.write("round_started", round=3, task="train", messages=1)
    trace.write("round_grew", round=3, task="train", messages=2)
    for number, task in ((3, "train"), (2, "train"), (3, "evaluate")):  # two of them are late
        trace.write("reply", round=number, task=task, node=7, error=None, metrics={})
    row = row_of(read(trace.path.parent), trace.time)
    assert (row.messages_done, row.messages) == (1, 2)


def test_calls_of_a_round_that_tells_no_messages(trace: Trace) -> None:
    for number in range(5):
        trace.write_text("".join(trace.call(number, round=1)))
    late = list(trace.call(21, round=1))  # of a slow client that nobody waits for
    trace.write_text("".join(late[:3]))
    for number in range(3):
        trace.write_text("".join(trace.call(10 + number, round=2)))
    trace.write_text("".join(trace.call(20, round=2, task="evaluate")))
    trace.write_text("".join(late[3:]))
    row = row_of(read(trace.path.parent), trace.time)
    assert (row.round, row.calls_done) == (2, {"fit": 3, "evaluate": 1})


def test_how_a_run_has_ended(trace: Trace, dead_pid: int) -> None:
    folder = trace.path.parent
    started(trace)
    assert read(folder).outcome() == ""
    trace.write("run_finished", outcome="interrupted", seconds=9.0)
    watch = read(folder)
    assert watch.outcome() == "interrupted"
    assert row_of(watch, trace.time + 500).seconds == pytest.approx(1.0)
    trace.write("run_started", kind="launch", name="app", host=platform.node(), pid=dead_pid)
    assert read(folder).outcome() == "gone"
    of_registry = FollowedRun(folder, RunningRun(str(folder), "launch", "app", dead_pid, trace.time))
    of_registry.read_on(math.inf)
    assert of_registry.outcome() == ""  # it is locked, so it is there
    of_registry.is_registered = False
    assert of_registry.outcome() == "gone"
