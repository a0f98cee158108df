"""Memory files are sealed, mapped and unmapped. A damaged file is an error, never a crash."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from properties import examples

from flower_gpu.errors import WorkerError
from flower_gpu.workers import memory_files, transport

pytestmark = [
    pytest.mark.skipif(not memory_files.SEALS, reason="needs sealed memory files"),
]

SIZE = 1 << 20


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = memory_files.create("test-memory")
    memory_files.write(descriptor, b"\1" * SIZE, 0)
    yield descriptor
    os.close(descriptor)


def test_read_allocates_no_memory_beyond_the_file(file: int) -> None:
    with pytest.raises(EOFError):
        memory_files.read(file, 1 << 60, 0)
    with pytest.raises(EOFError):
        memory_files.read(file, 1, SIZE)


def test_programs_do_not_inherit_the_file(file: int) -> None:
    assert not os.get_inheritable(file)


def test_a_sealed_size_cannot_be_changed(file: int) -> None:
    memory_files.seal_size(file)
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    os.pwrite(file, b"2", 0)


def test_sealed_content_cannot_be_changed(file: int) -> None:
    assert memory_files.seal(file)
    with pytest.raises(PermissionError):
        os.pwrite(file, b"2", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(file, SIZE)
    assert memory_files.seal(file)  # Sealing again is allowed.


def test_other_files_cannot_be_sealed(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as other:
        assert not memory_files.seal(other.fileno())


def test_a_map_that_fails_is_an_error(file: int) -> None:
    with pytest.raises(OSError, match="cannot map"):
        memory_files.Map(-1, SIZE)
    with pytest.raises(OSError, match="cannot map"):
        memory_files.Map(file, 1 << 60)


def test_views_stay_valid_until_the_interpreter_ends() -> None:
    """A view is used in a finalizer, after all exit functions."""
    code = """
import os
from flower_gpu.workers import memory_files
descriptor = memory_files.create("test")
memory_files.write(descriptor, b"\\1" * 5000, 0)
view = memory_files.Map(descriptor, 5000).view
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


def valid_reply() -> bytes:
    """Return the bytes of a valid reply."""
    descriptor = transport.create("test")
    try:
        transport.write_reply([np.arange(5000.0), np.arange(700), "text"], descriptor)
        return bytes(memory_files.read(descriptor, os.fstat(descriptor).st_size, 0))
    finally:
        os.close(descriptor)


GOOD = valid_reply()
FIXED = transport._HEADER.size + transport._CHECKSUM.size + 2 * transport._REGION.size


def read(data: bytes) -> Any:
    descriptor = transport.create("test")
    try:
        os.write(descriptor, data)
        return transport.read_reply(descriptor)
    finally:
        os.close(descriptor)


@given(st.integers(0, len(GOOD) - 1))
@example(0)
def test_an_incomplete_file_is_refused(size: int) -> None:
    with pytest.raises(WorkerError):
        read(GOOD[:size])


@given(st.binary(max_size=400), st.booleans())
def test_a_random_file_is_refused(data: bytes, with_magic: bool) -> None:
    with pytest.raises(WorkerError):
        read(transport._MAGIC * with_magic + data)


@given(st.integers(0, FIXED - 1), st.integers(1, 255))
@settings(max_examples=examples(300))
def test_a_damaged_header_is_refused(position: int, change: int) -> None:
    data = bytearray(GOOD)
    data[position] ^= change
    with pytest.raises(WorkerError):
        read(bytes(data))


def test_moving_memory_to_huge_pages_keeps_its_content(run_script: Callable[..., Any]) -> None:
    done = run_script(
        """
        import numpy as np
        from flower_gpu.workers.forkserver.forking import (collapse, huge_page_regions)

        array = np.arange(8_000_000)  # 64 MB, so it has its own map.
        copy = array.tobytes()
        first, size = array.__array_interface__["data"][0], array.nbytes
        regions = huge_page_regions()
        inside = [address for address in regions if first <= address < first + size]
        assert all(address % (1 << 21) == 0 for address in regions)
        assert len(inside) >= size // (1 << 21) - 2, (len(inside), len(regions))
        for address in regions:
            collapse(address)
        assert array.tobytes() == copy
        array += 1
        assert int(array[-1]) == 8_000_000
        print("done")
        """
    )
    assert done.stdout == "done\n"
