"""What comes from a confined worker is data: nothing of it is unpickled, and none of it ends its caller."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu.errors import InvalidResultError
from flower_gpu.workers import confined_replies, confinement, memory_files
from flower_gpu.workers.confined_replies import _EVENTS, checked_event

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]

_CALLER = Path(__file__).with_name("confined_caller.py")
_GIVEN = {"a": [1, 2.5, None, "text"], "b": {"c": True}}
#: Whether our errors stay what they are. Two say something about the caller's host: no app is believed that.
_OURS = {
    "ConfigError": True,
    "InvalidResultError": True,
    "LeaseTimeoutError": False,
    "WorkerStartError": False,
}
_SHAPES = ("bare", "error", "a reply of other workers")
_NOTHING = {"seconds": "x", "names": {"a": 1}, "variables": 5, "n": "many", "total": [], "desc": 7, "gpus": 3}
_TOLD = ("importing", "imported", "progress", "gpu_memory", "gpu_used", "no_cuda", "out_of_memory", "x")
_EVENTS_SENT: list[dict[str, Any]] = [{"event": kind, **_NOTHING} for kind in _TOLD]
_EVENTS_SENT += [{"event": ["progress"]}, {"event": "imported", "names": ["antigravity"]}]

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def markers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a pickle that is read leaves a file, for each call."""
    return tmp_path_factory.mktemp("markers")


def made(method: str, kind: str, *calls: list[Any]) -> Found:
    """Run tasks of confined_tasks in a program of its own; return what that found, by the names of calls."""
    line = [sys.executable, str(_CALLER), method, kind, json.dumps(calls)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def forked(markers: Path) -> Found:
    calls: list[list[Any]] = [["value", "value", _GIVEN], ["raises", "raises", str(markers / "raises")]]
    calls += [[name, "raises_ours", name] for name in _OURS]
    calls += [["object", "returns_object", str(markers / "object")]]
    calls += [[shape, "leaves_pickle", str(markers / shape), shape] for shape in _SHAPES]
    calls += [["sends", "sends", *_EVENTS_SENT], ["much", "writes_much", 128 << 20]]
    return made("forkserver", "confined", *calls)


@pytest.fixture(scope="module", params=["forkserver", "spawn"])
def found(request: pytest.FixtureRequest, markers: Path, forked: Found) -> Found:
    """A value and an exception, with both start methods."""
    if request.param == "forkserver":
        return forked
    calls = ["value", "value", _GIVEN], ["raises", "raises", str(markers / "raises")]
    return made("spawn", "confined", *calls)


def test_a_value_comes_as_data(found: Found) -> None:
    assert found["value"]["unpickled"] == []
    assert found["value"]["value"] == _GIVEN


def test_an_exception_comes_as_type_and_text(found: Found, markers: Path) -> None:
    assert found["raises"]["error"] == "WorkerTaskError"
    assert f"raised confined_tasks.BombError: {markers / 'raises'}" in found["raises"]["text"]
    assert found["raises"]["unpickled"] == []
    assert not (markers / "raises").exists()


def test_other_workers_are_unpickled(tmp_path: Path) -> None:
    """Which the tests here would see."""
    marker = tmp_path / "made"
    free = made("forkserver", "free", ["value", "value", 1], ["object", "returns_object", str(marker)])
    assert free["value"]["unpickled"] != []
    assert marker.exists()


@pytest.mark.parametrize("raised", _OURS)
def test_which_of_our_errors_a_confined_app_can_raise(raised: str, forked: Found) -> None:
    seen = raised if _OURS[raised] else "WorkerTaskError"
    assert (forked[raised]["error"], forked[raised]["unpickled"]) == (seen, [])
    assert "as it is said there" in forked[raised]["text"]


@pytest.mark.parametrize("shape", ["object", *_SHAPES])
def test_an_object_is_refused_in_the_worker_and_no_pickle_is_read(
    shape: str, forked: Found, markers: Path
) -> None:
    assert forked[shape]["error"] == "InvalidResultError"
    assert (forked[shape]["unpickled"], (markers / shape).exists()) == ([], False)


def test_events_with_wrong_fields_do_no_harm(forked: Found) -> None:
    assert (forked["sends"]["value"], forked["sends"]["unpickled"]) == ("done", [])


def test_a_line_without_an_end_does_not_fill_the_memory_of_the_caller(forked: Found) -> None:
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
        "a head behind its end": (_file(b"{}", size=4000), None),
        "a file of an exabyte": (_file(b'{"kind": "bytes", "cpu_s": 0, "error": null}'), 1 << 60),
        "no JSON": (_file(b"\xff\xfe"), None),
        "deep": (_file(b"[" * 50_000), None),
        "a list": (_file(b"[]"), None),
        "without fields": (_file(b"{}"), None),
        "of wrong types": (_file(b'{"kind": [], "cpu_s": "much", "error": 5}'), None),
        "an error of four": (_file(b'{"kind": "json", "cpu_s": 1, "error": ["a", "b", "c", "d"]}'), None),
        "an error of numbers": (_file(b'{"kind": "json", "cpu_s": 1, "error": [1, 2, 3]}'), None),
        "no time": (_file(b'{"kind": "json", "cpu_s": NaN, "error": null, "value": 1}'), None),
    }.values(),
)
def test_bytes_that_are_no_reply_are_refused(data: bytes, size: int | None) -> None:
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

