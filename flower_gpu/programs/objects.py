"""Batches of the objects of a message: many objects in a single request.

A message of Flower is a tree of objects, two for each array of a model. Flower sends each object in a request
of its own, four times on the way to a client and back. If a model has many small arrays, the requests take
longer than the work.

Here the names of several objects, joined by commas, name an object that contains them all. Such a request
takes the same path and passes the same checks as any other, and Flower's own function answers for each
object. A server that is not ours does not know an object of that name. Then each object is sent alone, as in
Flower.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from flower_gpu.flower import private_names

#: An answer ends with the object that makes it larger than this; a larger object is pushed alone.
MOST_BYTES: Final = 4 << 20
_MOST_NAMES: Final = 500  # limit for a request
_COMMA: Final = ","

# A message can be pulled as soon as its head was pushed, before its other objects. In Flower, a process that
# asks for an object too early waits a second, and twice as long the next time.
_FIRST_WAIT_S: Final = 0.02

#: Where Flower's functions for the objects of a message are used by name.
_USERS: Final = (private_names.UTILS, private_names.NODE_LOOP, private_names.HTTP_GRID)
#: Modules that answer requests for objects: from ServerApps and SuperNodes, and from ClientApps.
SUPERLINK: Final = (private_names.RUNTIME_HANDLERS, private_names.FLEET_HANDLERS)
SUPERNODE: Final = (private_names.NODE_HANDLERS,)

_Function = Callable[..., Any]


def ask_for_many() -> None:
    """Make Flower's functions in this process pull and push several objects in a request."""
    for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
        function = private_names.find(f"{private_names.UTILS}:{name}")
        defaults = getattr(function, "__kwdefaults__", None) or {}
        if "initial_backoff" in defaults:
            defaults["initial_backoff"] = _FIRST_WAIT_S
    refused = private_names.find(f"{private_names.UTILS}:ObjectPullError")
    if refused is None:
        return
    asking = ObjectBatches(refused)
    for name, around in (
        ("pull_objects", asking.pulling),
        ("push_object_contents_from_iterable", asking.pushing),
    ):
        original: Any = private_names.find(f"{private_names.UTILS}:{name}")
        if original is None:
            continue
        wrapper = around(original)
        for user in [sys.modules.get(module) for module in _USERS]:  # others take it from the first later
            if getattr(user, name, None) is original:
                setattr(user, name, wrapper)


def answer_for_many(handlers: Iterable[str]) -> None:
    """Make a server of Flower in this process answer requests for several objects.

    ``handlers``: names of the server's modules.
    """
    for name in handlers:
        pull = private_names.find(f"{name}:pull_object")
        push = private_names.find(f"{name}:push_object")
        if pull is not None and push is not None:
            module: Any = sys.modules[name]
            module.pull_object, module.push_object = answering_pulls(pull), answering_pushes(push)


class ObjectBatches:
    """Pulls and pushes of several objects in a request, used once the server has shown that it supports them.

    ``refused``: exception of Flower's function for pulling if the server does not know an object.
    """

    def __init__(self, refused: type[Exception]) -> None:
        self._refused = refused
        self._is_tried = False
        self._is_known = False

    def pulling(self, pull_objects: _Function) -> _Function:
        """Return a replacement for Flower's ``pull_objects``, with the same arguments and result."""

        def pull(object_ids: list[str], pull_object_fn: _Function, **options: Any) -> dict[str, bytes]:
            contents_by_id: dict[str, bytes] = {}
            remaining = list(dict.fromkeys(object_ids))
            while len(remaining) > 1 and (self._is_known or not self._is_tried):
                names = remaining[:_MOST_NAMES]
                try:
                    [answer] = pull_objects([_COMMA.join(names)], pull_object_fn, **options).values()
                except self._refused:
                    if self._is_known:
                        raise
                    self._is_tried = True
                    break
                self._is_known = self._is_tried = True
                contents_by_id.update(unpacked(names, answer))
                remaining = [name for name in remaining if name not in contents_by_id]
            if remaining:
                contents_by_id.update(pull_objects(remaining, pull_object_fn, **options))
            return contents_by_id

        return pull

    def pushing(self, push_contents: _Function) -> _Function:
        """Return a replacement for Flower's ``push_object_contents_from_iterable``."""

        def push(contents: Iterable[tuple[str, bytes]], push_object_fn: _Function, **options: Any) -> None:
            together = packages(contents) if self._is_known else contents
            push_contents(together, push_object_fn, **options)

        return push


def answering_pulls(pull_object: _Function) -> _Function:
    """Wrap a server's function that answers a ``PullObjectRequest``."""

    def answer(request: Any, *args: Any, **kwargs: Any) -> Any:
        names = request.object_id.split(_COMMA)
        if len(names) == 1:
            return pull_object(request, *args, **kwargs)
        contents: list[bytes | None] = []
        nbytes = 0
        for name in names:
            request.object_id = name
            contents_by_id = pull_object(request, *args, **kwargs)
            if not contents_by_id.object_found:
                return contents_by_id
            contents.append(contents_by_id.object_content if contents_by_id.object_available else None)
            nbytes += len(contents_by_id.object_content)
            if nbytes > MOST_BYTES:
                break
        is_available = any(content is not None for content in contents)
        return type(contents_by_id)(
            object_found=True, object_available=is_available, object_content=packed(contents)
        )

    return answer


def answering_pushes(push_object: _Function) -> _Function:
    """Wrap a server's function that answers a ``PushObjectRequest``."""

    def answer(request: Any, *args: Any, **kwargs: Any) -> Any:
        names = request.object_id.split(_COMMA)
        if len(names) == 1:
            return push_object(request, *args, **kwargs)
        for name, content in unpacked(names, request.object_content).items():
            request.object_id, request.object_content = name, content
            stored = push_object(request, *args, **kwargs)
            if not stored.stored:
                break
        return stored

    return answer


def packages(contents: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Put objects together, as names and contents; large ones stay alone."""
    together: dict[str, bytes] = {}
    nbytes = 0
    for name, content in contents:
        if len(content) > MOST_BYTES:
            yield name, content
            continue
        if together and (nbytes + len(content) > MOST_BYTES or len(together) == _MOST_NAMES):
            yield _package(together)
            together, nbytes = {}, 0
        together[name] = content
        nbytes += len(content)
    if together:
        yield _package(together)


def _package(contents: dict[str, bytes]) -> tuple[str, bytes]:
    if len(contents) == 1:
        [alone] = contents.items()
        return alone
    return _COMMA.join(contents), packed(list(contents.values()))


def packed(contents: list[bytes | None]) -> bytes:
    """Return the contents of several objects as one: the length of each (or "missing"), then the bytes."""
    lengths = [None if content is None else len(content) for content in contents]
    return b"\n".join([json.dumps(lengths).encode(), b"".join(filter(None, contents))])


def unpacked(names: Iterable[str], content: bytes) -> dict[str, bytes]:
    """Return the objects of :func:`packed` by name, without missing ones."""
    text, _, joined = content.partition(b"\n")
    contents_by_id, at = {}, 0
    for name, length in zip(names, json.loads(text), strict=False):  # an answer may end before all names
        if length is not None:
            contents_by_id[name] = joined[at : at + length]
            at += length
    return contents_by_id
