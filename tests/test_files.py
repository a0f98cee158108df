"""Files and folders that several processes share."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import flower_gpu
from flower_gpu import files
from flower_gpu.workers import state_folder


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")
    with files.replaced(path) as new:
        new.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("has_one_writer", [False, True])
def test_after_an_error_only_the_old_file_is_left(tmp_path: Path, has_one_writer: bool) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")
    (tmp_path / "figures.json.tmp").write_text("left by a process that was killed")
    with pytest.raises(ZeroDivisionError), files.replaced(path, has_one_writer=has_one_writer) as new:
        assert new.read_text() == ""
        raise ZeroDivisionError
    assert path.read_text() == "old"
    left = set() if has_one_writer else {"figures.json.tmp"}
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, *left}


@pytest.mark.parametrize("mode", [None, 0o700])
def test_a_replaced_file_has_the_usual_or_the_requested_mode(tmp_path: Path, mode: int | None) -> None:
    (tmp_path / "any").touch()
    with files.replaced(tmp_path / "file", mode=mode) as new:
        new.unlink()
        # Some libraries create files that only their owner can read.
        new.touch(mode=0o600)
    wanted = (tmp_path / "any").stat().st_mode if mode is None else 0o100000 | mode
    assert (tmp_path / "file").stat().st_mode == wanted


def test_a_lock_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    first, second = (os.open(path, os.O_RDONLY) for _ in range(2))
    try:
        files.lock(first, None)
        assert not files.try_lock(second)
        with pytest.raises(TimeoutError, match="somebody has it"):
            files.lock(second, time.monotonic() + 0.05, late="somebody has it")
        # The kernel releases the lock when the descriptor is closed.
        files.lock(second, None, sleep=lambda _: os.close(first))
    finally:
        os.close(second)


def test_a_file_without_references_is_closed_only_by_the_process_that_opened_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = files.opened(path, os.O_RDWR | os.O_CREAT)
    assert files.try_lock(first)
    number = int(first)
    child = os.fork()
    if not child:
        status = 1
        try:
            # The fork does not have the file open, so another file may get its number.
            with open(path, "rb") as other:
                os.dup2(other.fileno(), number)
                del first
                status = 0 if os.fstat(number).st_ino == path.stat().st_ino else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    second = files.opened(path, os.O_RDWR)
    assert not files.try_lock(second)
    del first
    assert files.try_lock(second)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
    second.close()
    second.close()


def test_waiting_for_a_lock_does_not_draw_from_the_users_random_generator(tmp_path: Path) -> None:
    """The number of waits is random, but the draws of a run with a seed must not be."""
    path = tmp_path / "lock"
    pauses: list[float] = []
    with open(path, "w") as first, open(path) as second:
        assert files.try_lock(first.fileno())
        before = random.getstate()
        with pytest.raises(TimeoutError):
            files.lock(second.fileno(), time.monotonic() + 0.1, late="late", sleep=pauses.append)
    assert random.getstate() == before and len(set(pauses)) > 1


def test_a_file_that_was_removed_or_replaced_has_lost_its_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    assert files.still_has_name(descriptor, path)
    path.unlink()
    assert not files.still_has_name(descriptor, path)
    path.touch()
    assert not files.still_has_name(descriptor, path)
    os.close(descriptor)


def test_a_private_folder_is_not_a_link_and_not_writable_for_others(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    assert files.is_own_folder(folder)
    assert not files.is_own_folder(folder, forbidden=0o077)
    assert not files.is_own_folder(folder, user=os.getuid() + 1)
    (tmp_path / "link").symlink_to(folder)
    assert not files.is_own_folder(tmp_path / "link")
    folder.chmod(0o777)
    assert not files.is_own_folder(folder)
    with pytest.raises(FileNotFoundError):
        files.is_own_folder(tmp_path / "missing")


def test_a_folder_that_resists_removal_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    descriptor = files.locked_folder(path)
    (path / "closed").mkdir(mode=0)
    (path / "link").symlink_to(tmp_path)
    place = os.open(path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=place)
        inner = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    try:
        files.remove_unlocked_folders([path])
        assert path.exists(), "a folder in use must not be removed"
        os.close(descriptor)
        files.remove_unlocked_folders([path])
        assert not list(tmp_path.iterdir())
    finally:
        # Without this, pytest could not remove the folder either.
        subprocess.run(["rm", "-rf", path], check=True)


HOLDS = """
import sys
from pathlib import Path
from flower_gpu import files
with files.temporary_folder("of-test"):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_temporary_folders_of_a_killed_process_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command, env = [sys.executable, "-c", HOLDS], {**os.environ, "TMPDIR": str(tmp_path)}
    others = tmp_path / f"{files._TEMPORARY}others"
    # None of our folders has this mode.
    others.mkdir(mode=0o755)
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as killed,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as living,
    ):
        for process in (killed, living):
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        killed.kill()
        killed.wait()
        assert len(list(tmp_path.iterdir())) == 3
        # Fork servers call this function when they start.
        state_folder.remove_left_socket_folders()
        assert [path.name.split("-")[-2] for path in tmp_path.iterdir() if path != others] == [
            f"{living.pid}"
        ]
        with files.temporary_folder("of-test") as own:
            assert own.parent == tmp_path and len(list(tmp_path.iterdir())) == 3
    assert list(tmp_path.iterdir()) == [others]


def test_no_other_code_makes_temporary_files_that_a_kill_would_leave() -> None:
    package = Path(flower_gpu.__file__).parent
    makers = re.compile(r"\b(mkdtemp|mkstemp|TemporaryDirectory|NamedTemporaryFile)\b")
    assert not [path for path in package.rglob("*.py") if makers.search(path.read_text())]


def test_a_folder_that_is_removed_before_it_is_locked_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    done = threading.Event()

    def remove_when_unlocked() -> None:
        while not done.is_set():
            files.remove_unlocked_folders([path])

    remover = threading.Thread(target=remove_when_unlocked)
    remover.start()
    try:
        for _ in range(200):
            descriptor = files.locked_folder(path)
            (path / "file").touch()
            assert files.still_has_name(descriptor, path)
            os.close(descriptor)
    finally:
        done.set()
        remover.join()


def test_cached_names_match_the_current_content_of_the_folder(tmp_path: Path) -> None:
    """This also holds after a change within the same tick of the kernel's clock."""
    for number in range(200):
        (tmp_path / f"own-{number}").touch()
        (tmp_path / f"other-{number}").touch()
        names = {path.name for path in tmp_path.iterdir() if path.name.startswith("own-")}
        assert set(files.names_with_prefix(tmp_path, "own-")) == names
        if number % 3 == 0:
            # With an old modification time, the names are cached.
            os.utime(tmp_path, (number, number))
            assert set(files.names_with_prefix(tmp_path, "own-")) == names
        if number % 2:
            (tmp_path / f"own-{number}").unlink()
    with pytest.raises(FileNotFoundError):
        files.names_with_prefix(tmp_path / "nowhere", "own-")
