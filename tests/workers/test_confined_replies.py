"""Replies and events of a confined worker are data: the caller unpickles nothing and survives all of it."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_programs import run

from flower_gpu.errors import InvalidResultError
from flower_gpu.workers import confined_replies, confinement, memory_files
from flower_gpu.workers.confined_replies import _EVENTS, checked_event

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]

_CALLER = Path(__file__).with_name("confined_caller.py")
_VALUE = {"a": [1, 2.5, None, "text"], "b": {"c": True}}
#: True for errors that keep their class. The other two describe the caller's host, and apps are not trusted
#: with that.
_KEEPS_CLASS = {
    "ConfigError": True,
    "InvalidResultError": True,
    "LeaseTimeoutError": False,
    "WorkerStartError": False,
}
_SHAPES = ("bare", "error", "a reply of other workers")
_WRONG_FIELDS = {
    "seconds": "x",
    "names": {"a": 1},
    "variables": 5,
    "n": "many",
    "total": [],
    "desc": 7,
    "gpus": 3,
}
_KINDS = ("importing", "imported", "progress", "gpu_memory", "gpu_used", "no_cuda", "out_of_memory", "x")
_EVENTS_SENT: list[dict[str, Any]] = [{"event": kind, **_WRONG_FIELDS} for kind in _KINDS]
_EVENTS_SENT += [{"event": ["progress"]}, {"event": "imported", "names": ["antigravity"]}]

Replies = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def markers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which each pickle that is read creates a folder, named after its call."""
    return tmp_path_factory.mktemp("markers")


def run_calls(method: str, kind: str, *calls: list[Any]) -> Replies:
    """Run tasks of forged_replies in ``confined_caller.py``, and return its report on each call, by name."""
    command = [sys.executable, _CALLER, method, kind, json.dumps(calls)]
    done = run(command, timeout_s=200, env={**os.environ, "PYTHONPATH": str(_CALLER.parents[1])})
    assert done.returncode == 0, done.stderr
    replies: Replies = json.loads(done.stdout.splitlines()[-1])
    return replies


@pytest.fixture(scope="module")
def forked(markers: Path) -> Replies:
    calls: list[list[Any]] = [["value", "value", _VALUE], ["raises", "raises", str(markers / "raises")]]
    calls += [[name, "raises_ours", name] for name in _KEEPS_CLASS]
    calls += [["object", "returns_object", str(markers / "object")]]
    calls += [[shape, "leaves_pickle", str(markers / shape), shape] for shape in _SHAPES]
    calls += [["sends", "sends", *_EVENTS_SENT], ["much", "writes_much", 128 << 20]]
    return run_calls("forkserver", "confined", *calls)


@pytest.fixture(scope="module", params=["forkserver", "spawn"])
def replies(request: pytest.FixtureRequest, markers: Path, forked: Replies) -> Replies:
    """Reports on a value and an exception, for both start methods."""
    if request.param == "forkserver":
        return forked
    calls = ["value", "value", _VALUE], ["raises", "raises", str(markers / "raises")]
    return run_calls("spawn", "confined", *calls)


def test_a_value_arrives_as_data(replies: Replies) -> None:
    assert replies["value"]["unpickled"] == []
    assert replies["value"]["value"] == _VALUE


def test_an_exception_arrives_as_type_and_text(replies: Replies, markers: Path) -> None:
    assert replies["raises"]["error"] == "WorkerTaskError"
    assert f"raised forged_replies.BombError: {markers / 'raises'}" in replies["raises"]["text"]
    assert replies["raises"]["unpickled"] == []
    assert not (markers / "raises").exists()


def test_replies_of_unconfined_workers_are_unpickled(tmp_path: Path) -> None:
    """This shows that the program records unpickling."""
    marker = tmp_path / "made"
    unconfined = run_calls(
        "forkserver", "free", ["value", "value", 1], ["object", "returns_object", str(marker)]
    )
    assert unconfined["value"]["unpickled"] != []
    assert marker.exists()


@pytest.mark.parametrize("raised", _KEEPS_CLASS)
def test_which_of_our_errors_a_confined_app_can_raise(raised: str, forked: Replies) -> None:
    expected = raised if _KEEPS_CLASS[raised] else "WorkerTaskError"
    assert (forked[raised]["error"], forked[raised]["unpickled"]) == (expected, [])
    assert "the text of the error" in forked[raised]["text"]


@pytest.mark.parametrize("shape", ["object", *_SHAPES])
def test_an_object_is_refused_in_the_worker_and_no_pickle_is_read(
    shape: str, forked: Replies, markers: Path
) -> None:
    assert forked[shape]["error"] == "InvalidResultError"
    assert (forked[shape]["unpickled"], (markers / shape).exists()) == ([], False)


def test_events_with_wrong_fields_do_no_harm(forked: Replies) -> None:
    assert (forked["sends"]["value"], forked["sends"]["unpickled"]) == ("done", [])


def test_an_endless_line_does_not_fill_the_memory_of_the_caller(forked: Replies) -> None:
    assert forked["much"]["unpickled"] == []
    assert forked["much"]["peak_kib"] - forked["sends"]["peak_kib"] < 64 << 10


def _file(head: bytes, rest: bytes = b"", size: int | None = None) -> bytes:
    return struct.pack("<8sQ", b"fgplain1", len(head) if size is None else size) + head + rest


