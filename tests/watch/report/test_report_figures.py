"""The data of the pictures and tables of a report."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvml_stub import GIB
from properties import examples
from report_traces import Event, Run, at, history_of, joined, lost

from flower_gpu.watch.fields import client_key, metric_rank
from flower_gpu.watch.folds.hosts import GPUInfo
from flower_gpu.watch.folds.tally import HOST_LOST
from flower_gpu.watch.folds.worker_span import EXITING, RUNNING, STARTING, WAITING
from flower_gpu.watch.report.calls import NO_LEASE, PHASES, CallTry, RunClock, client_rows, tries_of
from flower_gpu.watch.report.pictures import (
    COLOURS,
    Picture,
    TimeAxis,
    gpu_name,
    lanes_of,
    memory_picture,
    pack,
    stacked,
    workers_picture,
)
from flower_gpu.watch.report.ticks import ticks
from flower_gpu.watch.report.totals import HeldPart, Totals, holdings_of, leased_steps

RUNS = st.builds(
    Run,
    clients=st.integers(1, 14),
    gpus=st.integers(1, 3),
    rounds=st.integers(1, 2),
    lease_gib=st.sampled_from([2.0, 4.0, 7.875, 15.75]),
    late_s=st.sampled_from([0.0, 0.05, 1.0, 4.0]),
    failing=st.sampled_from([0.0, 0.4]),
    lost=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
)


def read(events: list[Event]) -> tuple[Any, RunClock, list[CallTry], dict[str, list[HeldPart]], Totals]:
    history = history_of(events)
    clock = RunClock.of(history)
    tries = tries_of(history, clock)
    holdings = {uuid: holdings_of(history, clock, uuid) for uuid in history.hosts.gpus}
    return history, clock, tries, holdings, Totals(history, clock, tries, holdings)


# Leases.


@settings(max_examples=examples(25))
@given(run=RUNS, least_s=st.sampled_from([1e-9, 0.02, 1.0]))
def test_drawn_leases_match_the_granted_ones_and_never_exceed_the_capacity(run: Run, least_s: float) -> None:
    """This holds even if releases are written late or never, after their memory was granted again."""
    history, clock, tries, holdings, totals = read(run.events())
    for gpu in totals.gpus:
        held, capacity = holdings[gpu.gpu.uuid], history.hosts.gpus[gpu.gpu.uuid].capacity_bytes
        assert max(leased_steps(held)[1], default=0) <= capacity
        pieces = [
            (begin, end, low, low + first.memory_bytes) for first, begin, end, low in stacked(held, least_s)
        ]
        for begin_s, end_s, _, top in pieces:
            assert begin_s < end_s and top <= capacity
        for first, second in itertools.combinations(pieces, 2):
            is_apart_in_time = first[1] <= second[0] or second[1] <= first[0]
            assert is_apart_in_time or first[3] <= second[2] or second[3] <= first[2]
        if least_s < 1e-6:
            area = sum((end_s - begin_s) * (top - low) for begin_s, end_s, low, top in pieces)
            assert area == pytest.approx(gpu.leased_byte_s)
        assert 0 <= gpu.leased_s <= totals.duration_s
        assert 0 <= (gpu.capacity_share(totals.duration_s) or 0) <= 1
    # The parts of a call are adjacent.
    assert totals.calls == run.clients * run.rounds
    for call in tries:
        for earlier, later in itertools.pairwise(call.parts):
            assert earlier.end_s == later.begin_s
            assert PHASES.index(earlier.phase) < PHASES.index(later.phase)
        assert 0 <= call.begin_s <= call.end_s <= clock.duration_s
    assert [row["client"] for row in client_rows(tries)] == [str(number) for number in range(run.clients)]
    assert totals.workers == sum(first.worker is not None for first in tries)


def test_a_lease_of_a_killed_holder_ends_when_its_memory_is_granted_again() -> None:
    events = Run(clients=2, lease_gib=10, late_s=0).events()
    first = next(event["lease"] for event in events if event["event"] == "lease_granted")
    events = [e for e in events if (e["event"], e.get("lease")) != ("lease_released", first)]
    _, _, _, holdings, _ = read(events)
    killed, next_lease = holdings[Run().uuids[0]]
    assert killed.end_s == next_lease.begin_s > killed.begin_s


# Calls.


def lease_events(call: str, seconds: float, **fields: Any) -> list[Event]:
    call_fields = {"call": call, "client": call, "task": "fit", "round": 1}
    gpus = [{"uuid": "G", "index": 0, "name": "A100", "memory_bytes": GIB}]
    return [
        at(seconds, "lease_requested", **call_fields, count=1, memory_bytes=GIB),
        at(seconds + 2, "lease_granted", **call_fields, lease=f"lease-{call}", gpus=gpus),
    ]


def worker_events(call: str, seconds: float, lease: str | None = None, outcome: str = "ok") -> list[Event]:
    """Return the events of a worker that starts for 1 s, runs for 4 s, and exits for 0.5 s."""
    call_fields = {"call": call, "client": call, "task": "fit", "round": 1, "pid": 5, "start_method": "fork"}
    if lease is not None:
        call_fields["lease"] = lease
    return [
        at(seconds, "worker_started", **call_fields),
        at(seconds + 1, "task_started", call=call, pid=5),
        at(seconds + 5, "worker_result", call=call, pid=5),
        at(seconds + 5.5, "worker_finished", **call_fields, outcome=outcome, error="no\nmore"),
    ]


def spent(call: CallTry) -> list[tuple[str, float]]:
    return [(part.phase, round(part.seconds, 3)) for part in call.parts]


def test_phases_of_a_call() -> None:
    events = [
        *lease_events("3", 0),
        *worker_events("3", 2.5, "lease-3"),
        at(9, "lease_released", lease="lease-3"),
    ]
    _, _, [call], _, totals = read(events)
    assert spent(call) == [(WAITING, 2.0), (STARTING, 1.5), (RUNNING, 4.0), (EXITING, 0.5)]
    assert (call.gpus, call.outcome, call.has_failed) == (("G",), "ok", False)
    assert totals.lost_s == pytest.approx(3.5)
    assert totals.leased_s == pytest.approx(7.0)
    assert totals.idle_share == pytest.approx(2 / 9)


def test_a_reused_worker_waits_once() -> None:
    first = [*lease_events("a", 0), *worker_events("a", 2, "lease-a")]
    second_events = worker_events("b", 8, "lease-a")
    events = [*first, *second_events, at(20, "run_finished", outcome="completed")]
    _, _, [first_call, second_call], holdings, totals = read(events)
    assert spent(second_call) == [(STARTING, 1.0), (RUNNING, 4.0), (EXITING, 0.5)]
    assert first_call.gpus == second_call.gpus == ("G",)
    assert lanes_of([first_call, second_call]) == [0, 0]
    # The lease belongs to each client while the worker serves that client.
    held = [(part.client, part.begin_s, part.end_s) for part in holdings["G"]]
    assert [client for client, _, _ in held] == ["a", "b"]
    assert held[0][2] == held[1][1] == second_call.begin_s
    assert (totals.calls, totals.workers, totals.unfinished) == (2, 2, 0)


def test_calls_without_an_end_and_without_a_worker() -> None:
    refused = [*lease_events("1", 0)[:1], at(3, "lease_not_granted", call="1", reason="LeaseTimeoutError")]
    granted = lease_events("2", 0)
    on_cpu = worker_events("4", 1)[:2]
    waiting = lease_events("5", 4)[:1]
    for_cores = [
        at(4, "cores_requested", call="6", client="6", task="fit", round=1, caller_pid=1, cores=1),
        at(7, "cores_granted", call="6", client="6", task="fit", round=1, lease="cores", waited_s=3),
    ]
    _, _, tries, _, totals = read([*refused, *granted, *on_cpu, *waiting, *for_cores, at(10, "progress")])
    spent_and_outcome = {call.span.client: (spent(call), call.outcome) for call in tries}
    assert spent_and_outcome == {
        "1": ([(WAITING, 3.0)], NO_LEASE),
        "2": ([(WAITING, 2.0), (STARTING, 8.0)], ""),
        "4": ([(STARTING, 1.0), (RUNNING, 8.0)], ""),
        "5": ([(WAITING, 6.0)], ""),
        "6": ([(WAITING, 3.0), (STARTING, 3.0)], ""),
    }
    assert (totals.unfinished, dict(totals.outcomes)) == (4, {NO_LEASE: 1})
    assert [(failure.description, failure.count, failure.clients) for failure in totals.errors] == [
        (NO_LEASE, 1, {"1"})
    ]


def test_calls_end_with_their_host_and_have_not_failed() -> None:
    on_gpu = [*lease_events("1", 0), *worker_events("1", 2, "lease-1")[:2]]
    events = [*on_gpu, *worker_events("2", 1)[:1], *lease_events("3", 0), *lease_events("4", 4)[:1]]
    events = [*({**event, "host": "a"} for event in events), *worker_events("5", 1, outcome="error")]
    events.sort(key=lambda event: event["time"])
    gpus = [{"uuid": "G", "name": "A100"}]
    ends = [lost(5, "a"), joined(6, "a", gpus=gpus), at(20, "run_finished", outcome="completed")]
    _, _, tries, holdings, totals = read([joined(0, "a", gpus=gpus), *events, *ends])
    assert {call.span.client: (call.span.host, call.outcome, call.end_s) for call in tries} == {
        **dict.fromkeys("1234", ("a", HOST_LOST, 5.0)),
        "5": ("", "error", 6.5),
    }
    assert [item.end_s for item in holdings["G"]] == [5.0, 5.0]
    assert (totals.failures, totals.unfinished) == ({"error": 1}, 0)
    assert [item.clients for item in totals.errors] == [{"5"}]
    assert sum(row["failures"] for row in client_rows(tries)) == 1
    (host,) = totals.hosts
    assert (host.calls, host.failed, host.workers, host.gpus) == (4, 0, 2, {"A100": 1})
    assert (host.joined_s, host.lost_s, host.host.is_lost) == (0.0, 5.0, False)
    # The sum has the first call, the second one, and the third, whose worker has not started.
    assert host.busy_s == pytest.approx(3.0 + 4.0 + 3.0)


def test_a_worker_ends_with_its_lease() -> None:
    """The end of the worker is not in the trace, but the release of its lease is."""
    events = [*lease_events("1", 0), *worker_events("1", 2, "lease-1")[:2]]
    _, _, [call], _, _ = read([*events, at(6, "lease_released", lease="lease-1"), at(20, "progress")])
    assert (spent(call)[-1], call.outcome) == ((RUNNING, 3.0), "")


def test_a_resumed_run_does_not_count_the_pause() -> None:
    started = {"kind": "simulate", "name": "app", "gpus": []}
    events = [
        at(0, "run_started", **started),
        *worker_events("1", 2)[:2],  # this worker was killed with the run
        at(4, "progress"),
        at(40_000, "run_started", **started),
        *worker_events("2", 40_001),
        at(40_008, "run_finished", outcome="completed"),
    ]
    _, clock, [killed, resumed], _, totals = read(events)
    assert clock.duration_s == totals.duration_s == 12
    assert [clock.seconds(begin) for begin, _ in clock.pauses] == [4.0]
    assert (killed.begin_s, killed.end_s, killed.outcome) == (2, 4, "")
    assert (resumed.begin_s, resumed.end_s) == (5, 10.5)
    # If two hosts share a folder, the start of the second one is no pause.
    started["kind"] = "supernodes"
    events = [at(0, "run_started", **started), at(5, "run_started", **started), at(9, "progress")]
    assert read(events)[1].pauses == ()


# Lanes.

SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda s: (float(s[0]), float(sum(s)))), max_size=40
)


@settings(max_examples=examples(30))
@given(spans=SPANS)
def test_lanes_are_as_few_as_possible(spans: list[tuple[float, float]]) -> None:
    lanes = pack(spans)
    for (first, first_lane), (second, second_lane) in itertools.combinations(
        zip(spans, lanes, strict=True), 2
    ):
        if first_lane == second_lane:
            assert first[1] <= second[0] or second[1] <= first[0]
    busiest = max((sum(b <= at_s < e for b, e in spans) for at_s, _ in spans), default=0)
    if all(begin < end for begin, end in spans):
        assert len(set(lanes)) == busiest


# Pictures and names.


def pictures_of(events: list[Event]) -> tuple[TimeAxis, Picture | None, Picture | None]:
    history, clock, tries, holdings, _ = read(events)
    axis = TimeAxis(clock, tries)
    return axis, workers_picture(history, axis, tries), memory_picture(history, axis, holdings)


@pytest.mark.parametrize("clients", [1, COLOURS, COLOURS + 1])
def test_every_colour_of_a_lease_is_in_the_legend(clients: int) -> None:
    _, _, picture = pictures_of(Run(clients=clients, lease_gib=2.0).events())
    assert picture is not None
    leases = {text for kind, text in picture.legend.items() if kind not in ("used", "limit", "before")}
    if clients > COLOURS:
        assert leases == {"leases of 15 clients"}
    else:
        assert leases == {f"client {number}" for number in range(clients)}
    bars = picture.panels[0].bars
    assert {bar.kind for bar in bars} <= picture.legend.keys()
    assert {bar.title.partition(":")[0] for bar in bars} == {f"client {number}" for number in range(clients)}


def test_work_begins_with_the_first_call() -> None:
    events = [at(0, "run_started", kind="simulate", name="app", gpus=[])]
    late = [*events, *worker_events("1", 20), at(40, "run_finished", outcome="completed")]
    for trace_events, expected in ((late, 20.0), (events, 0.0), (late[:1] + worker_events("1", 0), 0.0)):
        axis, _, _ = pictures_of(trace_events)
        assert axis.work_x == axis.x(expected)


def test_many_short_calls_are_drawn_as_counts_and_a_worker_counts_once() -> None:
    """Each of two workers makes a call of 50 ms every 200 ms, and the server makes one call."""
    count = 2400
    events = [at(0, "run_started", kind="simulate", name="app", gpus=[])]
    for number in range(count + 1):
        client, pid = ("server", 9) if number == count else (str(number % 7), 5 + number % 2)
        call_fields = {"call": str(number), "client": client, "task": "fit", "round": 1, "pid": pid}
        call_fields |= {"start_method": "forkserver", "used_again": 2 <= number < count}
        start = at(number / 10, "worker_started", **call_fields)
        end_fields = {"task_at": start["time"], "result_at": start["time"] + 0.05, "outcome": "ok"}
        events += [start, at(number / 10 + 0.05, "worker_finished", **call_fields, **end_fields)]
    history, _, tries, _, totals = read(events)
    assert (totals.calls, totals.workers, totals.server_workers) == (count + 1, 2, 1)
    assert history.tally.workers_started == 3
    axis, picture, _ = pictures_of(events)
    assert picture is not None and picture.caption == "How many calls were in which phase."
    [panel] = picture.panels
    assert panel.bars[0].kind == "running" and len(panel.bars[0].path) < 20_000
    means = axis.means((part.begin_s, part.end_s, 1) for call in tries for part in call.parts)
    assert sum(means) / len(means) * axis.length_s == pytest.approx((count + 1) * 0.05, rel=0.01)


@settings(max_examples=examples(40))
@given(maximum=st.floats(1e-3, 1e12), count=st.integers(3, 12))
def test_ticks_of_an_axis_are_few_round_numbers(maximum: float, count: int) -> None:
    numbers = ticks(0.0, maximum, count)
    assert numbers[0] == 0 and numbers[-1] <= maximum * (1 + 1e-9)
    assert 2 <= len(numbers) <= count + 1


def test_gpu_names_are_unique_by_host_and_number() -> None:
    def names(*gpus: tuple[str, int]) -> list[str]:
        infos = [GPUInfo(f"MIG-{position}", index, host=host) for position, (host, index) in enumerate(gpus)]
        return [gpu_name(gpu, infos) for gpu in infos]

    assert names(("a", 0), ("a", 1)) == ["GPU 0", "GPU 1"]
    assert names(("a", 0), ("a", 0)) == ["GPU 0 (MIG-0)", "GPU 0 (MIG-1)"]
    assert names(("a", 0), ("b", 0), ("b", 0)) == [
        *("GPU 0 on a", "GPU 0 (MIG-1) on b", "GPU 0 (MIG-2) on b")
    ]
    long = "gpu-worker-7d9f8b6c5-x2k4q"
    assert names((f"node7.{long}", 0), (long, 1)) == ["GPU 0 on node7", f"GPU 1 on {long[-20:]}"]


def test_workers_on_cpus_are_in_the_lanes_of_their_host() -> None:
    events = [*worker_events("1", 0), *worker_events("2", 0)]
    for event in events[:4]:
        event["host"] = "a"
    for trace_events, labels in ((events, ["CPU on a", "CPU"]), (events[:4], ["CPU"]), (events[4:], ["CPU"])):
        _, picture, _ = pictures_of(trace_events)
        assert picture is not None and [panel.title for panel in picture.panels] == labels


def test_accuracy_and_loss_come_first_and_clients_are_sorted_naturally() -> None:
    names = ("recall", "test_precision_macro", "time", "train-loss", "val_acc_top5", "lossy", "F1-score")
    order = ["val_acc_top5", "train-loss", "F1-score", "test_precision_macro", "recall", "time", "lossy"]
    assert sorted(names, key=metric_rank) == order
    clients = ["10", "client-10", "9", "server", "a"]
    assert sorted(clients, key=client_key) == ["server", "9", "10", "a", "client-10"]


def test_a_round_repeated_by_a_resumed_run_counts_once() -> None:
    def finished(when: float, number: int | None, failed: int) -> Event:
        return at(when, "round_finished", round=number, task="train", messages=4, failed=failed, seconds=1.0)

    history = history_of(
        [
            *(finished(0, None, 0), finished(1, 1, 0), finished(2, 2, 3)),
            # A part without a round also counts once.
            *(at(3, "run_started", kind="simulate"), finished(3, None, 2)),
            at(3, "strategy_resumed", round=1),
            finished(4, 2, 1),
        ]
    )
    parts = [(part.round, part.messages, part.failed) for part in history.rounds.parts]
    assert parts == [(1, 4, 0), (None, 4, 2), (2, 4, 1)]
