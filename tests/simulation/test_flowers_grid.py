"""The package's grids behave like Flower's own: each call goes to both, and the results are compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.fleet.vce.vce_api import _register_nodes
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.serverapp import Grid
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import HttpGrid, InMemoryGrid
from grid_handlers import RUN_ID, GridUnderTest
from waiting import until

from flower_gpu.simulation.grid import SimulationGrid
from flower_gpu.strategies.recording.recorded_grid import RecordedGrid
from flower_gpu.strategies.recording.recorder import Recorder
from flower_gpu.trace import NO_REPLY, Event

pytestmark = pytest.mark.usefixtures("identity")

NODES = 3


def flowers(created_replies: list[Message], ended: threading.Event) -> Grid:
    """Return the grid of Flower's Simulation Runtime, with a thread that handles its messages."""
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
    state: Any = factory.state()
    run = Run.create_empty(RUN_ID)
    run.primary_task_id, run.federation_id = 1, NOOP_FEDERATION_ID
    state.run_ids[RUN_ID] = RunRecord(run=run)
    state.task_store[1] = Task(task_id=1, run_id=RUN_ID)
    nodes = _register_nodes(NODES, factory)

    def handle() -> None:
        while not ended.wait(0.01):
            for node in nodes:
                for message in state.get_message_ins(node, limit=None):
                    if (group := message.metadata.group_id) == "wait":
                        continue
                    reply = Message(RecordDict(), reply_to=message, ttl=60 if group == "short" else None)
                    reply.metadata.__dict__["_message_id"] = f"{message.metadata.message_id} reply"
                    if state.store_message_res(reply):
                        created_replies.append(reply)

    threading.Thread(target=handle, daemon=True).start()
    grid = InMemoryGrid(factory, pull_interval=0.01)
    grid.set_run(run)
    return grid


@pytest.fixture(params=["local", "recorded"])
def ours(request: pytest.FixtureRequest) -> Iterator[tuple[Grid, list[Message], GridUnderTest]]:
    harness, created_replies = GridUnderTest(2, NODES), []
    harness.handling.on_reply = created_replies.append
    events: list[Event] = []
    recorder = Recorder(events.append, harness.nodes.partition_of)
    yield (
        (harness.grid if request.param == "local" else RecordedGrid(harness.grid, recorder)),
        created_replies,
        harness,
    )
    harness.close()
    replies = [event for event in events if event["event"] == "reply"]
    assert all(event["node"] is not None for event in replies)
    assert all(event["error"] is None or event["error"].startswith(NO_REPLY) for event in replies)


def described(reply: Message, sent: list[Message], *, without_source: bool = False) -> dict[str, Any]:
    """Return the comparable fields of a reply. Our reply to an expired message may name the client."""
    metadata = reply.metadata
    ids = [message.metadata.message_id for message in sent]
    fields = {
        "code": reply.error.code if reply.has_error() else None,
        "of": ids.index(metadata.reply_to_message_id) if metadata.reply_to_message_id in ids else None,
        "to": metadata.dst_node_id,
        "run": metadata.run_id,
        "has_id": bool(metadata.message_id),
    }
    if not without_source:
        at = [message.metadata.dst_node_id for message in sent]
        fields |= {
            "from": at.index(metadata.src_node_id) if metadata.src_node_id in at else metadata.src_node_id,
            "type": metadata.message_type,
            "group": metadata.group_id,
        }
    return fields


def error_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None


