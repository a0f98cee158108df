"""Learned footprints: their keys, their file, and many processes that learn at the same time."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.leases import footprint
from flower_gpu.leases.footprint import DEFAULT_CONTEXT_BYTES, REMEMBERED, Footprints
from flower_gpu.leases.footprint_rule import Key, Measured, key_of, sizes_of
from flower_gpu.workers import state_folder

GIB, MIB = 1 << 30, 1 << 20
KEY = Key("task:train", "1.0k parameters f32 ab12cd34", "NVIDIA Stub 16GB", (("batch-size", 32),))
OTHER = Key("task:evaluate", "1.0k parameters f32 ab12cd34", "NVIDIA Stub 16GB")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A path of a file that does not exist yet, in a folder that only this user can write to."""
    tmp_path.chmod(0o700)
    return tmp_path / "footprints.json"


# Keys of footprints.


def test_a_key_depends_on_task_gpu_sizes_and_shapes_of_weights() -> None:
    usual = [np.zeros((3, 4), np.float32), np.zeros(5, np.float32)]
    key = key_of("t", usual, {"batch-size": 32, "lr": 0.1}, "gpu")
    assert key.weights.startswith("17 parameters f32 ")
    ones = [np.ones((3, 4), np.float32), np.ones(5, np.float32)]
    assert key_of("t", ones, {"lr": 0.01, "batch-size": 32}, "gpu") == key
    others = [
        key_of("t", usual, {"batch-size": 64}, "gpu"),
        key_of("u", usual, {"batch-size": 32}, "gpu"),
        key_of("t", usual, {"batch-size": 32}, "another gpu"),
    ]
    for weights in (
        [np.zeros((4, 3), np.float32), np.zeros(5, np.float32)],  # shape
        [np.zeros((3, 4), np.float16), np.zeros(5, np.float32)],  # dtype
        usual[::-1],
        usual[:1],
        [*usual, np.zeros((), np.int64)],
        [],
    ):
        others.append(key_of("t", weights, {"batch-size": 32}, "gpu"))
    assert len({key, *others}) == 10


def test_only_settings_that_affect_memory_are_part_of_a_key() -> None:
    relevant = {"batch-size": 32, "batch_size": np.int64(32), "imageSize": 224, "image": "224x224", "len": 5}
    relevant |= {"input_resolution": "224, 224, 3", "precision": "bf16-mixed", "use-amp": True}
    others = {"lr": 0.1, "server-round": 3, "silent": 1, "sample": True, "batch-norm": True}
    # A step size of 0.1 is a learning rate.
    others |= {"step-size": 0.1, "image-folder": "/data/client-3/images", "size": "1" * 5000}
    assert dict(sizes_of(relevant | others)) == {**relevant, "use-amp": "True"}
    assert sizes_of({"precision": "x" * 65}) == sizes_of({"precision": 0.5}) == ()


# Learning.


def test_footprints_are_shared_and_reading_creates_no_file(path: Path) -> None:
    others = Footprints(path)
    assert others.get(KEY) is None
    assert others.context("NVIDIA Stub 16GB") == DEFAULT_CONTEXT_BYTES
    assert others.entries() == {} and others.contexts() == {} and others.version() is None
    assert others.clear() == 0
    assert list(path.parent.iterdir()) == []
    Footprints(path).learn(KEY, 2 * GIB)
    Footprints(path).learn_context("NVIDIA Stub 16GB", 400 * MIB)
    assert others.get(KEY) == 2 * GIB
    assert others.get(OTHER) is None
    assert others.context("NVIDIA Stub 16GB") == 400 * MIB
    assert others.context("another") == DEFAULT_CONTEXT_BYTES
    assert list(others.entries()) == [KEY]
    assert others.entries()[KEY].measured == 1


def test_the_default_file_is_private_to_the_user_with_any_umask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path / "new" / "state"))
    previous_umask = os.umask(0)
    try:
        Footprints().learn(KEY, GIB)
    finally:
        os.umask(previous_umask)
    assert Footprints().get(KEY) == GIB
    folders = tmp_path / "new" / "state", state_folder.state_dir()
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700, 0o700]
    assert {stat.S_IMODE(file.stat().st_mode) for file in folders[1].iterdir()} == {0o600}


def test_a_larger_peak_counts_at_once(path: Path) -> None:
    footprints = Footprints(path)
    for peak, expected in ((2 * GIB, 2 * GIB), (GIB, 2 * GIB), (3 * GIB, 3 * GIB), (GIB, 3 * GIB)):
        footprints.learn(KEY, peak)
        assert footprints.get(KEY) == expected


