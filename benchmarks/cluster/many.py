"""Part ``many``: the driver's threads with many hosts, each simulated by a clock, without Ray."""

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
from benchmarks.shared.driver import Figures, Options
from flower_gpu.simulation import run as runs
from flower_gpu.simulation.dispatcher import Dispatcher, Durations
from flower_gpu.simulation.grid import SimulationGrid
from flower_gpu.simulation.host import AssignedMessage, Host, HostInfo, HostReport, MessageOutcome
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.strategies.resuming.states import StateStore

#: Hosts, messages in flight on each, messages of a round per slot, and seconds per message.
_SIZES, _QUICK_SIZES = [(16, 64, 4, 1.0), (100, 64, 4, 2.0)], [(4, 8, 2, 0.05)]
#: Time that a host waits for a finished message, like an agent.
_WAIT_S = 1.0
_RUN_ID = 1


class _Clock(Host):
    """A host on which every message takes a fixed time and no worker handles it."""

    def __init__(self, name: str, concurrency: int, seconds: float) -> None:
        super().__init__(HostInfo(name, concurrency, 1, {}, concurrency, []))
        self.exchanges = 0
        self._seconds = seconds
        self._due: deque[tuple[float, AssignedMessage]] = deque()
        self._changed = threading.Condition()

    def submit(self, visits: Sequence[AssignedMessage]) -> None:
        """Start messages."""
        due = time.monotonic() + self._seconds
        with self._changed:
            self._due += [(due, visit) for visit in visits]
            self._changed.notify()

    def exchange(self, visits: Sequence[AssignedMessage]) -> HostReport:
        """Start messages and return finished messages. Wait for the first of them."""
        self.submit(visits)
        self.exchanges += 1
        until = time.monotonic() + _WAIT_S
        with self._changed:
            while (now := time.monotonic()) < until and not (self._due and self._due[0][0] <= now):
                self._changed.wait(min(until, self._due[0][0] if self._due else until) - now)
            finished = []
            while self._due and self._due[0][0] <= now:
                finished.append(self._due.popleft()[1])
        return HostReport([self._answer(visit) for visit in finished])

    def _answer(self, visit: AssignedMessage) -> MessageOutcome:
        content = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
        return MessageOutcome(visit.message_id, Message(content, reply_to=visit.message), b"", self._seconds)

    def ask_for_sum(self, group: int) -> None:
        """Do nothing, because there are no sums."""

    def forget(self, group: int) -> None:
        """Do nothing, because there are no sums."""

    def cancel(self, message_id: str) -> None:
        """Do nothing, because every message finishes by itself."""


def measure(options: Options, figures: Figures) -> None:
    """Add a row per size: the time of a round, and the time that its messages need on all hosts."""
    figures["many"] = [_row(*size) for size in (_QUICK_SIZES if options.quick else _SIZES)]
    table.show("the driver with many hosts", figures["many"])


def _row(count: int, concurrency: int, turns: int, seconds: float) -> dict[str, Any]:
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
        "in_flight": count * concurrency,
        "messages": messages,
        "message_s": seconds,
        "round_s": round(round_s, 3),
        "least_s": turns * seconds,
        "driver_cpu_ms_per_message": round(cpu_s / messages * 1000, 4),
        "exchanges": sum(host.exchanges for host in hosts),
    }
