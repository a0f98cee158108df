"""Counters are exact and memory is bounded, whatever traces contain and wherever they are cut."""

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
from flower_gpu.watch.folds import calls, hosts, leases, rounds, tally
from flower_gpu.watch.folds.tally import OUTCOMES, Tally
from flower_gpu.watch.followed_run import FollowedRuns
from flower_gpu.watch.history import History
from flower_gpu.watch.host_look import Seen
from flower_gpu.watch.metrics import Collector


def unknown_host() -> Seen:
    """Return the look at a host without a driver and a ledger."""
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


class Scraper:
    """A collector in this process that is scraped repeatedly."""

    def __init__(self) -> None:
        self.running: dict[str, RunningRun] = {}
        self.registry = CollectorRegistry()
        collector: Any = Collector(unknown_host, lambda: list(self.running.values()))
        self.registry.register(collector)
        self.previous: Samples = {}

    def __call__(self) -> Samples:
        """Scrape the collector. No counter may disappear or decrease."""
        samples = samples_of(generate_latest(self.registry).decode())
        for key, number in counters(self.previous).items():
            assert samples[key] >= number
        self.previous = samples
        return samples


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
        scrape, trace_writer = Scraper(), Trace(Path(folder))
        written: list[dict[str, Any]] = []
        # The end of the line that each run is still writing.
        held_back = [b"", b""]

        def append(number: int, data: bytes) -> None:
            path = Path(folder, str(number))
            path.mkdir(exist_ok=True)
            scrape.running.setdefault(str(path), RunningRun(str(path), "launch", "app", 1, 0.0))
            with (path / trace.FILE_NAME).open("ab") as file:
                file.write(data)

        for step in steps:
            if step == "look":
                scrape()
            elif isinstance(step, str):
                number = int(step[-1])
                append(number, held_back[number])
                held_back[number] = b""
                del scrape.running[str(Path(folder, str(number)))]
                scrape()
            else:
                number, events, cut = step
                written += events
                data = held_back[number] + b"".join(trace_writer.line(**event).encode() for event in events)
                held_back[number] = data[len(data) - cut :] if cut else b""
                append(number, data[: len(data) - cut] if cut else data)
        for number in (0, 1):
            append(number, held_back[number])
        samples = scrape()
    finished = Counter(
        event["outcome"] if event.get("outcome") in OUTCOMES else "other"
        for event in written
        if event["event"] == "worker_finished"
    )
    for outcome in (*OUTCOMES, "other"):
        assert value(samples, "workers_finished_total", outcome=outcome) == finished[outcome]
    granted = sum(event["event"] == "lease_granted" for event in written)
    assert value(samples, "leases_granted_total") == value(samples, "lease_wait_seconds_count") == granted


