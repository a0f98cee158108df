"""Runs server apps on virtual nodes in this process, and records their events."""

from __future__ import annotations

import copy
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from grid_handlers import NoWorkers, SafeHost

from flower_gpu.apps.folder import RunFolder
from flower_gpu.apps.recording import recorded_run
from flower_gpu.flower import record_bytes
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.simulation.client_output import ClientOutput
from flower_gpu.simulation.dispatcher import Dispatcher, Durations
from flower_gpu.simulation.grid import SimulationGrid
from flower_gpu.simulation.host import AssignedMessage, HostInfo, MessageOutcome, failed
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.reporting import Report, reported
from flower_gpu.strategies.recording.recorded_grid import RecordedGrid
from flower_gpu.strategies.recording.recorder import Recorder
from flower_gpu.strategies.recording.strategies import recorded_rounds
from flower_gpu.strategies.resuming.states import StateStore
from flower_gpu.strategies.rounds import RoundState
from flower_gpu.trace import Event

RUN_ID = 5
CLIENTS = 6
# This partition raises an error.
FAILS = 3


class NoDataError(Exception):
    """Error that the failing client raises."""


class Clients:
    """Handles messages as a ClientApp does, and tracks how many replies are alive at once."""

    def __init__(self, nodes: VirtualNodes, pause_s: float = 0.0, has_failing: bool = True) -> None:
        self._nodes = nodes
        self._pause_s = pause_s
        self._has_failing = has_failing
        self._alive = 0
        # A reply may be freed while another reply is counted.
        self._lock = threading.RLock()
        self.most_alive = 0

    def __call__(self, message: Message) -> Message:
        partition = self._nodes.partition_of(message.metadata.dst_node_id)
        time.sleep(self._pause_s)
        if self._has_failing and partition == FAILS:
            kind = message.metadata.message_type
            raise NoDataError(f"{kind} of client {partition}: ValueError: no data\nand more lines")
        content = RecordDict({"metrics": MetricRecord({"num-examples": 1, "score": float(partition)})})
        for name, record in message.content.array_records.items():
            new = {key: Array(np.asarray(values(array) + 1)) for key, array in record.items()}
            content[name] = ArrayRecord(new)
        with self._lock:
            self._alive += 1
            self.most_alive = max(self.most_alive, self._alive)
        weakref.finalize(content, self._freed)
        return Message(content, reply_to=message)

    def _freed(self) -> None:
        with self._lock:
            self._alive -= 1


def values(array: Array) -> np.ndarray:
    """Return an array without numpy's reader.

    The parser of the header may fail in several threads on Python 3.11.
    """
    dtype = np.dtype(array.dtype)
    count = math.prod(array.shape)
    return np.frombuffer(array.data[-count * dtype.itemsize :], dtype).reshape(array.shape)


class Handled(NoWorkers):
    """Handles each message with a function. It has no workers to keep or cancel."""

    def __init__(self, handle: Callable[[Message], Message]) -> None:
        self._handle = handle

    def __call__(self, visit: AssignedMessage) -> list[MessageOutcome]:
        try:
            return [MessageOutcome(visit.message_id, self._handle(visit.message), b"")]
        except Exception as error:
            return [MessageOutcome(visit.message_id, failed(visit.message, error))]


def handled_by(app: ClientApp, nodes: VirtualNodes) -> Callable[[Message], Message]:
    """Return a function that handles messages with a ClientApp."""
    states: dict[int, bytes] = {}

    def handle(message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        context = nodes.context_of(node_id, states.get(node_id, b""))
        # A process would have a copy. SecAgg+ sends the same content to all clients, and a client modifies
        # it.
        reply = app(copy.deepcopy(message), context)
        states[node_id] = record_bytes.encode(context.state) if context.state else b""
        return reply

    return handle


class Client(NumPyClient):
    """Adds one to the weights."""

    def __init__(self, partition: int) -> None:
        self._partition = partition

    def get_parameters(self, config):
        return [np.zeros(3, np.float32)]

    def fit(self, parameters, config):
        return [array + 1 for array in parameters], 1, {"score": float(self._partition)}

    def evaluate(self, parameters, config):
        return float(parameters[0][0]), 1, {"accuracy": 0.5}


def new_nodes(count: int = CLIENTS) -> VirtualNodes:
    return VirtualNodes(count, 0, RUN_ID, {})


def initial_arrays() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(3, np.float32)), "n": Array(np.zeros((), np.int64))})


