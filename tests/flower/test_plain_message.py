"""Replies and states survive their encoding as bytes. Arbitrary bytes decode to a reply or are refused."""

from __future__ import annotations

import json
import logging
import struct
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from record_strategies import contents, record_dicts

from flower_gpu.errors import InvalidResultError
from flower_gpu.flower import record_bytes
from flower_gpu.workers.confined_replies import PlainBytes


def sent_message() -> Message:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(RecordDict(), dst_node_id=7, message_type="train")
    message.metadata.__dict__["_message_id"] = "asked"
    return message


def joined(plain: PlainBytes) -> memoryview:
    return memoryview(b"".join(plain.parts))


@given(content=record_dicts, state=record_dicts)
@settings(max_examples=examples(60))
def test_a_reply_and_a_state_survive_encoding(content: RecordDict, state: RecordDict) -> None:
    message = sent_message()
    reply = Message(content, reply_to=message, ttl=50.0)
    expected = contents(content), contents(state)
    decoded, decoded_state = record_bytes.decode_reply(
        joined(record_bytes.encode_reply(reply, state)), message
    )
    assert (contents(decoded.content), contents(decoded_state)) == expected
    assert decoded.metadata.reply_to_message_id == message.metadata.message_id
    assert (decoded.metadata.src_node_id, decoded.metadata.dst_node_id) == (7, message.metadata.src_node_id)
    assert decoded.metadata.ttl == pytest.approx(50.0, abs=1.0)


def test_a_late_reply_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    message = sent_message()
    plain = joined(record_bytes.encode_reply(Message(RecordDict(), reply_to=message), RecordDict()))
    message.metadata.ttl -= 5.0  # as if 5 s had passed
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        reply, _ = record_bytes.decode_reply(plain, message)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert not caplog.records
    assert reply.metadata.ttl <= message.metadata.ttl


@pytest.mark.parametrize("reason", [None, "", "no data here"])
def test_an_error_survives_encoding(reason: str | None) -> None:
    message = sent_message()
    plain = record_bytes.encode_reply(Message(Error(3, reason), reply_to=message), RecordDict())
    decoded, decoded_state = record_bytes.decode_reply(joined(plain), message)
    assert (decoded.has_error(), decoded.error.code, decoded.error.reason) == (True, 3, reason)
    assert not decoded_state


@given(data=st.data())
@settings(max_examples=examples(300))
def test_changed_bytes_are_refused_or_decode_to_a_reply(data: st.DataObject) -> None:
    message = sent_message()
    state = RecordDict({"s": ConfigRecord({"a": 1, "b": [b"x", b"yz"]})})
    reply = Message(state, reply_to=message, ttl=50.0)
    plain = bytearray(joined(record_bytes.encode_reply(reply, state)))
    for _ in range(data.draw(st.integers(1, 6))):
        plain[data.draw(st.integers(0, len(plain) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(plain)))
    try:
        reply, decoded_state = record_bytes.decode_reply(memoryview(bytes(plain[:cut])), message)
    except InvalidResultError:
        return
    assert isinstance(reply, Message)
    assert isinstance(decoded_state, RecordDict)


def _plain(head_content: Any, content: bytes = b"", state: bytes | None = None) -> memoryview:
    head = json.dumps(head_content).encode()
    state = record_bytes.encode(RecordDict()) if state is None else state
    return memoryview(struct.pack("<QQQ", len(head), len(content), len(state)) + head + content + state)


def _records(description: Any, rest: bytes = b"") -> bytes:
    head = json.dumps(description).encode()
    return struct.pack("<8sQ", b"fgrecs01", len(head)) + head + rest


_FINE = {"error": None, "ttl": 5.0}


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"a": "value of JSON"},
        memoryview(b""),
        memoryview(struct.pack("<QQQ", 1 << 63, 1 << 63, 1 << 63)),
        _plain([]),
        _plain({"error": None}),
        _plain({"error": None, "ttl": -1}),
        _plain({"error": None, "ttl": float("inf")}),
        _plain({"error": ["3", "x"], "ttl": 5}),
        _plain({"error": [3, ["x"]], "ttl": 5}),
        _plain({"error": 3, "ttl": 5}),
        _plain(_FINE, b"nothing"),
        _plain(_FINE, _records({"a": 1})),
        _plain(_FINE, _records([["a", "metrics", [["k", "text"]]]])),
        _plain(_FINE, _records([["a", "metrics", [[["k"], 1]]]])),
        _plain(_FINE, _records([["a", "configs", [["k", {"x": 1}]]]])),
        _plain(_FINE, _records([["a", "configs", [["k", {"bytes": -5}]]]], b"12345678")),
        _plain(_FINE, _records([["a", "arrays", [["k", "float32", [2], "numpy.ndarray", 1 << 60]]]])),
        _plain(_FINE, _records([["a", "arrays", [["k", 5, "x", {}, 0]]]])),
        _plain(_FINE, _records([["a", "arrays", [["k", "float32", ["x"], "numpy.ndarray", 0]]]])),
        _plain(
            _FINE, _records([["a", "arrays", [["k", "float32", [-3], "numpy.ndarray", -8]]]], b"12345678")
        ),
        _plain(_FINE, struct.pack("<8sQ", b"fgrecs01", 60_000) + b"[" * 60_000),
        _plain(_FINE, record_bytes.encode(RecordDict()), b"nothing"),
    ],
)
def test_bytes_that_are_no_reply_are_refused(data: Any) -> None:
    with pytest.raises(InvalidResultError, match="left no reply that can be read"):
        record_bytes.decode_reply(data, sent_message())
