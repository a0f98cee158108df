"""Arrays of all kinds arrive unchanged, in both directions, through sealed memory files.

A damaged file is an error, never a crash.
"""

from __future__ import annotations

import mmap
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plain_tasks
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import Run
from properties import examples
from run_programs import run_python

from flower_gpu import run_in_worker
from flower_gpu.errors import InvalidResultError, WorkerError, WorkerStartError
from flower_gpu.workers import memory_files, transport


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


#: Arrays with properties that those of test_regions do not have.
ARRAYS = {
    "large": np.arange(1_000_000, dtype=np.float32),
    "records": np.zeros(600, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "scalar": np.float32(3.5),
    "records, large": np.zeros(6000, dtype=[("a", "i1"), ("b", "f8", (2,))]),
    "another class": np.arange(10_000.0).view(np.matrix),
    "masked": np.ma.masked_greater(np.arange(10_000.0), 5000),
    "many empty rows": np.zeros((1000, 0, 1000)),
    "many dimensions": np.zeros((1,) * 32),
}


def assert_same(arrived: Any, sent: Any) -> None:
    assert type(arrived) is type(sent)
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.tobytes() == sent.tobytes()
    assert arrived.flags.writeable == sent.flags.writeable
    assert arrived.ctypes.data % 16 == 0 if isinstance(arrived, np.ndarray) else True


def test_arrays_arrive_unchanged_in_both_directions(start_method: str, run: Run) -> None:
    arrived = run_in_worker("plain_tasks:echo", *ARRAYS.values(), start_method=start_method)
    for name, array in zip(ARRAYS, arrived, strict=True):
        try:
            assert_same(array, ARRAYS[name])
        except AssertionError as error:
            raise AssertionError(name) from error


def test_an_array_that_is_passed_twice_stays_a_single_array(run: Run) -> None:
    array = np.zeros(5000)
    first, second = run_in_worker("plain_tasks:echo", array, array)
    first[0] = 1
    assert second[0] == 1


def test_plain_values_arrive_unchanged(run: Run) -> None:
    sent = (None, 1, 2.5, "text", b"bytes", [1, [2]], {"a": (1, 2)}, {3}, OrderedDict(b=1, a=2), 10**50)
    assert run_in_worker("plain_tasks:echo", *sent) == sent
    named = {"label": 1, "args": 2, "kwargs": 3, "call": 4, "settings": 5, "kind": 6}
    assert run_in_worker("plain_tasks:echo", **named) == ((), named)


def test_arrays_of_objects_are_refused_with_their_place(start_method: str, run: Run) -> None:
    objects = np.array([1, "a", None], dtype=object)
    with pytest.raises(InvalidResultError, match=r"result\[1\]\['x'\] is an array of objects .*numeric"):
        run_in_worker(lambda: [1, {"x": np.array([1, "a", None], dtype=object)}], start_method=start_method)
    if start_method != "fork":  # A fork inherits its arguments.
        with pytest.raises(WorkerStartError, match=r"args\[0\]\[0\] is an array of objects .*numeric"):
            run_in_worker("plain_tasks:echo", [objects], start_method=start_method)
        with pytest.raises(WorkerStartError, match=r"kwargs\['named'\] is an array of objects"):
            run_in_worker("plain_tasks:echo", named=objects, start_method=start_method)


def test_an_array_of_objects_inside_another_object_is_passed(run: Run) -> None:
    (arrived,) = run_in_worker("plain_tasks:echo", plain_tasks.Table())
    assert arrived.columns.tolist() == ["a", 1, None]


def test_tensors_arrive_unchanged_and_writable(run: Run) -> None:
    torch = pytest.importorskip("torch")

    def update(tensors: list[Any], array: np.ndarray) -> Any:
        import torch

        for tensor in tensors:
            tensor += 1
        wrapped = torch.from_numpy(array)
        wrapped *= 2
        return tensors, wrapped.numpy(), wrapped.to(torch.bfloat16)

    sent = [torch.zeros(3000, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex128)]
    array = np.ones(300_000, np.complex128)
    tensors, doubled, half = run_in_worker(update, sent, array)
    assert [(tensor == 1).all().item() for tensor in tensors] == [True] * 3
    assert [tensor.dtype for tensor in tensors] == [tensor.dtype for tensor in sent]
    assert half.dtype is torch.bfloat16 and (half == 2).all()
    assert (doubled == 2).all()
    torch.from_numpy(doubled).add_(1)
    assert (doubled == 3).all()
    assert not any(tensor.any() for tensor in sent)
    assert (array == 1).all()


def test_broadcast_arrays_stay_small(run: Run) -> None:
    huge = np.broadcast_to(np.arange(3.0), (1_000_000, 1_000_000, 3))
    (arrived,) = run_in_worker("plain_tasks:echo", huge)
    assert arrived.shape == huge.shape
    assert arrived[-1, -1].tolist() == [0, 1, 2]


def test_processes_of_the_worker_do_not_change_its_arrays(run: Run) -> None:
    def task(array: np.ndarray) -> np.ndarray:
        pid = os.fork()
        if pid == 0:
            array[:] = 7
            os._exit(0)
        os.waitpid(pid, 0)
        array += 1
        return array

    array = np.zeros(300_000)
    assert (run_in_worker(task, array) == 1).all()


#: Number of bytes, more than the limit of a system call (just under 2 GiB).
LARGE = 2**31 + 8192


def test_more_than_two_gibibytes_can_be_passed(run: Run) -> None:
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    if available is None or int(available[1]) < 8 << 20:
        pytest.skip("needs 8 GiB of memory")

    def task(array: np.ndarray) -> np.ndarray:
        array[-2] += 1
        return array

    sent = np.zeros(LARGE, np.uint8)
    sent[-1] = 5
    arrived = run_in_worker(task, sent)
    assert arrived.shape == (LARGE,)
    assert arrived[-3:].tolist() == [0, 1, 5]
    assert sent[-3:].tolist() == [0, 0, 5]


def test_a_local_class_of_a_library_is_passed_by_value(run: Run) -> None:
    class Local:
        value = 42

    Local.__module__ = "flwr.app"  # This looks as if the library had defined the class.
    assert run_in_worker("plain_tasks:value_of", Local(), start_method="spawn") == 42


# Memory files -----------------------------------------------------------------------------------------------

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
    done = run_python(code)
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
