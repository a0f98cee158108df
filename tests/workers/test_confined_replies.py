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


def call(task: str, *arguments: Any, method: str = "forkserver", kind: str = "confined") -> dict[str, Any]:
    """Run a task of confined_tasks in a program of its own; return what that found."""
    line = [sys.executable, str(_CALLER), task, method, kind, repr(arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_value_comes_as_data(method: str) -> None:
    given = {"a": [1, 2.5, None, "text"], "b": {"c": True}}
    found = call("value", given, method=method)
    assert found["unpickled"] == []
    assert found["value"] == given


def test_other_workers_are_unpickled(tmp_path: Path) -> None:
    """Which the tests here would see."""
    assert call("value", 1, kind="free")["unpickled"] != []
    marker = tmp_path / "made"
    call("returns_object", str(marker), kind="free")
    assert marker.exists()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_an_exception_comes_as_type_and_text(tmp_path: Path, method: str) -> None:
    marker = tmp_path / "made"
    found = call("raises", str(marker), method=method)
    assert found["error"] == "WorkerTaskError"
    assert f"raised confined_tasks.BombError: {marker}" in found["text"]
    assert found["unpickled"] == []
    assert not marker.exists()


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        ("ConfigError", "ConfigError"),
        ("InvalidResultError", "InvalidResultError"),
        # These say something about the caller's host, which an app must not be believed.
        ("LeaseTimeoutError", "WorkerTaskError"),
        ("WorkerStartError", "WorkerTaskError"),
    ],
)
def test_which_of_our_errors_a_confined_app_can_raise(raised: str, seen: str) -> None:
    found = call("raises_ours", raised)
    assert (found["error"], found["unpickled"]) == (seen, [])
    assert "as it is said there" in found["text"]


def test_an_object_is_refused_in_the_worker(tmp_path: Path) -> None:
    marker = tmp_path / "made"
    found = call("returns_object", str(marker))
    assert found["error"] == "InvalidResultError"
    assert (found["unpickled"], marker.exists()) == ([], False)


@pytest.mark.parametrize("shape", ["bare", "error", "a reply of other workers"])
def test_a_pickle_in_the_place_of_the_reply_is_not_read(tmp_path: Path, shape: str) -> None:
    marker = tmp_path / "made"
    found = call("leaves_pickle", str(marker), shape)
    assert found["error"] == "InvalidResultError"
    assert (found["unpickled"], marker.exists()) == ([], False)


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


def test_events_with_wrong_fields_do_no_harm() -> None:
    nothing = {
        "seconds": "x",
        "names": {"a": 1},
        "variables": 5,
        "n": "many",
        "total": [],
        "desc": 7,
        "gpus": 3,
    }
    kinds = ("importing", "imported", "progress", "gpu_memory", "gpu_used", "no_cuda", "out_of_memory", "x")
    told = [{"event": kind, **nothing} for kind in kinds]
    told += [{"event": ["progress"]}, {"event": "imported", "names": ["antigravity"]}]
    found = call("sends", *told)
    assert (found["value"], found["unpickled"]) == ("done", [])


def test_a_line_without_an_end_does_not_fill_the_memory_of_the_caller() -> None:
    found, usual = call("writes_much", 128 << 20), call("value", 1)
    assert found["unpickled"] == []
    assert found["peak_kib"] - usual["peak_kib"] < 64 << 10


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_FIELDS = sorted({name for fields in _EVENTS.values() for name in fields} | {"context_bytes", "names"})


@given(
    kind=st.sampled_from(sorted(_EVENTS)),
    fields=st.dictionaries(st.sampled_from(_FIELDS), _ANY, max_size=8),
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
