"""What a running task reports, and how its caller shows it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from phases import without_phases
from processes import SUPERVISED, Run

import flower_gpu
from flower_gpu import run_in_worker
from flower_gpu.calls.told import ProgressDisplay
from flower_gpu.workers import caller as worker
from flower_gpu.workers import events
from flower_gpu.workers.call import Call

Event = dict[str, Any]


def events_of(start_method: str, task: str, *args: Any) -> tuple[list[Event], Any]:
    received: list[Event] = []
    result = worker.run(Call(task, args), start_method, on_event=without_phases(received))
    return received, result


def test_events_come_in_order_few_and_with_the_last() -> None:
    received, seconds = events_of("forkserver", "plain_tasks:count", 20_001, "epoch 1")
    assert received[0] == {"event": "progress", "desc": "epoch 1", "n": 0, "total": 20_001}
    assert received[-1] == {"event": "progress", "desc": "epoch 1", "n": 20_001, "total": 20_001}
    assert all(earlier["n"] < later["n"] for earlier, later in pairwise(received))
    assert len(received) <= 2 + seconds / events._MIN_INTERVAL_S


@pytest.mark.parametrize("start_method", [*SUPERVISED, "in-process"])
def test_short_loops(start_method: str) -> None:
    """Also without a length, and from a thread of the worker."""
    received, _ = events_of(start_method, "plain_tasks:count_in_many_ways")
    found = [(event["desc"], event["n"], event["total"]) for event in received]
    assert found == [
        ("none", 0, 0),
        *[("one", 0, 1), ("one", 1, 1)],
        *[("two", 0, 2), ("two", 2, 2)],
        *[("stream", 0, None), ("stream", 7, None)],
        *[("numpy", 0, 3), ("numpy", 3, 3)],
        *([("thread", 0, 5), ("thread", 5, 5)] if start_method in SUPERVISED else []),
    ]


def test_outside_of_a_call_it_just_iterates(capsys: pytest.CaptureFixture[str]) -> None:
    received, _ = events_of("in-process", "plain_tasks:count", 2)
    assert len(received) == 2
    assert list(flower_gpu.progress(n * n for n in range(4))) == [0, 1, 4, 9]
    assert list(flower_gpu.progress([], desc="nothing")) == []
    assert capsys.readouterr() == ("", "")
    assert len(received) == 2  # the call is over


def test_the_loop_may_end_early_or_fail() -> None:
    def task() -> list[int]:
        for n in flower_gpu.progress(range(10)):
            if n == 2:
                break
        for n in flower_gpu.progress(range(10)):
            if n == 2:
                raise LookupError("third item")
        return []

    with pytest.raises(LookupError, match="third item"):
        run_in_worker(task)


def test_nested_call_reports_to_its_own_caller(start_method: str, capsys: pytest.CaptureFixture[str]) -> None:
    def outer(method: str) -> None:
        run_in_worker("plain_tasks:count", 3, "inner", start_method=method)

    received: list[Event] = []
    worker.run(Call(outer, (start_method,)), start_method, on_event=without_phases(received))
    assert received == []
    assert "inner 3/3" in capsys.readouterr().err


def test_plain_lines_where_there_is_no_terminal(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run_in_worker("plain_tasks:count", 30, "epoch 1", name="7")
    assert capfd.readouterr() == ("", "plain_tasks:count of client 7: epoch 1 30/30\n")
    first, last = run.events("progress")
    assert (first["n"], first["total"], first["desc"], first["client"]) == (0, 30, "epoch 1", "7")
    assert (last["n"], last["pid"]) == (30, run.pids()[0])


def test_lines_are_thinned_out(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("fit of client 3", {}) as display:
        for n in range(101):
            display.on_event({"event": "progress", "desc": "epoch 1", "n": n, "total": 100})
        display.on_event({"event": "something else"})
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "fit of client 3: epoch 1 100/100"
    assert len(lines) < 100


def test_a_line_at_the_end_of_the_servers_loops_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The server evaluates in each round, and clients train in each round."""
    label = (
        f"evaluate on the server {os.urandom(4).hex()}"  # lines are remembered as long as this process lives
    )
    for ends_once, count in ((True, 1), (False, 3)):
        for _ in range(3):
            with ProgressDisplay(label, {}, ends_once=ends_once) as display:
                for n in range(3):
                    display.on_event({"event": "progress", "desc": "evaluate", "n": n, "total": 2})
        assert capsys.readouterr().err == f"{label}: evaluate 2/2\n" * count


