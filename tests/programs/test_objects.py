"""Several objects in one request, with Flower's own functions for client and server."""

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

from flower_gpu.programs import objects

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=30)
PULL, PUSH = inflatable_utils.pull_objects, inflatable_utils.push_object_contents_from_iterable


class Server:
    """A SuperNode with its objects in a dictionary. Flower's functions answer the requests of ClientApps.

    ``is_ours``: True wraps Flower's functions in ours, which answer several objects at once.
    """

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
        if self.stored.get(object_id) != b"":  # the object was not announced
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
    """A client of one server: Flower's functions, wrapped in ours."""

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
def _small_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lower the size limit of a request, so that some objects exceed it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "MOST_BYTES", 50)
        yield


def objects_of(sizes: list[int]) -> dict[str, bytes]:
    return {f"{number:064x}": random.Random(number).randbytes(size) for number, size in enumerate(sizes)}


@given(SIZES, st.booleans())
def test_pulled_objects_equal_the_stored_objects(sizes: list[int], is_ours: bool) -> None:
    contents = objects_of(sizes)
    server = Server(contents, is_ours=is_ours)
    assert Caller(server).pull([*contents, *contents]) == contents
    if is_ours:
        assert len(server.requests) <= 1 + sum(sizes) / objects.MOST_BYTES + 1
    else:
        assert len(server.requests) == len(contents) + (len(contents) > 1)


@given(SIZES, st.booleans())
def test_pushed_objects_arrive(sizes: list[int], is_ours: bool) -> None:
    first, contents = objects_of([1, 2]), objects_of(sizes)
    server = Server(first, is_ours=is_ours)
    caller = Caller(server)
    caller.pull(list(first))  # a process always pulls first, which shows it if the server is ours
    server.stored = dict.fromkeys(contents, b"")
    server.requests.clear()
    caller.push(contents)
    assert server.stored == contents
    assert [name for names in sorted(server.requests) for name in names.split(",")] == list(contents)
    if not is_ours:
        assert len(server.requests) == len(contents)


def test_a_pull_retries_only_the_objects_that_have_not_arrived_yet() -> None:
    contents = objects_of([3, 3, 3])
    late = list(contents)[1]
    server = Server({**contents, late: b""})
    get, requested = server.state.get_object, []

    def get_later(run_id: int, name: str) -> bytes | None:
        requested.append(name)
        if requested.count(late) == 3:
            server.stored[late] = contents[late]
        content: bytes | None = get(run_id, name)
        return content

    server.state.get_object = get_later
    assert Caller(server).pull(list(contents)) == contents
    assert {name: requested.count(name) for name in contents} == {
        name: 3 if name == late else 1 for name in requested
    }


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_unknown_object_ends_the_pull_as_in_flower(is_ours: bool) -> None:
    contents = objects_of([3, 3])
    caller = Caller(Server(contents, is_ours=is_ours))
    caller.pull(list(contents))
    with pytest.raises(inflatable_utils.ObjectPullError, match="could not be found"):
        caller.pull([*contents, "f" * 64])


def test_an_object_that_never_arrives_ends_the_pull_as_in_flower() -> None:
    contents = objects_of([3, 3])
    caller = Caller(Server(dict.fromkeys(contents, b"")))
    with pytest.raises(inflatable_utils.ObjectPullError, match="retry limit"):
        caller.pull(list(contents), max_tries_per_object=3)


def test_a_push_fails_if_the_server_refuses_it() -> None:
    contents = objects_of([3, 3])
    server = Server(contents)
    caller = Caller(server)
    caller.pull(list(contents))
    with pytest.raises(inflatable_utils.ObjectPushError):
        caller.push(objects_of([3, 3, 3]))