kind, most = sys.argv[1], int(sys.argv[2])
file = memory_files.create("bomb")
head = b'{"event": "progress", "kind": "json", "error": null, "cpu_s": 0, "value": ['
start = confined_replies._START
at = start.size if kind == "reply" else 0
end = memory_files.write(file, head, at)
block = b"[]," * (1 << 16)  # in pieces: this process must not have had the memory before
while end + len(block) < at + most - 4:
    end = memory_files.write(file, block, end)
end = memory_files.write(file, b"0]}", end)
if kind == "reply":
    memory_files.write(file, start.pack(confined_replies._MAGIC, end - at), 0)
before = peak_mib()
try:
    if kind == "reply":
        confined_replies.read_reply(file)
    else:
        ours, theirs = messages.pair()
        messages._send_packet(theirs, b'{"in_file": true}', [file])
        messages.receive(ours, confined_replies.MOST_EVENT_BYTES)
    taken = "taken"
except (InvalidResultError, messages.NotAMessage):
    taken = "refused"
print(taken, peak_mib() - before)
"""


@pytest.mark.parametrize(
    ("kind", "most_bytes", "taken"),
    [
        ("reply", confined_replies.MOST_DESCRIBED_BYTES, "taken"),
        ("reply", 64 << 20, "refused"),
        ("event", confined_replies.MOST_EVENT_BYTES, "taken"),
        ("event", 64 << 20, "refused"),
    ],
)
def test_nested_lists_take_little_memory_of_the_caller(
    kind: str, most_bytes: int, taken: str, run_script: Any
) -> None:
    """A few bytes of JSON may be an object of many: 64 MiB were 1.4 GiB."""
    found, grown_mib = run_script(_GROWTH, kind, str(most_bytes)).stdout.split()
    assert found == taken
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
def test_a_taken_event_has_all_of_its_fields_and_nothing_else(kind: str, fields: dict[str, Any]) -> None:
    found = checked_event({**fields, "event": kind})
    assert found is not None
    assert set(found) == {"event", *_EVENTS[kind]}
    json.dumps(found, allow_nan=False)
    for value in found.values():
        assert_small(value)


def assert_small(value: Any) -> None:
    if isinstance(value, str):
        assert len(value) <= 200
    elif isinstance(value, dict):
        assert len(value) <= 64
        for each in value.values():
            assert_small(each)
    elif isinstance(value, list):
        assert len(value) <= 64
        for each in value:
            assert_small(each)
    elif isinstance(value, int | float):
        assert 0 <= value <= 1 << 53
        assert math.isfinite(value)


@pytest.mark.parametrize("event", [{}, {"event": "imported", "names": ["os"]}, {"event": []}, {"event": "x"}])
def test_other_events_are_left_out(event: dict[str, Any]) -> None:
    assert checked_event(event) is None


def test_an_honest_event_stays_as_it_is() -> None:
    gpu = {"uuid": "GPU-1", "peak_bytes": 5, "reserved_peak_bytes": None, "told_by_driver": True}
    found = checked_event({"event": "gpu_memory", "gpus": [{**gpu, "context_bytes": 1 << 40}], "cuda": True})
    assert found is not None
    assert gpu.items() <= found["gpus"][0].items()
    assert "context_bytes" not in found["gpus"][0]  # it would be believed for all apps on such a GPU
    told = {"event": "progress", "desc": "epoch 1", "n": 3, "total": 10}
    assert checked_event(told) == told


def test_a_description_cannot_write_to_a_terminal() -> None:
    found = checked_event({"event": "progress", "desc": "\x1b]0;title\x07a\nb", "n": 1, "total": 2})
    assert found is not None
    assert found["desc"].isprintable()