def test_the_server_evaluates_often_and_says_so_once(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    desc = os.urandom(4).hex()
    for _ in range(3):
        run_in_worker("plain_tasks:count", 5, desc)
    assert capfd.readouterr().err == f"plain_tasks:count on the server: {desc} 5/5\n"


@pytest.mark.parametrize(
    "reports",
    [
        [{"desc": "a", "n": 0, "total": 0}],
        [{"desc": "a", "n": 0, "total": None}],
        [{"desc": "a", "n": 7, "total": 7}],
        [{"desc": "a", "n": 0, "total": 7}, {"desc": "b", "n": 7, "total": 7}],
        [{"desc": str(number), "n": number % 3, "total": number % 2} for number in range(50)],
    ],
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_app_that_calls_each_step_the_last_fills_nothing(
    reports: list[Event],
    is_terminal: bool,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trace and terminal have few of its reports, and the last one."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    last = {"desc": "end", "n": 9, "total": 9}
    began = time.monotonic()
    with ProgressDisplay("fit of client 3", {}) as display:
        for number in range(5000):
            display.on_event({"event": "progress", **reports[number % len(reports)]})
        display.on_event({"event": "progress", **last})
    seconds = time.monotonic() - began
    traced = run.events("progress")
    assert {name: traced[-1][name] for name in last} == last
    assert len(traced) <= 2 + seconds / 0.5
    shown = capsys.readouterr().err
    if is_terminal:
        assert shown.count("\r") <= 10 * (2 + seconds / 0.1)
    else:
        assert shown.splitlines()[-1] == "fit of client 3: end 9/9"
        assert len(shown.splitlines()) <= 2 + seconds


class Closed:
    """A stream whose reader has gone."""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("kind", ["none", "closed", "broken"])
def test_stderr_that_cannot_be_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", {"none": None, "closed": closed, "broken": Closed()}[kind])
    assert run_in_worker("plain_tasks:count_without_length", 3) == 3
    run_in_worker("plain_tasks:count", 3)


def at_a_terminal(script: Path) -> str:
    """Run a script with a pseudo-terminal as its stderr, and return what is drawn on it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))  # tqdm draws to its width
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        limit = threading.Timer(120, process.kill)  # a deadlock is what one of the tests is about
        limit.start()
        drawn = b""
        while True:
            try:
                data = os.read(ours, 10_000)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            drawn += data
        os.close(ours)
        limit.cancel()
        assert process.wait(timeout=60) == 0, drawn.decode()
    return drawn.decode()


def test_bar_on_a_terminal(write_script: Callable[[str], Path]) -> None:
    script = write_script(
        """
        import time
        from flower_gpu import progress, run_in_worker

        def train():
            for _ in progress(range(4), desc="epoch 1"):
                time.sleep(0.15)
            for _ in progress(range(2), desc="epoch 2"):
                time.sleep(0.15)

        run_in_worker(train, name="3")
        """
    )
    drawn = at_a_terminal(script)
    assert "train of client 3 epoch 1:   0%|" in drawn
    assert "train of client 3 epoch 2:   0%|" in drawn
    assert "/4 [" in drawn
    assert drawn.endswith(" \r")  # the bar is wiped at the end


def test_a_killed_worker_does_not_stop_the_callers_bars(write_script: Callable[[str], Path]) -> None:
    """A fork shares tqdm's lock with its caller, who would wait for it for ever."""
    script = write_script(
        """
        import os
        from tqdm import tqdm
        from flower_gpu import WorkerDiedError, progress, run_in_worker

        def take_the_lock_and_die():
            tqdm.get_lock().acquire()
            os._exit(7)

        def train():
            for _ in progress(range(3), desc="after"):
                pass

        run_in_worker(train, start_method="fork")
        try:
            run_in_worker(take_the_lock_and_die, start_method="fork")
        except WorkerDiedError:
            run_in_worker(train, start_method="fork", timeout_s=60)
        """
    )
    assert at_a_terminal(script).count("train on the server after") >= 2
