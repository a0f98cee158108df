"""Our ``flwr-serverapp`` records messages of Flower's own grid in the trace, without the app's help."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.launch.federation import Federation
from flower_gpu.launch.options import LaunchOptions
from flower_gpu.launch.plan import make_plan
from flower_gpu.launch.supervisor import Supervisor
from flower_gpu.programs import client_order, serverapp
from flower_gpu.strategies.recording.recorder import Recorder, write_event
from flower_gpu.strategies.recording.strategies import recorded_rounds
from flower_gpu.strategies.resuming.checkpoint import Checkpoints
from flower_gpu.strategies.resuming.states import StateStore
from flower_gpu.strategies.rounds import ResumableGrid, RoundState, capture_random_state


class FlowerGrid(HttpGrid):
    """Flower's own grid without a SuperLink. Nodes 1, 2, ... reply at the first pull.

    Only ``push_messages`` and ``pull_messages`` are replaced. ``send_and_receive`` is Flower's.
    """

    def __init__(self, silent: tuple[int, ...] = (), largest: int = 10) -> None:
        self.sent: dict[str, Message] = {}
        self._silent, self._largest = silent, largest

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        if not messages or len(list(messages)) > self._largest:
            return []
        ids = []
        for message in messages:
            ids.append(f"message {len(self.sent)}")
            self.sent[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        answered = [id_ for id_ in message_ids if self.sent[id_].metadata.dst_node_id not in self._silent]
        return [self._reply(id_) for id_ in answered]

    def _reply(self, id_: str) -> Message:
        message = self.sent[id_]
        node = message.metadata.dst_node_id
        content = RecordDict({"metrics": MetricRecord({"x": node})})
        reply = Message(content if node < 9 else Error(1, "node 9 fails\nfor a reason"), reply_to=message)
        reply.metadata.__dict__["_reply_to_message_id"] = id_
        reply.metadata.__dict__["_src_node_id"] = node
        return reply


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the recorded run, with this process set up like a process that Flower starts."""
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    return tmp_path


@contextmanager
def recorded(grid: FlowerGrid) -> Iterator[Recorder]:
    """Record the messages of a grid in the trace."""
    with recorded_rounds(write_event) as recorder:
        serverapp.record(grid, recorder, serverapp.GridTime())
        yield recorder


def messages(*nodes: int, kind: str = "query", server_round: int = 1) -> list[Message]:
    config = {"config": ConfigRecord({"server-round": server_round})}
    return [Message(RecordDict(config), node, kind) for node in nodes]


def events_in(folder: Path, *names: str) -> list[list[Any]]:
    events = trace.read(folder / trace.FILE_NAME)
    return [[event.get(name) for name in ("event", *names)] for event in events]


def test_each_reply_is_recorded_in_the_trace(tmp_path: Path) -> None:
    grid = FlowerGrid()
    with recorded(grid):
        replies = list(grid.send_and_receive(messages(1, 2, 9)))
    assert len(replies) == 3 and isinstance(grid, HttpGrid)
    lines = events_in(tmp_path, "round", "node", "error", "messages", "failed", "metrics")
    assert [*lines[:3], *sorted(lines[3:6], key=lambda line: line[2]), *lines[6:]] == [
        ["round_started", 1, None, None, 1, None, None],
        ["round_grew", 1, None, None, 2, None, None],
        ["round_grew", 1, None, None, 3, None, None],
        ["reply", 1, 1, None, None, None, {"x": 1}],
        ["reply", 1, 2, None, None, None, {"x": 2}],
        ["reply", 1, 9, "node 9 fails\nfor a reason", None, None, {}],
        ["round_finished", 1, None, None, 3, 1, {}],
    ]


def test_a_round_in_which_all_clients_fail_is_recorded_and_the_server_continues(tmp_path: Path) -> None:
    grid = FlowerGrid()
    with recorded(grid):
        for server_round in (1, 2):
            assert len(list(grid.send_and_receive(messages(9, 10, server_round=server_round)))) == 2
    assert [line for line in events_in(tmp_path, "reason") if line[0] == "all_failed"] == [
        ["all_failed", "all 2 clients failed in round 1"]
    ]