def answers(grid: Grid, created_replies: list[Message]) -> Iterator[tuple[str, object]]:
    """Make all calls, and yield each result without the parts that vary."""
    last_replies: list[Message] = []

    def pulled(ids: list[str], sent: list[Message]) -> list[dict[str, Any]]:
        last_replies[:] = list(grid.pull_messages(ids))
        return [described(reply, sent) for reply in last_replies]

    def waited(ids: list[str], sent: list[Message]) -> list[dict[str, Any]]:
        until(lambda: bool(pulled(ids, sent)))
        return [described(reply, sent) for reply in last_replies]

    ids = list(grid.get_node_ids())
    yield "nodes", len(set(ids))
    nodes = list(grid.get_nodes())
    yield "of nodes", {node.node_id for node in nodes} == set(ids)
    yield "fields", [[field.name for field, _ in node.ListFields()] for node in nodes]
    yield "status", [(node.status, node.owner_aid, node.owner_name, node.online_until) for node in nodes]
    yield "registered", [type(time.strptime(node.registered_at[:19], "%Y-%m-%dT%H:%M:%S")) for node in nodes]
    yield "keys", len({(node.public_key, len(node.public_key)) for node in nodes})

    yield "run", (grid.run.run_id, grid.run is grid.run)
    yield "set_run", error_of(lambda: grid.set_run("no run"))  # type: ignore[arg-type]
    yield "set_run again", error_of(lambda: grid.set_run(grid.run))
    yield "node", grid.node  # type: ignore[attr-defined]

    message = grid.create_message(RecordDict(), "train", ids[0], "1", ttl=7)
    times = ("_created_at", "_dst_node_id")
    yield "created", {name: value for name, value in vars(message.metadata).items() if name not in times}
    yield "default ttl", grid.create_message(RecordDict(), "train", ids[0], "1").metadata.ttl
    yield "no time", error_of(lambda: grid.push_messages([Message(RecordDict(), ids[0], "train", ttl=-1)]))
    reply = Message(RecordDict(), reply_to=message)
    reply.metadata.__dict__["_reply_to_message_id"] = "another"
    yield "a reply", error_of(lambda: grid.push_messages([reply]))

    def messages(*groups: str, ttl: float | None = None) -> list[Message]:
        # The message type differs from that of the other messages.
        return [
            Message(RecordDict(), node, "query.a", group_id=group, ttl=ttl)
            for node, group in zip(ids, groups, strict=False)
        ]

    yield "nothing", (list(grid.push_messages([])), list(grid.pull_messages([])))
    sent = messages("answer", "answer")
    pushed = list(grid.push_messages(sent))
    yield "ids", pushed == [message.metadata.message_id for message in sent]
    yield "pulled", [waited([each], sent) for each in pushed]
    yield "pulled again", sorted(pulled(pushed, sent), key=str)
    yield "twice in one", len(pulled([pushed[0], pushed[0]], sent))
    yield "unknown", pulled(["unknown"], sent)
    # flwr 1.43 renamed this parameter, and still accepts the old name.
    yield "by name", [reply.error.code for reply in grid.pull_messages(message_ids=["unknown"])]

    sent = messages("short")
    created_replies.clear()
    pushed = list(grid.push_messages(sent))
    until(lambda: bool(created_replies))
    created_replies[0].metadata.__dict__["_ttl"] = 1e-9
    yield "reply expired", [(each["code"], each["of"]) for each in waited(pushed, sent)]

    sent = messages("wait", ttl=1.0)
    yield "expired", waited(list(grid.push_messages(sent)), sent)
    sent = messages("answer", ttl=1.0)
    pushed = list(grid.push_messages(sent))
    time.sleep(max(0.0, sent[0].metadata.created_at + 1.01 - time.time()))
    yield "expired before it was pulled", pulled(pushed, sent)

    sent = messages("answer", "wait", "answer")
    replies = list(grid.send_and_receive(sent, timeout=2))
    yield "in time", sorted((described(reply, sent) for reply in replies), key=str)
    sent = [*messages("answer"), *messages("wait", ttl=1.0)]
    replies = list(grid.send_and_receive(sent))
    yield "within ttl", sorted((described(reply, sent, without_source=True) for reply in replies), key=str)
    yield "no messages", list(grid.send_and_receive([]))
    yield "no time at all", list(grid.send_and_receive(messages("answer"), timeout=0))


@cache
def flowers_answers() -> dict[str, object]:
    created_replies: list[Message] = []
    ended = threading.Event()
    try:
        return dict(answers(flowers(created_replies, ended), created_replies))
    finally:
        ended.set()


def test_our_grids_give_the_same_results(ours: tuple[Grid, list[Message], GridUnderTest]) -> None:
    grid, created_replies, harness = ours
    assert dict(answers(grid, created_replies)) == flowers_answers()
    # Flower's workers continue with expired messages.
    until(lambda: harness.handling.running == 0)
    assert len(harness.handling.cancelled) == 3 and not any(
        box.queued_count for box in harness.dispatcher._waiting
    )


def test_replies_can_be_pulled_as_with_flower_1_43(ours: tuple[Grid, list[Message], GridUnderTest]) -> None:
    grid: Any = ours[0]
    (id_,) = grid.push_messages([Message(RecordDict(), grid.get_node_ids()[0], "train", group_id="answer")])
    until(lambda: bool(list(grid.pull_messages()))) and not list(grid.pull_messages())
    (reply,) = grid.pull_messages(reply_to_message_ids=[id_])
    assert reply.has_error(), "it was pulled before"


def test_our_grids_have_all_public_names_of_flowers_grids(
    ours: tuple[Grid, list[Message], GridUnderTest],
) -> None:
    def public(grid: Any) -> set[str]:
        return {name for name in dir(grid) if not name.startswith("_")}

    theirs = public(HttpGrid(token="of the test")) | public(flowers([], threading.Event()))
    # InMemoryGrid itself uses these for where and how often it polls.
    theirs -= {"state", "pull_interval"}
    assert sorted(theirs - public(ours[2].grid)) == []
    assert all(hasattr(ours[0], name) for name in theirs)
    # No method is inherited from the base class with its default result.
    assert [name for name in public(Grid) if getattr(SimulationGrid, name) is getattr(Grid, name)] == []
    assert isinstance(ours[0], Grid)


def test_expired_messages_make_room_and_do_not_end_the_run() -> None:
    harness = GridUnderTest(1, NODES)
    grid = RecordedGrid(harness.grid, Recorder(lambda event: None, harness.nodes.partition_of, lambda: ""))
    try:
        waiting = [
            Message(RecordDict(), node, "train", group_id="wait", ttl=0.2)
            for node in (*harness.nodes.ids, harness.nodes.ids[0])
        ]
        replies = list(grid.send_and_receive([*waiting, waiting[0]]))
        assert [reply.error.code for reply in replies] == [ErrorCode.MESSAGE_UNAVAILABLE] * 5
        assert "ttl" in replies[0].error.reason and replies[0].metadata.src_node_id == harness.nodes.ids[0]
        assert len(harness.handling.cancelled) == 1, "the other messages had not started"
        # Unlike clients that fail, late clients do not end a run in its first round.
        assert not any(reply.has_error() for reply in grid.send_and_receive(harness.messages(2)))
        assert not harness.grid._sets
    finally:
        harness.close()
