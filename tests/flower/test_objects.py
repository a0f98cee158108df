"""Many objects in one request, by Flower's own functions on both sides."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.proto.message_pb2 import (
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable import inflatable_protobuf_utils, inflatable_utils
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu.flower import objects

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=30)
PULL, PUSH = inflatable_utils.pull_objects, inflatable_utils.push_object_contents_from_iterable


class Server:
    """Flower's functions for the requests of ClientApps, for a SuperNode with objects in a dictionary."""

    def __init__(self, stored: dict[str, bytes], *, is_ours: bool = True) -> None:
        self.stored = stored
        self.requests: list[str] = []
        handlers = importlib.import_module(objects.SUPERNODE[0])
        self._pull: Callable[..., PullObjectResponse] = handlers.pull_object
        self._push: Callable[..., PushObjectResponse] = handlers.push_object
        if is_ours:
            self._pull = objects.answering_pulls(self._pull)
            self._push = objects.answering_pushes(self._push)
        self.state = SimpleNamespace(get_object=self._get, store_object=self._store)

    def _get(self, run_id: int, object_id: str) -> bytes | None:
        assert run_id == 7
        return self.stored.get(object_id)

    def _store(self, run_id: int, session_id: str, object_id: str, content: bytes) -> bool:
        assert (run_id, session_id) == (7, "session")
        if self.stored.get(object_id) != b"":  # nobody has said that it comes
            return False
        self.stored[object_id] = content
        return True

    def pull(self, request: PullObjectRequest) -> PullObjectResponse:
        self.requests.append(request.object_id)
        return self._pull(PullObjectRequest.FromString(request.SerializeToString()), self.state, TASK)

    def push(self, request: PushObjectRequest) -> PushObjectResponse:
        self.requests.append(request.object_id)
        return self._push(PushObjectRequest.FromString(request.SerializeToString()), self.state, TASK)


TASK = SimpleNamespace(run_id=7)


class Caller:
    """Flower's functions with ours around them, for one server."""

    def __init__(self, server: Server) -> None:
        asking = objects.ObjectBatches(inflatable_utils.ObjectPullError)
        self._pull, self._push = asking.pulling(PULL), asking.pushing(PUSH)
        node = Node(node_id=3)
        self._pull_one = inflatable_protobuf_utils.make_pull_object_fn_protobuf(server.pull, node, 7)
        self._push_one = inflatable_protobuf_utils.make_push_object_fn_protobuf(
            server.push, node, 7, "session"
        )

    def pull(self, names: list[str], **options: Any) -> dict[str, bytes]:
        return self._pull(names, self._pull_one, initial_backoff=0.001, **options)

    def push(self, contents: dict[str, bytes]) -> None:
        self._push(iter(contents.items()), self._push_one)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Some objects are larger than what goes into one request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "MOST_BYTES", 50)
        yield


def named(sizes: list[int]) -> dict[str, bytes]:
    return {f"{number:064x}": random.Random(number).randbytes(size) for number, size in enumerate(sizes)}


@given(SIZES, st.booleans())
def test_what_is_pulled_is_what_is_there(sizes: list[int], is_ours: bool) -> None:
    contents = named(sizes)
    server = Server(contents, is_ours=is_ours)
    assert Caller(server).pull([*contents, *contents]) == contents
    if is_ours:
        assert len(server.requests) <= 1 + sum(sizes) / objects.MOST_BYTES + 1
    else:
        assert len(server.requests) == len(contents) + (len(contents) > 1)


@given(SIZES, st.booleans())
def test_what_is_pushed_arrives(sizes: list[int], is_ours: bool) -> None:
    first, contents = named([1, 2]), named(sizes)
    server = Server(first, is_ours=is_ours)
    caller = Caller(server)
    caller.pull(list(first))  # a process always pulls first, and learns whether the server is ours
    server.stored = dict.fromkeys(contents, b"")
    server.requests.clear()
    caller.push(contents)
    assert server.stored == contents
    assert [name for names in sorted(server.requests) for name in names.split(",")] == list(contents)
    if not is_ours:
        assert len(server.requests) == len(contents)


def test_an_object_that_is_not_there_yet_is_waited_for_and_the_others_are_not_asked_for_again() -> None:
    contents = named([3, 3, 3])
    late = list(contents)[1]
    server = Server({**contents, late: b""})
    get, asked = server.state.get_object, []

    def get_later(run_id: int, name: str) -> bytes | None:
        asked.append(name)
        if asked.count(late) == 3:
            server.stored[late] = contents[late]
        found: bytes | None = get(run_id, name)
        return found

    server.state.get_object = get_later
    assert Caller(server).pull(list(contents)) == contents
    assert {name: asked.count(name) for name in contents} == {
        name: 3 if name == late else 1 for name in asked
    }


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_object_that_nobody_knows_ends_the_pull_as_in_flower(is_ours: bool) -> None:
    contents = named([3, 3])
    caller = Caller(Server(contents, is_ours=is_ours))
    caller.pull(list(contents))
    with pytest.raises(inflatable_utils.ObjectPullError, match="could not be found"):
        caller.pull([*contents, "f" * 64])


def test_an_object_that_never_comes_ends_the_pull_as_in_flower() -> None:
    contents = named([3, 3])
    caller = Caller(Server(dict.fromkeys(contents, b"")))
    with pytest.raises(inflatable_utils.ObjectPullError, match="retry limit"):
        caller.pull(list(contents), max_tries_per_object=3)


def test_a_push_that_the_server_refuses_fails() -> None:
    contents = named([3, 3])
    server = Server(contents)
    caller = Caller(server)
    caller.pull(list(contents))
    with pytest.raises(inflatable_utils.ObjectPushError):
        caller.push(named([3, 3, 3]))
