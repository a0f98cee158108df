"""Whatever is in traces, and however they are cut: counters are exact, and memory is bounded."""

from __future__ import annotations

import tempfile
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_exporter import Samples, line, samples_of, value
from prometheus_client import CollectorRegistry, generate_latest

from flower_gpu import trace
from flower_gpu.monitor.metrics import counts
from flower_gpu.monitor.metrics.collector import Collector
from flower_gpu.monitor.metrics.counts import OUTCOMES, RunCounts, Totals
from flower_gpu.monitor.metrics.host import HostState
from flower_gpu.monitor.metrics.runs import Runs
from flower_gpu.monitor.metrics.server import keep_up
from flower_gpu.run.registry import RunningRun


class NoHost:
    """A host of which nothing is known."""

    def look(self) -> HostState:
        return HostState()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(-(10**400), 10**400),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=4,
)
NAMES = ("run_started", "strategy_started", "round_started", "round_finished", "round", "lease_granted",
         "lease_not_granted", "out_of_memory", "worker_started", "worker_finished", "task_started",
         "worker_result", "gpu_sample", "nothing of ours")  # fmt: skip
FIELDS = ("call", "pid", "client", "round", "num_rounds", "task", "metrics", "outcome", "then", "waited_s",
          "host", "start_method", "time")  # fmt: skip
EVENTS = st.fixed_dictionaries(
    {"event": st.sampled_from(NAMES)}, optional=dict.fromkeys(FIELDS, ANYTHING)
) | st.builds(
    lambda call, pid, outcome: {"event": "worker_finished", "call": call, "pid": pid, "outcome": outcome},
    st.sampled_from("ab"),
    st.integers(1, 2),
    st.sampled_from((*OUTCOMES, "of another version")),
)


def counters(samples: Samples) -> Samples:
    ends = ("_total", "_bucket", "_sum", "_count")
    return {key: value for key, value in samples.items() if key[0].endswith(ends)}


class Looks:
    """A collector in this process that looks again and again."""

    def __init__(self) -> None:
        self.running: dict[str, RunningRun] = {}
        self.registry = CollectorRegistry()
        collector: Any = Collector(NoHost(), Runs(lambda: list(self.running.values())))  # type: ignore[arg-type]
        self.registry.register(collector)
        self.before: Samples = {}

    def __call__(self) -> Samples:
        """Look, and see that no counter is gone or less than it was."""
        found = samples_of(generate_latest(self.registry).decode())
        for key, number in counters(self.before).items():
            assert found[key] >= number
        self.before = found
        return found


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from((0, 1)), st.lists(EVENTS, max_size=4), st.integers(0, 40)),
            st.sampled_from(("look", "end 0", "end 1")),
        ),
        max_size=20,
    )
)
def test_counters_are_exact_and_never_go_down(steps: Iterable[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        looks = Looks()
        written: list[dict[str, Any]] = []
        held_back = [b"", b""]  # of a line that is being written

        def append(number: int, data: bytes) -> None:
            path = Path(folder, str(number))
            path.mkdir(exist_ok=True)
            looks.running.setdefault(str(path), RunningRun(str(path), "launch", "app", 1, 0.0))
            with (path / trace.FILE_NAME).open("ab") as file:
                file.write(data)

        for step in steps:
            if step == "look":
                looks()
            elif isinstance(step, str):
                number = int(step[-1])
                append(number, held_back[number])
                held_back[number] = b""
                del looks.running[str(Path(folder, str(number)))]
                looks()
            else:
                number, events, cut = step
                written += events
                data = held_back[number] + b"".join(line(event).encode() for event in events)
                held_back[number] = data[len(data) - cut :] if cut else b""
                append(number, data[: len(data) - cut] if cut else data)
        for number in (0, 1):
            append(number, held_back[number])
        found = looks()
    finished = Counter(
        event["outcome"] if event.get("outcome") in OUTCOMES else "other"
        for event in written
        if event["event"] == "worker_finished"
    )
    for outcome in (*OUTCOMES, "other"):
        assert value(found, "workers_finished_total", outcome=outcome) == finished[outcome]
    granted = sum(event["event"] == "lease_granted" for event in written)
    assert value(found, "leases_granted_total") == value(found, "lease_wait_seconds_count") == granted


def test_memory_does_not_grow_with_a_run() -> None:
    """Neither with what is over, nor with workers whose end nobody has told, nor with names of metrics."""
    run = RunCounts(Totals())

    def feed(calls: range) -> None:
        for call in calls:
            told = {"call": f"{call}", "pid": call, "client": f"{call}", "round": call}
            run.feed({"event": "worker_started", **told})
            if call % 2:
                run.feed({"event": "worker_finished", **told, "outcome": f"{call}"})
            run.feed({"event": "lease_granted", **told, "waited_s": call})
            run.feed({"event": "out_of_memory", **told, "then": f"{call}"})
            run.feed({"event": "round", "round": 1, "metrics": {f"{call}": 1.0}})
            run.feed({"event": "round_finished", "round": call, "task": f"{call}", "metrics": {"a": 1.0}})

    most = counts._MOST_WORKERS
    tracemalloc.start()
    try:
        feed(range(0, 3 * most))
        before, _ = tracemalloc.get_traced_memory()
        feed(range(3 * most, 6 * most))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after < 1.1 * before
    assert most / 2 < len(run.workers) <= most
    assert len(run.evaluations) <= counts._MOST_EVALUATIONS
    assert run.totals.finished.keys() == {"other"}
    assert run.totals.out_of_memory.keys() == {"other"}


def test_a_trace_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is, and with lines that are longer than a piece."""
    monkeypatch.setattr("flower_gpu.monitor.metrics.runs._PIECE_BYTES", 50)
    with (tmp_path / trace.FILE_NAME).open("w") as file:
        for number in range(20):
            file.write(line({"event": "worker_finished", "outcome": "ok", "error": "x" * 10 * number}))
    runs = Runs(lambda: [RunningRun(str(tmp_path), "launch", "app", 1, 0.0)])
    runs.look()
    assert runs.totals.finished == {"ok": 20}


def test_a_run_that_is_over_before_anybody_asks_is_counted(tmp_path: Path) -> None:
    running = [RunningRun(str(tmp_path), "launch", "app", 1, 0.0)]
    runs = Runs(lambda: running)
    runs.notice()
    (tmp_path / trace.FILE_NAME).write_text(line({"event": "worker_finished", "outcome": "ok"}))
    running.clear()
    runs.notice()
    for goes_on in ([False], [], []):
        assert [followed.goes_on for followed in runs.look()] == goes_on
        assert runs.totals.finished == {"ok": 1}


def test_runs_are_noticed_again_and_again() -> None:
    end = threading.Event()
    calls: list[str] = []

    class Noted:
        def catch_up(self) -> None:
            calls.append("catch_up")

        def notice(self) -> None:
            calls.append("notice")
            if len(calls) == 3:
                end.set()

    keep_up(Noted(), end)  # type: ignore[arg-type]
    assert calls == ["catch_up", "notice", "notice"]


def test_many_runs_leave_little_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_gpu.monitor.metrics.runs._MOST_ENDED", 5)
    running: list[RunningRun] = []
    runs = Runs(lambda: running)
    for number in range(20):
        running[:] = [RunningRun(str(tmp_path / str(number)), "launch", "app", 1, 0.0)]
        runs.look()
    assert (len(runs._followed), len(runs._ended)) == (2, 5)