class Recorded:
    """Events and recorder of a finished run."""

    def __init__(self, events: list[Event], recorder: Recorder) -> None:
        self.events = events
        self.recorder = recorder

    def of(self, *names: str) -> list[Any]:
        return [SimpleNamespace(**event) for event in self.events if event["event"] in names]

    def phases(self, kind: str) -> list[Any]:
        return [event for event in self.of("round_finished") if event.task == kind]

    def metrics(self, kind: str) -> dict[int | None, dict[str, Any]]:
        return {event.round: dict(event.metrics) for event in self.phases(kind)}

    def failures(self) -> list[Any]:
        return [event for event in self.of("reply") if event.error is not None]

    def strategies(self) -> list[tuple[str, int | None]]:
        return [(event.strategy, event.num_rounds) for event in self.of("strategy_started")]


def run_app(
    app: ServerApp | Callable[[Grid, Context], Any],
    handle: Callable[[Message], Message] | None = None,
    nodes: VirtualNodes | None = None,
    threads: int = 2,
    *,
    streams: bool = True,
    **resumable: Any,
) -> Recorded:
    """Run a ServerApp, or its main function, and record it as a simulation does."""
    events: list[Event] = []
    nodes = new_nodes() if nodes is None else nodes
    with recorded_rounds(events.append, nodes.partition_of, streams=streams) as recorder:
        run_on_grid(app, recorder, handle or Clients(nodes), nodes, threads, **resumable)
    return Recorded(events, recorder)


def run_on_grid(
    app: ServerApp | Callable[[Grid, Context], Any],
    recorder: Recorder,
    handle: Callable[[Message], Message],
    nodes: VirtualNodes,
    threads: int = 2,
    **resumable: Any,
) -> None:
    """Run a ServerApp on a recorded grid. ``resumable`` holds its checkpoints, old and new."""
    identity = {"run_id": RUN_ID, "node_id": SUPERLINK_NODE_ID, "task_id": 1}
    # A process of Flower that runs a ServerApp sets these.
    for name, value in identity.items():
        setattr(TaskIdentity, name, value)
    dispatcher = Dispatcher(nodes, StateStore(), 0, Durations())
    host = SafeHost(HostInfo("here", threads, 1, {}, threads, []))
    host.start(Handled(handle), threads)
    dispatcher.joined(host)
    context = Context(RUN_ID, SUPERLINK_NODE_ID, {}, RecordDict(), {})
    with ExitStack() as stack:
        stack.callback(host.close)
        kept = {name: resumable.pop(name, None) for name in ("checkpoints", "resumed")}
        grid = SimulationGrid(Run.create_empty(RUN_ID), dispatcher, **resumable)
        app(stack.enter_context(closing(RecordedGrid(grid, recorder, **kept))), context)


def run_reported(
    folder: RunFolder,
    main: ServerApp | Callable[[Grid, Context], Any],
    handle: Callable[[Message], Message],
    nodes: VirtualNodes,
    *,
    facts: Mapping[str, Any] | None = None,
    resumes: RoundState | None = None,
) -> Report:
    """Run a ServerApp, and report it in a folder as a simulation does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIR_VARIABLE, str(folder.path))
        with recorded_run(
            folder.path, "simulate", "app", clients=CLIENTS, settings={"seed": 3}, begins=resumes is None
        ) as run:
            report = Report(
                folder, run, ClientOutput("all"), progress=False, resumes=resumes, on_resume=run.begin
            )
            with reported(report, nodes.partition_of, keep_going=False):
                run_on_grid(main, report.recorder, handle, nodes)
                report.facts.update(facts or {})
        report.conclude()
    return report
