"""What arrives is what was sent: arrays of every kind, in both directions."""

from __future__ import annotations

import mmap
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from processes import descriptors

from flower_gpu import run_in_worker
from flower_gpu.errors import WorkerError
from flower_gpu.isolation import transport

pytestmark = pytest.mark.timeout(60)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


ARRAYS = {
    "empty": np.zeros((0, 3)),
    "no dimensions": np.array(5.5, dtype=np.float32),
    "no dimensions, integer": np.array(7, dtype=np.int64),
    "small": np.arange(6.0).reshape(2, 3),
    "a page": np.arange(512.0),
    "a page and a bit": np.arange(513.0),
    "large": np.arange(1_000_000, dtype=np.float32),
    "transposed": np.arange(6000).reshape(60, 100).T,
    "fortran order": np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    "every other": np.arange(10_000)[::2],
    "backwards": np.arange(10_000)[::-1],
    "broadcast": np.broadcast_to(np.arange(3.0), (1000, 3)),
    "read-only": read_only(np.ones(5000)),
    "read-only, small": read_only(np.ones(5)),
    "objects": np.array([1, "a", None, {"b": 2}], dtype=object),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "dates": np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    "bool": np.array([True, False] * 5000),
    "half": np.arange(9, dtype=np.float16),
    "complex": np.arange(4000, dtype=np.complex128),
    "big endian": np.arange(3000, dtype=">f4"),
    "records": np.zeros(600, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "not finite": np.array([np.nan, np.inf, -np.inf, -0.0]),
    "scalar": np.float32(3.5),
}


def assert_same(arrived: Any, sent: Any) -> None:
    assert type(arrived) is type(sent)
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    if sent.dtype == object:
        assert arrived.tolist() == sent.tolist()
    else:
        assert arrived.tobytes() == sent.tobytes()


def test_arrays_both_ways(start_method: str, run: Run) -> None:
    arrived = run_in_worker("plain_tasks:echo", *ARRAYS.values(), start_method=start_method)
    for name, array in zip(ARRAYS, arrived, strict=True):
        try:
            assert_same(array, ARRAYS[name])
        except AssertionError as error:
            raise AssertionError(name) from error


def test_the_task_may_write_into_its_arguments(start_method: str, run: Run) -> None:
    def update(weights: list[np.ndarray]) -> list[np.ndarray]:
        for array in weights:
            array += 1
        return weights

    sent = [np.zeros(3), np.zeros(100_000), np.array(0.0)]
    arrived = run_in_worker(update, sent, start_method=start_method)
    assert [float(array.mean()) for array in arrived] == [1, 1, 1]
    assert [float(array.mean()) for array in sent] == [0, 0, 0]  # the caller's are its own
    for array in arrived:
        array += 1  # and may be written to


def test_the_same_array_twice_stays_one(start_method: str, run: Run) -> None:
    array = np.zeros(5000)
    first, second = run_in_worker("plain_tasks:echo", array, array, start_method=start_method)
    first[0] = 1
    assert second[0] == 1


def test_plain_values(start_method: str, run: Run) -> None:
    sent = (None, 1, 2.5, "text", b"bytes", [1, [2]], {"a": (1, 2)}, {3}, OrderedDict(b=1, a=2), 10**50)
    assert run_in_worker("plain_tasks:echo", *sent, start_method=start_method) == sent
    named = {"label": 1, "args": 2, "kwargs": 3, "call": 4, "settings": 5, "kind": 6}
    assert run_in_worker("plain_tasks:echo", start_method=start_method, **named) == ((), named)


def test_result_without_a_value(start_method: str, run: Run) -> None:
    assert run_in_worker("plain_tasks:echo", start_method=start_method) == ()
    assert run_in_worker("builtins:print", start_method=start_method) is None


def test_very_many_small_arrays(start_method: str, run: Run) -> None:
    sent = [np.full(3, number) for number in range(20_000)]
    (arrived,) = run_in_worker("plain_tasks:echo", sent, start_method=start_method)
    assert len(arrived) == 20_000
    assert all((array == number).all() for number, array in enumerate(arrived))


def test_results_that_are_kept_hold_no_descriptors(run: Run) -> None:
    before = descriptors()
    kept = [run_in_worker("plain_tasks:echo", np.ones(5000), start_method="fork") for _ in range(20)]
    assert descriptors() == before
    assert all(float(array.sum()) == 5000 for (array,) in kept)


@pytest.fixture
def memory_file() -> Iterator[int]:
    descriptor = transport.create("test")
    yield descriptor
    os.close(descriptor)


#: More than one system call takes: just under 2 GiB.
LARGE = 2**31 + 8192


def test_more_than_two_gibibytes_are_written() -> None:
    with mmap.mmap(-1, LARGE) as memory, open(os.devnull, "wb") as nothing, memoryview(memory) as view:
        assert os.pwrite(nothing.fileno(), view, 0) < LARGE
        assert transport._write(nothing.fileno(), view, 10) == LARGE + 10


def test_more_than_two_gibibytes_are_read(memory_file: int) -> None:
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    if available is None or int(available[1]) < 6 << 20:
        pytest.skip("needs 6 GiB of memory")
    os.ftruncate(memory_file, LARGE)
    os.pwrite(memory_file, b"last", LARGE - 4)
    data = transport._read(memory_file, LARGE, 0)
    assert len(data) == LARGE
    assert data[-4:] == b"last"


def test_empty_file(memory_file: int) -> None:
    with pytest.raises(WorkerError, match="ends too early"):
        transport.load(memory_file)


def test_something_else(memory_file: int) -> None:
    os.write(memory_file, b"something else entirely, 24 bytes and more")
    with pytest.raises(WorkerError, match="something else"):
        transport.load(memory_file)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_torn_file(part: float, memory_file: int) -> None:
    transport.write_request([np.ones(5000), "text"], memory_file)
    os.ftruncate(memory_file, int(os.fstat(memory_file).st_size * part))
    with pytest.raises(WorkerError, match="ends too early"):
        transport.load(memory_file)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        hnp.arrays(
            dtype=st.one_of(
                hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.complex_number_dtypes()
            ),
            shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=20),
        ),
        max_size=5,
    )
)
def test_any_arrays(arrays: list[np.ndarray]) -> None:
    descriptor = transport.create("test")
    try:
        transport.write_request({"weights": arrays}, descriptor)
        arrived = transport.load(descriptor)["weights"]
    finally:
        os.close(descriptor)
    assert len(arrived) == len(arrays)
    for ours, sent in zip(arrived, arrays, strict=True):
        assert_same(ours, sent)
        assert ours.flags.writeable