def test_smaller_peaks_count_after_some_calls(path: Path) -> None:
    footprints = Footprints(path)
    footprints.learn(KEY, 10 * GIB)
    for _ in range(REMEMBERED - 1):
        footprints.learn(KEY, GIB)
        assert footprints.get(KEY) == 10 * GIB
    footprints.learn(KEY, GIB)
    assert footprints.get(KEY) == GIB
    assert footprints.entries()[KEY].measured == REMEMBERED + 1


@pytest.mark.parametrize("peak", [0, -1, 1.5, True, None, "1"])
def test_an_invalid_size_is_refused(path: Path, peak: Any) -> None:
    for learn in (
        lambda: Footprints(path).learn(KEY, peak),
        lambda: Footprints(path).learn_context("gpu", peak),
    ):
        with pytest.raises(ConfigError, match="must be a positive number of bytes"):
            learn()
    assert not path.exists()


def test_the_smallest_of_several_contexts_counts(path: Path) -> None:
    footprints = Footprints(path)
    for size, expected in ((900, 900), (400, 400), (500, 400), (390, 390)):
        footprints.learn_context("gpu", size * MIB)
        assert footprints.context("gpu") == expected * MIB
    # A new driver may have a larger context.
    for _ in range(REMEMBERED):
        footprints.learn_context("gpu", 600 * MIB)
    assert footprints.context("gpu") == 600 * MIB


def test_a_failed_call_can_only_raise_a_footprint(path: Path) -> None:
    footprints = Footprints(path)
    footprints.learn_call(KEY, Measured(5 * GIB), is_done=False)
    assert footprints.get(KEY) is None
    for peak, is_done, expected in ((2, True, 2), (1, False, 2), (3, False, 3)):
        footprints.learn_call(KEY, Measured(peak * GIB), is_done=is_done)
        assert footprints.get(KEY) == expected * GIB
    assert footprints.entries()[KEY].measured == 2


def test_the_need_of_a_call_that_ran_out_of_memory_is_never_forgotten(path: Path) -> None:
    """If the need were forgotten after some later calls, the task would run out of memory again."""
    footprints = Footprints(path)
    footprints.learn_need(KEY, 5 * GIB, (4 * GIB, 2 * GIB))
    assert footprints.get(KEY) == 5 * GIB
    for _ in range(REMEMBERED):
        footprints.learn_call(KEY, Measured(6 * GIB, GIB, 5 * GIB, 2 * GIB, 10 * GIB))
    assert footprints.get(KEY) >= 5 * GIB
    footprints.learn_need(OTHER, 5 * GIB, None)
    assert footprints.get(OTHER) == 5 * GIB


def test_the_oldest_footprints_are_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_MAX_ENTRIES", 3)
    footprints = Footprints(path)
    keys = [Key(f"task-{number}", "no weights", "gpu") for number in range(5)]
    for key in keys:
        footprints.learn(key, GIB)
    assert list(footprints.entries()) == keys[2:]


def test_clear_removes_one_task_or_all(path: Path) -> None:
    footprints = Footprints(path)
    footprints.learn(KEY, GIB)
    footprints.learn(OTHER, GIB)
    footprints.learn_context("gpu", 400 * MIB)
    assert footprints.clear("nothing") == 0
    assert footprints.clear("task:train") == 1
    assert (footprints.get(KEY), footprints.get(OTHER), footprints.context("gpu")) == (None, GIB, 400 * MIB)
    assert footprints.clear() == 1
    assert footprints.get(OTHER) is None and footprints.contexts() == {}


def test_version_changes_with_the_file(path: Path) -> None:
    ours, others = Footprints(path), Footprints(path)
    seen = {ours.version()}
    for peak in (GIB, 2 * GIB, 3 * GIB):
        others.learn(KEY, peak)
        assert ours.version() not in seen
        seen.add(ours.version())
        # The version does not change because it is read.
        assert ours.version() in seen
        assert ours.get(KEY) == peak


# Files that flower-gpu has not written.


def with_peaks(**fields: Any) -> bytes:
    """Return a file with one footprint that has the given invalid fields."""
    whole = {"recent_bytes": [1], "measured": 1, "updated_s": 1.0, "spare": 2.0, "outside_bytes": 0}
    peaks = {**vars(KEY), **whole, **fields}
    return json.dumps({"v": 2, "peaks": [peaks]}).encode()