@pytest.mark.parametrize(
    ("data", "size"),
    {
        "empty": (b"", 0),
        "cut": (_file(b'{"cpu_s": 1')[:20], None),
        "a head of 2^63 bytes": (_file(b"{}", size=1 << 63), None),
        "a head that ends behind the file": (_file(b"{}", size=4000), None),
        "a file of an exabyte": (_file(b'{"kind": "bytes", "cpu_s": 0, "error": null}'), 1 << 60),
        "no JSON": (_file(b"\xff\xfe"), None),
        "deep": (_file(b"[" * 50_000), None),
        "a list": (_file(b"[]"), None),
        "no fields": (_file(b"{}"), None),
        "wrong types": (_file(b'{"kind": [], "cpu_s": "much", "error": 5}'), None),
        "an error of four parts": (
            _file(b'{"kind": "json", "cpu_s": 1, "error": ["a", "b", "c", "d"]}'),
            None,
        ),
        "an error of numbers": (_file(b'{"kind": "json", "cpu_s": 1, "error": [1, 2, 3]}'), None),
        "no time": (_file(b'{"kind": "json", "cpu_s": NaN, "error": null, "value": 1}'), None),
    }.values(),
)
def test_invalid_replies_are_refused(data: bytes, size: int | None) -> None:
    with open(memory_files.create("test"), "wb", buffering=0) as file:
        file.write(data)
        file.truncate(len(data) if size is None else size)
        with pytest.raises(InvalidResultError, match="left no result that can be read"):
            confined_replies.read_reply(file.fileno())


_GROWTH = """
import os, resource, sys
from flower_gpu.errors import InvalidResultError
from flower_gpu.workers import confined_replies, memory_files, messages

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

kind, max_bytes = sys.argv[1], int(sys.argv[2])
file = memory_files.create("bomb")
head = b'{"event": "progress", "kind": "json", "error": null, "cpu_s": 0, "value": ['
start = confined_replies._START
at = start.size if kind == "reply" else 0
end = memory_files.write(file, head, at)
# Small blocks, because this process must not have had that much memory before.
block = b"[]," * (1 << 16)
while end + len(block) < at + max_bytes - 4:
    end = memory_files.write(file, block, end)
end = memory_files.write(file, b"0]}", end)
if kind == "reply":
    memory_files.write(file, start.pack(confined_replies._MAGIC, end - at), 0)
before = peak_mib()
try:
    if kind == "reply":
        confined_replies.read_reply(file)
    else:
        receiving, sending = messages.pair()
        messages._send_packet(sending, b'{"in_file": true}', [file])
        messages.receive(receiving, confined_replies.MOST_EVENT_BYTES)
    result = "accepted"
except (InvalidResultError, messages.NotAMessage):
    result = "refused"
print(result, peak_mib() - before)
"""


@pytest.mark.parametrize(
    ("kind", "max_bytes", "expected"),
    [
        ("reply", confined_replies.MOST_DESCRIBED_BYTES, "accepted"),
        ("reply", 64 << 20, "refused"),
        ("event", confined_replies.MOST_EVENT_BYTES, "accepted"),
        ("event", 64 << 20, "refused"),
    ],
)
def test_nested_lists_take_little_memory_of_the_caller(
    kind: str, max_bytes: int, expected: str, run_script: Any
) -> None:
    """A few bytes of JSON may become a large object: 64 MiB became 1.4 GiB."""
    result, grown_mib = run_script(_GROWTH, kind, str(max_bytes)).stdout.split()
    assert result == expected
    assert int(grown_mib) < 160


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_FIELDS = sorted({name for fields in _EVENTS.values() for name in fields} | {"context_bytes", "names"})


@given(
    kind=st.sampled_from(sorted(_EVENTS)), fields=st.dictionaries(st.sampled_from(_FIELDS), _ANY, max_size=8)
)
def test_an_accepted_event_has_exactly_its_fields(kind: str, fields: dict[str, Any]) -> None:
    event = checked_event({**fields, "event": kind})
    assert event is not None
    assert set(event) == {"event", *_EVENTS[kind]}
    json.dumps(event, allow_nan=False)
    for value in event.values():
        assert_small(value)


def assert_small(value: Any) -> None:
    if isinstance(value, str):
        assert len(value) <= 200
    elif isinstance(value, dict):
        assert len(value) <= 64
        for item in value.values():
            assert_small(item)
    elif isinstance(value, list):
        assert len(value) <= 64
        for item in value:
            assert_small(item)
    elif isinstance(value, int | float):
        assert 0 <= value <= 1 << 53
        assert math.isfinite(value)


@pytest.mark.parametrize("event", [{}, {"event": "imported", "names": ["os"]}, {"event": []}, {"event": "x"}])
def test_unknown_events_are_dropped(event: dict[str, Any]) -> None:
    assert checked_event(event) is None


def test_a_valid_event_is_not_changed() -> None:
    gpu = {"uuid": "GPU-1", "peak_bytes": 5, "reserved_peak_bytes": None, "told_by_driver": True}
    event = checked_event({"event": "gpu_memory", "gpus": [{**gpu, "context_bytes": 1 << 40}], "cuda": True})
    assert event is not None
    assert gpu.items() <= event["gpus"][0].items()
    # The size of a context would count for all apps on such a GPU, so it is not taken from an app.
    assert "context_bytes" not in event["gpus"][0]
    progress = {"event": "progress", "desc": "epoch 1", "n": 3, "total": 10}
    assert checked_event(progress) == progress


def test_a_description_cannot_write_to_a_terminal() -> None:
    event = checked_event({"event": "progress", "desc": "\x1b]0;title\x07a\nb", "n": 1, "total": 2})
    assert event is not None
    assert event["desc"].isprintable()
