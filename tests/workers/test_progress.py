"""Progress of a running task: its events, and how the caller shows them."""

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
from flower_gpu.calls.worker_report import ProgressDisplay
from flower_gpu.workers import caller as worker
from flower_gpu.workers import events
from flower_gpu.workers.call import Call

Event = dict[str, Any]


def events_of(start_method: str, task: str, *args: Any) -> tuple[list[Event], Any]:
    received: list[Event] = []
    result = worker.run(Call(task, args), start_method, on_event=without_phases(received))
    return received, result


def test_events_are_ordered_limited_and_include_the_last() -> None:
    received, seconds = events_of("forkserver", "plain_tasks:count", 20_001, "epoch 1")
    assert received[0] == {"event": "progress", "desc": "epoch 1", "n": 0, "total": 20_001}
    assert received[-1] == {"event": "progress", "desc": "epoch 1", "n": 20_001, "total": 20_001}
    assert all(earlier["n"] < later["n"] for earlier, later in pairwise(received))
    assert len(received) <= 2 + seconds / events._MIN_INTERVAL_S


@pytest.mark.parametrize("start_method", [*SUPERVISED, "in-process"])
def test_short_loops_report_their_start_and_end(start_method: str) -> None:
    """This includes loops without a length, and loops in a thread of the worker."""
    received, _ = events_of(start_method, "plain_tasks:count_in_many_ways")
    reports = [(event["desc"], event["n"], event["total"]) for event in received]
    assert reports == [
        ("none", 0, 0),
        *[("one", 0, 1), ("one", 1, 1)],
        *[("two", 0, 2), ("two", 2, 2)],
        *[("stream", 0, None), ("stream", 7, None)],
        *[("numpy", 0, 3), ("numpy", 3, 3)],
        *([("thread", 0, 5), ("thread", 5, 5)] if start_method in SUPERVISED else []),
    ]


def test_outside_of_a_call_progress_only_iterates(capsys: pytest.CaptureFixture[str]) -> None:
    received, _ = events_of("in-process", "plain_tasks:count", 2)
    assert len(received) == 2
    assert list(flower_gpu.progress(n * n for n in range(4))) == [0, 1, 4, 9]
    assert list(flower_gpu.progress([], desc="nothing")) == []
    assert capsys.readouterr() == ("", "")
    assert len(received) == 2  # No event arrives after the call.


def test_a_loop_may_end_early_or_fail() -> None:
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


def test_a_nested_call_reports_to_its_own_caller(
    start_method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def outer(method: str) -> None:
        run_in_worker("plain_tasks:count", 3, "inner", start_method=method)

    received: list[Event] = []
    worker.run(Call(outer, (start_method,)), start_method, on_event=without_phases(received))
    assert received == []
    assert "inner 3/3" in capsys.readouterr().err


def test_without_a_terminal_progress_is_shown_as_lines(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run_in_worker("plain_tasks:count", 30, "epoch 1", name="7")
    assert capfd.readouterr() == ("", "plain_tasks:count of client 7: epoch 1 30/30\n")
    first, last = run.events("progress")
    assert (first["n"], first["total"], first["desc"], first["client"]) == (0, 30, "epoch 1", "7")
    assert (last["n"], last["pid"]) == (30, run.pids()[0])


def test_with_ends_once_the_last_line_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The server evaluates in each round, and clients train in each round."""
    # Printed lines are remembered as long as this process lives, so the label must be new.
    label = f"evaluate on the server {os.urandom(4).hex()}"
    for ends_once, count in ((True, 1), (False, 3)):
        for _ in range(3):
            with ProgressDisplay(label, {}, ends_once=ends_once) as display:
                for n in range(3):
                    display.on_event({"event": "progress", "desc": "evaluate", "n": n, "total": 2})
        assert capsys.readouterr().err == f"{label}: evaluate 2/2\n" * count


def test_repeated_evaluations_of_the_server_print_a_single_line(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
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
        [{"desc": "epoch 1", "n": n, "total": 5000} for n in range(5000)],
        [{"desc": str(number), "n": number % 3, "total": number % 2} for number in range(50)],
    ],
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_reports_of_an_endless_app_are_limited(
    reports: list[Event],
    is_terminal: bool,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each report may look like the last step. Trace and terminal get few reports, and the last report."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    last = {"desc": "end", "n": 9, "total": 9}
    began = time.monotonic()
    with ProgressDisplay("fit of client 3", {}) as display:
        for number in range(5000):
            display.on_event({"event": "progress", **reports[number % len(reports)]})
        display.on_event({"event": "progress", **last})
        display.on_event({"event": "something else"})
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
    """A stream whose reader has closed it."""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("kind", ["none", "closed", "broken"])
def test_a_task_runs_even_if_stderr_cannot_be_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", {"none": None, "closed": closed, "broken": Closed()}[kind])
    assert run_in_worker("plain_tasks:count_without_length", 3) == 3
    run_in_worker("plain_tasks:count", 3)


def at_a_terminal(script: Path) -> str:
    """Run a script with a pseudo-terminal as its stderr, and return the output on it."""
    terminal, script_end = pty.openpty()
    fcntl.ioctl(script_end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))  # tqdm fills its width.
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=script_end
    ) as process:
        os.close(script_end)
        limit = threading.Timer(120, process.kill)  # A failing test may cause a deadlock.
        limit.start()
        drawn = b""
        while True:
            try:
                data = os.read(terminal, 10_000)
            except OSError:  # The other end is closed.
                break
            if not data:
                break
            drawn += data
        os.close(terminal)
        limit.cancel()
        assert process.wait(timeout=60) == 0, drawn.decode()
    return drawn.decode()


def test_a_bar_is_drawn_on_a_terminal(write_script: Callable[[str], Path]) -> None:
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
    assert drawn.endswith(" \r")  # The bar is erased at the end.


def test_a_killed_worker_does_not_block_the_callers_bars(write_script: Callable[[str], Path]) -> None:
    """A fork shares tqdm's lock with its caller, which would wait for it for ever."""
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