BROKEN = {
    "empty": b"",
    "torn": b'{"v": 2, "peaks": [{"task": "task:tra',
    "binary": bytes(range(256)),
    "a list": b"[]",
    "another version": b'{"v": 1, "peaks": [], "contexts": []}',
    "other types": b'{"v": 2, "peaks": {"a": 1}}',
    "nested": b"[" * 100_000,
    "no size": with_peaks(recent_bytes=[]),
    "negative": with_peaks(recent_bytes=[-1]),
    "no time": with_peaks(updated_s=float("nan")),
    "no share": with_peaks(spare=0.5),
    "nothing outside": with_peaks(outside_bytes=-1),
    "no name": with_peaks(gpu=None),
    "list as a size": with_peaks(sizes=[["a", []]]),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_put_aside_with_a_warning(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    footprints = Footprints(path)
    with pytest.warns(RuntimeWarning, match=r"could not be read .* footprints.json.unreadable"):
        assert footprints.get(KEY) is None
    assert (path.parent / "footprints.json.unreadable").read_bytes() == content
    footprints.learn(KEY, GIB)
    assert Footprints(path).get(KEY) == GIB
    # The file may also break while it is in use.
    path.write_bytes(path.read_bytes()[:40])
    with pytest.warns(RuntimeWarning, match="could not be read"):
        assert footprints.get(KEY) is None


def test_a_file_that_cannot_be_written_is_a_warning(path: Path) -> None:
    path.with_name("footprints.json.tmp").mkdir()
    with pytest.warns(RuntimeWarning, match=r"footprints cannot be kept in .*footprints\.json"):
        Footprints(path).learn(KEY, GIB)
    assert not path.exists()


@pytest.mark.parametrize("unsafe", ["writable", "a file", "a link"])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, unsafe: str) -> None:
    folder = tmp_path / "state"
    if unsafe == "writable":
        folder.mkdir()
        folder.chmod(0o777)
    elif unsafe == "a file":
        folder.touch()
    else:
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="set FLOWER_GPU_STATE_DIR to another folder"):
        Footprints(folder / "footprints.json").learn(KEY, GIB)


# Several processes at the same time.

LEARN = """
import sys
from pathlib import Path
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import Key
path, name, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
footprints = Footprints(path)
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
for count in range(number):
    footprints.learn(Key(name, "no weights", "gpu"), 1000 + count)
    footprints.learn(Key("shared", "no weights", "gpu"), 1000 + count)
    footprints.learn_context("gpu", (500 << 20) + count)
"""


@pytest.fixture
def start() -> Iterator[Any]:
    """A function that starts programs, which are killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start_program(code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", code, *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start_program
    for process in started:
        process.kill()
        process.communicate()


def release_program(process: subprocess.Popen[str]) -> None:
    """Wait until a program is ready, then let it begin."""
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("go\n")
    process.stdin.flush()


# One of the warnings would say that the file could not be read.
@pytest.mark.filterwarnings("error")
def test_processes_that_learn_at_once_lose_nothing_and_keep_the_file_whole(path: Path, start: Any) -> None:
    Footprints(path).learn(KEY, GIB)
    processes = [start(LEARN, str(path), f"task-{number}", "25") for number in range(4)]
    for process in processes:
        release_program(process)
    while any(process.poll() is None for process in processes):
        assert Footprints(path).get(KEY) == GIB
        json.loads(path.read_bytes())
    assert [(process.returncode, process.communicate()[1]) for process in processes] == [(0, "")] * 4
    measured = {key.task: peaks.measured for key, peaks in Footprints(path).entries().items()}
    assert measured == {**{f"task-{number}": 25 for number in range(4)}, "shared": 100, KEY.task: 1}
    assert Footprints(path).contexts()["gpu"].measured == 100
    assert not path.with_name("footprints.json.unreadable").exists()


def test_learners_that_are_killed_leave_a_whole_file_and_no_lock(path: Path, start: Any) -> None:
    Footprints(path).learn(KEY, GIB)
    for number in range(6):
        process = start(LEARN, str(path), f"task-{number}", "1000000")
        release_program(process)
        version = Footprints(path).version()
        while Footprints(path).version() == version:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        footprints = Footprints(path)
        assert footprints.get(KEY) == GIB
        footprints.learn(OTHER, GIB)
    assert Footprints(path).entries()[OTHER].measured == 6
    assert not path.with_name("footprints.json.unreadable").exists()


def test_a_lock_that_is_never_released_is_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "locked", partial(files.locked, wait_s=0.05))
    footprints = Footprints(path)
    footprints.learn(KEY, GIB)
    with open(path.with_name("footprints.json.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.warns(RuntimeWarning, match="another process has locked footprints.json.lock"):
            footprints.learn(KEY, 2 * GIB)
        assert footprints.get(KEY) == GIB  # readers do not wait
        with pytest.warns(RuntimeWarning), pytest.raises(ConfigError, match="could not be changed"):
            footprints.clear()
