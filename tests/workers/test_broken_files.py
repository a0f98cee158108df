"""Replies that are not as they should be: an error, never a crash or much memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_gpu.errors import WorkerError
from flower_gpu.workers import transport
from flower_gpu.workers.transport import memory

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def reply() -> Iterator[int]:
    descriptor = transport.create("test")
    yield descriptor
    os.close(descriptor)


def test_empty_file(reply: int) -> None:
    with pytest.raises(WorkerError, match="ends too early"):
        transport.read_reply(reply)


def test_something_else(reply: int) -> None:
    os.write(reply, b"something else entirely, " * 10)
    with pytest.raises(WorkerError, match="something else"):
        transport.read_reply(reply)


def contents() -> bytes:
    """Return a reply as it should be."""
    descriptor = transport.create("test")
    try:
        transport.write_reply([np.arange(5000.0), np.arange(700), "text"], descriptor)
        return bytes(memory.read(descriptor, os.fstat(descriptor).st_size, 0))
    finally:
        os.close(descriptor)


GOOD = contents()
FIXED = transport._HEADER.size + transport._CHECKSUM.size + 2 * transport._REGION.size


def read(data: bytes, request: int = -1) -> Any:
    descriptor = transport.create("test")
    try:
        os.write(descriptor, data)
        return transport.read_reply(descriptor, request)
    finally:
        os.close(descriptor)


def test_good_file() -> None:
    assert [part.size for part in read(GOOD)[:2]] == [5000, 700]


@given(st.integers(0, len(GOOD) - 1))
@settings(deadline=None)
def test_torn_file(size: int) -> None:
    with pytest.raises(WorkerError):
        read(GOOD[:size])


@given(st.binary(max_size=400), st.booleans())
@settings(deadline=None)
def test_random_file(data: bytes, with_magic: bool) -> None:
    with pytest.raises(WorkerError):
        read(transport._MAGIC * with_magic + data)


@given(st.integers(0, FIXED - 1), st.integers(1, 255))
@settings(max_examples=300, deadline=None)
def test_damaged_header(place: int, change: int) -> None:
    data = bytearray(GOOD)
    data[place] ^= change
    with pytest.raises(WorkerError):
        read(bytes(data))


def forged(place: int, value: int) -> bytes:
    """Change a number before the pickle, and make the checksum right."""
    data = bytearray(GOOD)
    struct.pack_into("<Q", data, place, value)
    head_size = struct.unpack_from("<Q", data, 16)[0]
    header, rest = bytes(data[: transport._HEADER.size]), bytes(data[transport._HEADER.size + 8 :])
    table = rest[: 2 * transport._REGION.size]
    head = rest[len(table) : len(table) + head_size]
    struct.pack_into("<Q", data, transport._HEADER.size, transport._checksum(header, table, head))
    return bytes(data)


FIELDS = [8, *range(transport._HEADER.size + 8, FIXED, 8)]


@given(st.sampled_from(FIELDS), st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 2**17)))
@settings(max_examples=300, deadline=None)
def test_forged_header(place: int, value: int) -> None:
    """Neither a crash nor much memory: an error, or other bytes of the same file in an array."""
    request = transport.create("test")
    try:
        transport.write_request((np.zeros(1000),), request)
        with suppress(WorkerError):
            arrived = read(forged(place, value), request)
            assert [part.size for part in arrived[:2]] == [5000, 700]
            assert np.isfinite(arrived[1]).all()
    finally:
        os.close(request)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 7),  # nowhere
        (0, 1),  # in the request, which is smaller
        (0, 2),  # in a model that is not for replies
        (8, 9),  # of no kind
        (16, len(GOOD)),  # behind the end
        (16, 2**64 - 8),
        (24, 2**63),  # larger than everything
        (24, 39_999),  # not the array's size
    ],
)
def test_forged_regions(place: int, value: int) -> None:
    request = transport.create("test")
    try:
        transport.write_request((np.zeros(1000),), request)
        for given_request in (request, -1):
            with pytest.raises(WorkerError):
                read(forged(transport._HEADER.size + 8 + place, value), given_request)
    finally:
        os.close(request)
