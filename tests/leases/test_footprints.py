"""Learned footprints: what they are of, that they are kept, and that many processes can learn at once."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
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
    """A file that is not there yet, in a folder that only this user can write to."""
    tmp_path.chmod(0o700)
    return tmp_path / "footprints.json"


# What a footprint is of.


def test_a_key_is_of_the_task_the_gpu_the_sizes_and_the_shapes_of_weights() -> None:
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


def test_settings_that_are_about_memory_count() -> None:
    counts = {"batch-size": 32, "batch_size": np.int64(32), "imageSize": 224, "image": "224x224", "len": 5}
    counts |= {"input_resolution": "224, 224, 3", "precision": "bf16-mixed", "use-amp": True}
    others = {"lr": 0.1, "server-round": 3, "silent": 1, "sample": True, "batch-norm": True}
    others |= {"step-size": 0.1, "image-folder": "/data/client-3/images", "size": "1" * 5000}  # 0.1 is a rate
    assert dict(sizes_of(counts | others)) == {**counts, "use-amp": "True"}
    assert sizes_of({"precision": "x" * 65}) == sizes_of({"precision": 0.5}) == ()


# Learning.


def test_what_was_learned_is_kept_for_others_and_asking_makes_no_file(path: Path) -> None:
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


def test_the_default_file_is_in_the_state_folder_and_the_users_alone_whatever_the_umask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path / "new" / "state"))
    before = os.umask(0)
    try:
        Footprints().learn(KEY, GIB)
    finally:
        os.umask(before)
    assert Footprints().get(KEY) == GIB
    made = tmp_path / "new" / "state", state_folder.state_dir()
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700, 0o700]
    assert {stat.S_IMODE(file.stat().st_mode) for file in made[1].iterdir()} == {0o600}


def test_task_that_grows_teaches_it_at_once(path: Path) -> None:
    footprints = Footprints(path)
    for peak, known in ((2 * GIB, 2 * GIB), (GIB, 2 * GIB), (3 * GIB, 3 * GIB), (GIB, 3 * GIB)):
        footprints.learn(KEY, peak)
        assert footprints.get(KEY) == known


def test_task_that_has_shrunk_is_believed_after_some_calls(path: Path) -> None:
    footprints = Footprints(path)
    footprints.learn(KEY, 10 * GIB)
    for _ in range(REMEMBERED - 1):
        footprints.learn(KEY, GIB)
        assert footprints.get(KEY) == 10 * GIB
    footprints.learn(KEY, GIB)
    assert footprints.get(KEY) == GIB
    assert footprints.entries()[KEY].measured == REMEMBERED + 1


@pytest.mark.parametrize("peak", [0, -1, 1.5, True, None, "1"])
def test_no_size_is_not_learned(path: Path, peak: Any) -> None:
    for learn in (
        lambda: Footprints(path).learn(KEY, peak),
        lambda: Footprints(path).learn_context("gpu", peak),
    ):
        with pytest.raises(ConfigError, match="must be a positive number of bytes"):
            learn()
    assert not path.exists()


def test_the_smallest_of_several_contexts_counts(path: Path) -> None:
    footprints = Footprints(path)
    for size, known in ((900, 900), (400, 400), (500, 400), (390, 390)):
        footprints.learn_context("gpu", size * MIB)
        assert footprints.context("gpu") == known * MIB
    for _ in range(REMEMBERED):  # another driver
        footprints.learn_context("gpu", 600 * MIB)
    assert footprints.context("gpu") == 600 * MIB


def test_a_call_that_failed_teaches_only_more(path: Path) -> None:
    footprints = Footprints(path)
    footprints.learn_call(KEY, Measured(5 * GIB), is_done=False)
    assert footprints.get(KEY) is None
    for peak, is_done, known in ((2, True, 2), (1, False, 2), (3, False, 3)):
        footprints.learn_call(KEY, Measured(peak * GIB), is_done=is_done)
        assert footprints.get(KEY) == known * GIB
    assert footprints.entries()[KEY].measured == 2


def test_what_a_call_that_ran_out_would_have_needed_is_kept_for_good(path: Path) -> None:
    """Not only for as long as it is one of the last: then the task would run out again."""
    footprints = Footprints(path)
    footprints.learn_need(KEY, 5 * GIB, (4 * GIB, 2 * GIB))
    assert footprints.get(KEY) == 5 * GIB
    for _ in range(REMEMBERED):
        footprints.learn_call(KEY, Measured(6 * GIB, GIB, 5 * GIB, 2 * GIB, 10 * GIB))
    assert footprints.get(KEY) >= 5 * GIB
    footprints.learn_need(OTHER, 5 * GIB, None)
    assert footprints.get(OTHER) == 5 * GIB


def test_the_oldest_are_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_MAX_ENTRIES", 3)
    footprints = Footprints(path)
    keys = [Key(f"task-{number}", "no weights", "gpu") for number in range(5)]
    for key in keys:
        footprints.learn(key, GIB)
    assert list(footprints.entries()) == keys[2:]


def test_clear_one_task_or_all(path: Path) -> None:
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
        assert ours.version() in seen  # not by being asked
        assert ours.get(KEY) == peak


# Files that are not ours.


def with_peaks(**fields: Any) -> bytes:
    """A file of one footprint whose fields are not what they should be."""
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
def test_broken_file_is_put_aside_with_a_warning(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    footprints = Footprints(path)
    with pytest.warns(RuntimeWarning, match=r"could not be read .* footprints.json.unreadable"):
        assert footprints.get(KEY) is None
    assert (path.parent / "footprints.json.unreadable").read_bytes() == content
    footprints.learn(KEY, GIB)
    assert Footprints(path).get(KEY) == GIB
    path.write_bytes(path.read_bytes()[:40])  # also one that breaks while it is used
    with pytest.warns(RuntimeWarning, match="could not be read"):
        assert footprints.get(KEY) is None


def test_file_that_cannot_be_written_is_a_warning(path: Path) -> None:
    path.with_name("footprints.json.tmp").mkdir()
    with pytest.warns(RuntimeWarning, match=r"footprints cannot be kept in .*footprints\.json"):
        Footprints(path).learn(KEY, GIB)
    assert not path.exists()


@pytest.mark.parametrize("unsafe", ["writable", "a file", "a link"])
def test_folder_that_others_can_write_to_is_refused(tmp_path: Path, unsafe: str) -> None:
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


# Several at once.

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
    """Start programs that wait for a line, and end them with the test."""
    started: list[subprocess.Popen[str]] = []

    def one(code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", code, *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate()


def let_go(process: subprocess.Popen[str]) -> None:
    """Wait until a program is ready, and let it begin."""
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.filterwarnings("error")  # such as that the file could not be read
def test_many_processes_learn_at_once_nothing_is_lost_and_readers_find_a_whole_file(
    path: Path, start: Any
) -> None:
    Footprints(path).learn(KEY, GIB)
    processes = [start(LEARN, str(path), f"task-{number}", "25") for number in range(4)]
    for process in processes:
        let_go(process)
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
        let_go(process)
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


def test_lock_that_is_not_given_back_is_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LOCK_WAIT_S", 0.05)
    footprints = Footprints(path)
    footprints.learn(KEY, GIB)
    with open(path.with_name("footprints.json.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.warns(RuntimeWarning, match="another process has locked footprints.json.lock"):
            footprints.learn(KEY, 2 * GIB)
        assert footprints.get(KEY) == GIB  # readers do not wait
        with pytest.warns(RuntimeWarning), pytest.raises(ConfigError, match="could not be changed"):
            footprints.clear()