def test_a_message_without_a_reply_in_time_is_recorded_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    grid = FlowerGrid(silent=(2,))
    with recorded(grid):
        assert len(list(grid.send_and_receive(messages(1, 2), timeout=2))) == 1
    replies = [line for line in events_in(tmp_path, "node", "error") if line[0] == "reply"]
    assert replies == [["reply", 1, None], ["reply", 2, "no reply within 2 s"]]


def test_messages_that_flower_cannot_send_are_recorded_as_failed(tmp_path: Path) -> None:
    grid = FlowerGrid(largest=1)
    with recorded(grid):
        assert list(grid.send_and_receive(messages(1, 2), timeout=0.0)) == []
    replies = [line for line in events_in(tmp_path, "node", "error") if line[0] == "reply"]
    assert replies == [["reply", node, "the message could not be sent"] for node in (1, 2)]


def test_messages_from_several_threads_are_recorded(tmp_path: Path) -> None:
    """Flower's older strategies send each message from a separate thread."""
    grid = FlowerGrid()
    with recorded(grid):
        threads = [
            threading.Thread(target=grid.send_and_receive, args=(messages(node, kind="train"),))
            for node in (1, 2, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = events_in(tmp_path, "round", "task", "node", "error")
    replies = sorted(line[3] for line in lines if line[0] == "reply")
    assert replies == [1, 2, 3]


def test_nodes_and_replies_are_in_the_order_of_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_order, "_PATIENCE_S", 0.0)
    for client, node in enumerate((3, 1)):
        text = f"INFO : SuperNode ID: {node + 10}\n$ started again\nINFO : SuperNode ID: {node}\n"
        (tmp_path / f"client-{client}.log").write_text(text)
    grid = FlowerGrid()
    grid.get_nodes = lambda: [NodeInfo(node_id=node) for node in (1, 2, 3)]  # type: ignore[method-assign]
    with recorded(grid) as recorder:
        serverapp.keep_rounds(grid, recorder, RunFolder(tmp_path))
        assert grid.get_node_ids() == [3, 1, 2]
        replies = list(grid.send_and_receive(messages(1, 2, 3)))
    assert [reply.metadata.src_node_id for reply in replies] == [3, 1, 2]
    assert isinstance(grid, ResumableGrid) and grid.resumed() is None


def test_a_round_in_which_every_client_failed_has_no_checkpoint(tmp_path: Path) -> None:
    grid, folder = FlowerGrid(), RunFolder(tmp_path)
    with recorded(grid) as recorder:
        serverapp.keep_rounds(grid, recorder, folder)
        assert isinstance(grid, ResumableGrid)
        grid.resumed()
        for server_round, nodes in ((0, ()), (1, (1, 9)), (2, (9, 10))):
            list(grid.send_and_receive(messages(*nodes, server_round=server_round)))
            state = RoundState(server_round, ArrayRecord(), {}, {}, capture_random_state())
            grid.finished_round(state)
    checkpoint = Checkpoints(folder.checkpoint, StateStore()).read()
    assert checkpoint is not None and checkpoint.server_round == 1


def test_flowers_grid_still_has_the_methods_that_are_replaced() -> None:
    """Recording relies on Flower's ``send_and_receive`` calling these two methods."""
    names = HttpGrid.send_and_receive.__code__.co_names
    assert "push_messages" in names and "pull_messages" in names
    assert issubclass(HttpGrid, Grid)


def test_a_run_without_our_commands_continues_and_reports_it(
    tmp_path: Path, tiny_app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(file))
    plan = make_plan(LaunchOptions(tiny_app, log_dir=tmp_path / "runs"))
    notes: list[str] = []
    federation = Federation(plan, RunFolder.create(plan.options.log_dir), {}, Supervisor(""), notes.append)
    federation.use_our_commands()
    assert "PATH" not in federation._link_env and "PATH" not in federation._node_env
    assert [line.partition(":")[0] for line in notes] == [
        "messages start as slowly as Flower's own, and rounds are not shown while they run; "
        "without gpu_mod in tiny its clients have no leases"
    ]
