"""Whatever is in traces, and however they are cut: counters are exact, and memory is bounded."""

from __future__ import annotations

import math
import os
import platform
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_exporter import Samples, counters, samples_of, value
from prometheus_client import CollectorRegistry, generate_latest
from properties import examples
from top_traces import Trace

from flower_gpu import trace
from flower_gpu.apps.recording import RunningRun
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.watch import history, spans
from flower_gpu.watch.followed_run import FollowedRuns
from flower_gpu.watch.host_look import Seen
from flower_gpu.watch.metrics import Collector
from flower_gpu.watch.spans import OUTCOMES, Tally


def no_host() -> Seen:
    """See a host of which nothing is known."""
    return Seen(0.0, Inventory((), None, "no driver"))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(-(10**400), 10**400),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=4,
)
NAMES = ("run_started", "strategy_started", "round_started", "round_finished", "round", "lease_granted",
         "lease_not_granted", "out_of_memory", "worker_started", "worker_finished", "task_started",
         "worker_result", "gpu_sample", "host_joined", "nothing of ours")  # fmt: skip
FIELDS = ("call", "pid", "client", "round", "num_rounds", "task", "metrics", "outcome", "then", "waited_s",
          "host", "host_id", "concurrency", "start_method")  # fmt: skip
EVENTS = st.fixed_dictionaries(
    {"event": st.sampled_from(NAMES)}, optional=dict.fromkeys(FIELDS, ANYTHING)
) | st.builds(
    lambda call, pid, outcome: {"event": "worker_finished", "call": call, "pid": pid, "outcome": outcome},
    st.sampled_from("ab"),
    st.integers(1, 2),
    st.sampled_from((*OUTCOMES, "of another version")),
)


class Looks:
    """A collector in this process that looks again and again."""

    def __init__(self) -> None:
        self.running: dict[str, RunningRun] = {}
        self.registry = CollectorRegistry()
        collector: Any = Collector(no_host, lambda: list(self.running.values()))
        self.registry.register(collector)
        self.before: Samples = {}

    def __call__(self) -> Samples:
        """Look, and see that no counter is gone or less than it was."""
        found = samples_of(generate_latest(self.registry).decode())
        for key, number in counters(self.before).items():
            assert found[key] >= number
        self.before = found
        return found


@settings(max_examples=examples(40))
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
        looks, made = Looks(), Trace(Path(folder))
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
                data = held_back[number] + b"".join(made.line(**event).encode() for event in events)
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


def test_memory_does_not_grow_with_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with what is over, nor with workers whose end nobody has told, nor with names of metrics."""
    monkeypatch.setattr(history, "_MOST_OPEN", 500)
    monkeypatch.setattr(history, "_MOST_PARTS", 200)
    monkeypatch.setattr(history, "MOST_HOSTS", 50)
    monkeypatch.setattr(spans, "MOST_HOSTS", 50)
    run = history.History(keep_finished=False)

    def feed(calls: range) -> None:
        for call in calls:
            told = {"time": 1.0 + call, "call": f"{call}", "pid": call, "client": f"{call}", "round": call}
            events = [
                {"event": "lease_requested", **told},
                {"event": "lease_granted", **told, "call": f"r{call}", "lease": f"{call}", "waited_s": call},
                {"event": "worker_started", **told},
                *([{"event": "worker_finished", **told, "outcome": f"{call}"}] if call % 2 else []),
                {"event": "out_of_memory", **told, "then": f"{call}"},
                {"event": "round", **told, "round": 1, "metrics": {f"{call}": 1.0}},
                {"event": "round_finished", **told, "task": f"{call}", "messages": 1, "failed": 0,
                 "metrics": dict.fromkeys("abcdef", 1.0)},
                {"event": "host_joined", **told, "host": f"{call}", "host_id": f"{call}", "concurrency": 1},
                {"event": "host_joined", **told, "host": "a", "host_id": f"{call}"},
                *([{"event": "host_lost", **told, "host": f"{call}"}] if call % 2 else []),
            ]  # fmt: skip
            run.feed(events)

    tracemalloc.start()
    try:
        feed(range(0, 1500))
        before, _ = tracemalloc.get_traced_memory()
        feed(range(1500, 3000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after < 1.1 * before
    assert 250 < len(run.running) <= 500
    assert len(run.evaluations) <= 200
    assert all(len(part.metrics) <= 3 and not part.told for part in run.evaluations[:-50]), "for curves only"
    assert len(run.hosts) == len(run.tally.host_calls) - 1 == 50
    assert run.tally.workers_finished.keys() == {"other"}
    assert run.tally.out_of_memory.keys() == {"other"}


def test_a_run_that_is_over_before_anybody_asks_is_counted(tmp_path: Path) -> None:
    running = [RunningRun(str(tmp_path), "launch", "app", 1, 0.0)]
    runs = FollowedRuns(0.0, Tally(), lambda: running)
    runs.notice()
    Trace(tmp_path).write("worker_finished", outcome="ok")
    running.clear()
    runs.notice()
    for goes_on in ([False], [], []):
        assert [followed.is_registered for followed in runs.look()] == goes_on
        runs.read_on(math.inf)
        assert runs.tally is not None and runs.tally.workers_finished == {"ok": 1}


def test_many_runs_leave_little_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_gpu.watch.followed_run._MOST_GONE", 5)
    running: list[RunningRun] = []
    runs = FollowedRuns(0.0, running=lambda: running)
    for number in range(20):
        running[:] = [RunningRun(str(tmp_path / str(number)), "launch", "app", 1, 0.0)]
        runs.look()
    assert (len(runs._runs), len(runs._gone)) == (2, 5)


def test_hosts_of_a_run_and_their_calls(tmp_path: Path) -> None:
    folder, looks = str(tmp_path), Looks()
    looks.running[folder] = RunningRun(folder, "simulate", "app", os.getpid(), time.time())
    made = Trace(tmp_path, time.time())

    def host_figures(found: Samples, host: str) -> list[float | None]:
        names = ("up", "messages", "messages_capacity")
        return [value(found, f"run_host_{name}", run=tmp_path.name, host=host) for name in names]

    made.write("run_started", kind="simulate", name="app", host=platform.node(), pid=os.getpid())
    for number, host in enumerate(("a", "b")):
        made.join(host)
        made.write_text("".join(made.call(number)))
        made.write_text("".join(list(made.call(10 + number, pid=os.getpid()))[:4]))
    made.host = ""
    made.worker("killed", pid=2**22 + 1)  # no kernel counts that far; nobody has written its end down
    found = looks()
    assert host_figures(found, "a") == host_figures(found, "b") == [1, 1, 4]
    assert [value(found, "workers", phase=phase) for phase in ("starting", "running")] == [0, 2]
    assert value(found, "host_calls_total", host="a", outcome="ok") == 1
    assert value(found, "host_calls_total", host="a", outcome="error") == 0  # from zero on
    made.lose("b")
    found = looks()
    assert (host_figures(found, "a"), host_figures(found, "b")) == ([1, 1, 4], [0, 0, 0])
    assert value(found, "workers", phase="running") == 1
    for name, labels in (("host_calls_total", {"host": "b"}), ("workers_finished_total", {})):
        assert value(found, name, outcome="host lost", **labels) == 1
    # What was counted stays when the run is over.
    looks.running.clear()
    looks()
    found = looks()
    assert value(found, "host_calls_total", host="b", outcome="ok") == 1
    assert host_figures(found, "a") == [None] * 3
