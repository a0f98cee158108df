"""Part ``many``: the driver with many hosts, each of which is a clock: its own threads, without Ray."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.supercore.run import Run

from benchmarks.shared import table
from flower_gpu.flower.resuming.states import StateStore
from flower_gpu.simulation import run as runs
from flower_gpu.simulation.dispatcher import Dispatcher, Durations
from flower_gpu.simulation.grid import SimulationGrid
from flower_gpu.simulation.host import About, Answer, Answers, Host, Visit
from flower_gpu.simulation.nodes import VirtualNodes

#: Hosts, messages that each handles at a time, messages of a round for each of these, seconds of a message.
SIZES, QUICK_SIZES = [(16, 64, 4, 1.0), (100, 64, 4, 2.0)], [(4, 8, 2, 0.05)]
_WAIT_S = 1.0  # that a host waits for something that is finished, as an agent does
_RUN_ID = 1


class _Clock(Host):
    """A host whose messages are finished after a time, without anybody who handles them."""

    def __init__(self, name: str, concurrency: int, seconds: float) -> None:
        super().__init__(About(name, concurrency, 1, {}, concurrency, []))
        self.exchanges = 0
        self._seconds = seconds
        self._due: deque[tuple[float, Visit]] = deque()
        self._changed = threading.Condition()

    def take(self, visits: Sequence[Visit]) -> None:
        """Have messages finished later."""
        due = time.monotonic() + self._seconds
        with self._changed:
            self._due += [(due, visit) for visit in visits]
            self._changed.notify()

    def exchange(self, visits: Sequence[Visit]) -> Answers:
        """Have messages finished later; return those that are."""
        self.take(visits)
        self.exchanges += 1
        until = time.monotonic() + _WAIT_S
        with self._changed:
            while (now := time.monotonic()) < until and not (self._due and self._due[0][0] <= now):
                self._changed.wait(min(until, self._due[0][0] if self._due else until) - now)
            finished = []
            while self._due and self._due[0][0] <= now:
                finished.append(self._due.popleft()[1])
        return Answers([self._answer(visit) for visit in finished])

    def _answer(self, visit: Visit) -> Answer:
        content = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
        return Answer(visit.message_id, Message(content, reply_to=visit.message), b"", self._seconds)

    def ask_for_sum(self, group: int) -> None:
        """Do nothing: there are no sums."""

    def forget(self, groups: Sequence[int]) -> None:
        """Do nothing: there are no sums."""

    def cancel(self, message_id: str) -> None:
        """Do nothing: all messages are finished."""


def measure(sizes: Sequence[tuple[int, int, int, float]]) -> list[dict[str, Any]]:
    """Return a row per size: a round, beside the time that its messages take on all these hosts."""
    rows = [_measured(*size) for size in sizes]
    table.show(
        "many hosts, each a clock",
        ("hosts", "at a time", "messages", "a round", "at least", "CPU of a message", "exchanges"),
        [
            (
                row["hosts"],
                row["under_way"],
                row["messages"],
                f"{row['round_s']:.2f} s",
                f"{row['least_s']:.2f} s",
                f"{row['driver_cpu_ms_per_message']:.3f} ms",
                row["exchanges"],
            )
            for row in rows
        ],
    )
    return rows


def _measured(count: int, concurrency: int, turns: int, seconds: float) -> dict[str, Any]:
    hosts = [_Clock(f"host-{number}", concurrency, seconds) for number in range(count)]
    messages = count * concurrency * turns
    with runs._identity(_RUN_ID):
        nodes = VirtualNodes(messages, 0, _RUN_ID, {})
        dispatcher = Dispatcher(nodes, StateStore(), 0, Durations())
        grid = SimulationGrid(Run.create_empty(_RUN_ID), dispatcher)
        for host in hosts:
            dispatcher.joined(host)
        try:
            content = RecordDict({"arrays": ArrayRecord([np.zeros(1000, np.float32)])})
            sent = [Message(content, node_id, "train", group_id="1") for node_id in nodes.ids]
            began, cpu_began_s = time.perf_counter(), time.process_time()
            replies = sum(1 for _ in grid.send_and_receive(sent))
            round_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began_s
        finally:
            grid.close()
    assert replies == messages
    return {
        "hosts": count,
        "under_way": count * concurrency,
        "messages": messages,
        "message_s": seconds,
        "round_s": round(round_s, 3),
        "least_s": turns * seconds,
        "driver_cpu_ms_per_message": round(cpu_s / messages * 1000, 4),
        "exchanges": sum(host.exchanges for host in hosts),
    }
