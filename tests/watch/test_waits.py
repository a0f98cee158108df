"""The message of a run without workers when other processes hold the cores that its calls need."""

from __future__ import annotations

import io
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from flower_gpu import trace
from flower_gpu.control_group import all_cores
from flower_gpu.leases.admission import CORES, HostNeed
from flower_gpu.leases.ledger import Claimant, Ledger
from flower_gpu.printable import account_name
from flower_gpu.watch.display import make_display
from flower_gpu.watch.history import History
from flower_gpu.watch.waits import WorkerWaits

ALL = 1000 * all_cores()


def test_after_five_seconds_without_a_worker_the_holder_of_the_cores_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_GPU_LEDGER_DIR", str(tmp_path))
    claimant = Claimant(count=0, host_needs=lambda: (HostNeed(CORES, ALL, ALL),), label="messages of other")
    history = History(keep_finished=False)
    stream = io.StringIO()
    display = make_display(history, stream)

    def report(name: str, **fields: Any) -> None:
        event = trace.make(name, **fields)
        history.feed([event])
        display.show(event)

    waits = WorkerWaits(report)
    ledger = Ledger()
    ticket = ledger.acquire(claimant)
    has_asked, is_over = threading.Event(), threading.Event()

    def deadline() -> float:
        has_asked.set()
        if is_over.is_set():
            raise KeyboardInterrupt
        return float("inf")

    def acquire_until_over() -> None:
        with pytest.raises(KeyboardInterrupt):
            Ledger().acquire(claimant, deadline=deadline)

    thread = threading.Thread(target=acquire_until_over)
    thread.start()
    try:
        assert has_asked.wait(60)
        pids = (os.getpid(),)
        assert waits.look(100.0, 104.0, pids) == 4.0 and not stream.getvalue()
        assert waits.look(100.0, 106.0, pids) == 6.0
        assert waits.look(100.0, 107.0, pids) == 7.0
    finally:
        is_over.set()
        thread.join()
        ledger.release(ticket)
    holder = f"messages of other (pid {os.getpid()}) of account {account_name(os.getuid())}"
    text = f"waiting for cores: {ALL / 1000:g} of {ALL / 1000:g} are leased to {holder} since "
    (line,) = stream.getvalue().splitlines()
    assert line.startswith(text) and re.fullmatch(r"\d\d:\d\d:\d\d", line.removeprefix(text)), line
    assert waits.look(None, 108.0, pids) == 7.0 and history.run.waited_s == 7.0
    assert waits.look(200.0, 202.0, pids) == 9.0
    assert waits.look(None, 203.0, pids) == 9.0 and history.run.waited_s == 7.0, "the short wait was reported"


def test_calls_of_a_trace_are_stuck_since_the_end_of_the_last_worker() -> None:
    """A launched run uses the same time to report its wait."""
    call_fields = {"client": "1", "task": "train", "round": 1}
    history = History(keep_finished=False)

    def feed(time: float, name: str, call: str, **fields: Any) -> float | None:
        history.feed([{**trace.make(name, call=call, **call_fields, **fields), "time": time}])
        return history.calls.stuck_since

    assert feed(10.0, "cores_requested", "a", caller_pid=7) == 10.0
    assert feed(12.0, "worker_started", "b", pid=9) is None
    assert feed(15.0, "worker_finished", "b", pid=9, outcome="ok") == 15.0
    assert feed(16.0, "cores_granted", "a", lease="x", waited_s=6.0) is None
