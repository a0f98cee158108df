"""Memory files themselves: sealed, mapped, unmapped."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import descriptors

from flower_gpu.workers.transport import memory

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not memory.SEALS, reason="needs sealed memory files"),
]

SIZE = 1 << 20


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = memory.create("test-memory")
    memory.write(descriptor, b"\1" * SIZE, 0)
    yield descriptor
    os.close(descriptor)


def test_write_and_read(file: int) -> None:
    assert memory.write(file, b"abc", SIZE) == SIZE + 3
    assert memory.read(file, 4, SIZE - 1) == b"\1abc"
    assert memory.read(file, 0, SIZE) == b""


def test_read_takes_no_memory_for_what_is_not_there(file: int) -> None:
    with pytest.raises(EOFError):
        memory.read(file, 1 << 60, 0)
    with pytest.raises(EOFError):
        memory.read(file, 1, SIZE)


def test_programs_do_not_inherit_it(file: int) -> None:
    assert not os.get_inheritable(file)


def test_sealed_size(file: int) -> None:
    memory.seal_size(file)
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    os.pwrite(file, b"2", 0)


def test_sealed_content(file: int) -> None:
    assert memory.seal(file)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"2", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(file, SIZE)
    assert memory.seal(file)  # no matter how often


def test_no_seal_on_other_files(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as other:
        assert not memory.seal(other.fileno())


def test_a_private_map_does_not_write_into_the_file(file: int) -> None:
    memory.seal(file)
    first, second = memory.Map(file, SIZE), memory.Map(file, SIZE)
    first.view[0] = 7
    assert (first.view[0], second.view[0], memory.read(file, 1, 0)[0]) == (7, 1, 1)


def test_where_something_lies(file: int) -> None:
    found = memory.Map(file, SIZE)
    assert found.offset_of(found.address, SIZE) == 0
    assert found.offset_of(found.address + 5, 10) == 5
    assert found.offset_of(found.address - 1, 10) is None
    assert found.offset_of(found.address + SIZE - 9, 10) is None


def test_what_cannot_be_mapped(file: int) -> None:
    with pytest.raises(OSError, match="cannot map"):
        memory.Map(-1, SIZE)
    with pytest.raises(OSError, match="cannot map"):
        memory.Map(file, 1 << 60)


def test_a_file_of_another_process(file: int) -> None:
    found = memory.open_of(os.getpid(), file, memory.identity(file))
    try:
        assert memory.identity(found) == memory.identity(file)
        with pytest.raises(OSError):
            os.pwrite(found, b"2", 0)
        memory.seal(file)
        private = memory.Map(found, SIZE)
        private.view[0] = 7
        assert memory.read(file, 1, 0)[0] == 1
    finally:
        os.close(found)


def test_another_file_of_another_process(file: int) -> None:
    before = descriptors()
    expected = memory.identity(file)
    other = memory.create("test-memory")
    try:
        with pytest.raises(FileNotFoundError, match="another file"):
            memory.open_of(os.getpid(), other, expected)
    finally:
        os.close(other)
    with pytest.raises(OSError):
        memory.open_of(os.getpid(), other, expected)
    assert descriptors() == before


def test_views_that_outlive_everything() -> None:
    """An array is used while the interpreter ends: after every exit function, in a finalizer."""
    code = """
import os
from flower_gpu.workers.transport import memory
descriptor = memory.create("test")
memory.write(descriptor, b"\\1" * 5000, 0)
view = memory.Map(descriptor, 5000).view
class Last:
    def __del__(self, view=view, write=os.write):
        view[0] = 2
        write(1, b"%d" % sum(view))
import sys
sys.last_object = Last()
import atexit
atexit.register(lambda: view[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5001", "")