def test_memory_does_not_grow_with_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded for finished calls, for workers without a reported end and for metric names."""
    monkeypatch.setattr(calls, "MOST_OPEN", 500)
    monkeypatch.setattr(leases, "MOST_OPEN", 500)
    monkeypatch.setattr(rounds, "_MOST_PARTS", 200)
    monkeypatch.setattr(hosts, "MOST_HOSTS", 50)
    monkeypatch.setattr(tally, "MOST_HOSTS", 50)
    history = History(keep_finished=False)

    def feed(calls: range) -> None:
        for call in calls:
            base = {"time": 1.0 + call, "call": f"{call}", "pid": call, "client": f"{call}", "round": call}
            events = [
                {"event": "lease_requested", **base},
                {"event": "lease_granted", **base, "call": f"r{call}", "lease": f"{call}", "waited_s": call},
                {"event": "worker_started", **base},
                *([{"event": "worker_finished", **base, "outcome": f"{call}"}] if call % 2 else []),
                {"event": "out_of_memory", **base, "then": f"{call}"},
                {"event": "round", **base, "round": 1, "metrics": {f"{call}": 1.0}},
                {"event": "round_finished", **base, "task": f"{call}", "messages": 1, "failed": 0,
                 "metrics": dict.fromkeys("abcdef", 1.0)},
                {"event": "host_joined", **base, "host": f"{call}", "host_id": f"{call}", "concurrency": 1},
                {"event": "host_joined", **base, "host": "a", "host_id": f"{call}"},
                *([{"event": "host_lost", **base, "host": f"{call}"}] if call % 2 else []),
            ]  # fmt: skip
            history.feed(events)

    tracemalloc.start()
    try:
        feed(range(0, 1500))
        before, _ = tracemalloc.get_traced_memory()
        feed(range(1500, 3000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after < 1.1 * before
    assert 250 < len(history.calls.running) <= 500
    parts = history.rounds.numbered_parts
    assert len(parts) <= 200
    assert all(len(part.metrics) <= 3 and not part.reported_metrics for part in parts[:-50]), (
        "for curves only"
    )
    assert len(history.hosts.by_name) == len(history.tally.host_calls) - 1 == 50
    assert history.tally.workers_finished.keys() == {"other"}
    assert history.tally.out_of_memory.keys() == {"other"}


def test_a_run_that_ends_before_the_first_scrape_is_counted(tmp_path: Path) -> None:
    running = [RunningRun(str(tmp_path), "launch", "app", 1, 0.0)]
    runs = FollowedRuns(0.0, Tally(), lambda: running)
    runs.notice()
    Trace(tmp_path).write("worker_finished", outcome="ok")
    running.clear()
    runs.notice()
    for expected in ([False], [], []):
        assert [followed.is_registered for followed in runs.look()] == expected
        runs.read_on(math.inf)
        assert runs.tally is not None and runs.tally.workers_finished == {"ok": 1}


def test_many_finished_runs_use_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_gpu.watch.followed_run._MOST_GONE", 5)
    running: list[RunningRun] = []
    runs = FollowedRuns(0.0, running=lambda: running)
    for number in range(20):
        running[:] = [RunningRun(str(tmp_path / str(number)), "launch", "app", 1, 0.0)]
        runs.look()
    assert (len(runs._runs), len(runs._gone)) == (2, 5)


def test_hosts_of_a_run_and_their_calls(tmp_path: Path) -> None:
    folder, scrape = str(tmp_path), Scraper()
    scrape.running[folder] = RunningRun(folder, "simulate", "app", os.getpid(), time.time())
    written = Trace(tmp_path, time.time())

    def host_figures(samples: Samples, host: str) -> list[float | None]:
        names = ("up", "messages", "messages_capacity")
        return [value(samples, f"run_host_{name}", run=tmp_path.name, host=host) for name in names]

    written.write("run_started", kind="simulate", name="app", host=platform.node(), pid=os.getpid())
    for number, host in enumerate(("a", "b")):
        written.join(host)
        written.write_text("".join(written.call(number)))
        written.write_text("".join(list(written.call(10 + number, pid=os.getpid()))[:4]))
    written.host = ""
    # The pid exceeds the kernel's limit, so this worker is gone, although its end is not in the trace.
    written.worker("killed", pid=2**22 + 1)
    samples = scrape()
    assert host_figures(samples, "a") == host_figures(samples, "b") == [1, 1, 4]
    assert [value(samples, "workers", phase=phase) for phase in ("starting", "running")] == [0, 2]
    assert value(samples, "host_calls_total", host="a", outcome="ok") == 1
    # The counter starts with 0.
    assert value(samples, "host_calls_total", host="a", outcome="error") == 0
    written.lose("b")
    samples = scrape()
    assert (host_figures(samples, "a"), host_figures(samples, "b")) == ([1, 1, 4], [0, 0, 0])
    assert value(samples, "workers", phase="running") == 1
    for name, labels in (("host_calls_total", {"host": "b"}), ("workers_finished_total", {})):
        assert value(samples, name, outcome="host lost", **labels) == 1
    # The counters stay after the end of the run.
    scrape.running.clear()
    scrape()
    samples = scrape()
    assert value(samples, "host_calls_total", host="b", outcome="ok") == 1
    assert host_figures(samples, "a") == [None] * 3
