"""Flower's Array and ArrayRecord behave the same after a trip through a worker, with fewer copies."""

from __future__ import annotations

import copy
import io
import os
import pickle
from typing import Any

import array_tasks
import numpy as np
import pytest
from array_records import arrived_from, record
from flwr.common import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples
from run_programs import run_python

from flower_gpu import run_in_worker
from flower_gpu.flower import arrays
from flower_gpu.workers import memory_files, transport

needs_seals = pytest.mark.skipif(not memory_files.SEALS, reason="needs sealed memory files")


def run_in_fork(task: Any, sent: Any) -> Any:
    """Run a task in a worker. ``fork`` suffices, since each start method sends records in the same way."""
    return run_in_worker(task, sent, start_method="fork")


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_a_record_makes_a_round_trip(start_method: str) -> None:
    sent = record()
    arrived = run_in_worker(array_tasks.same, sent, start_method=start_method)
    assert type(arrived) is ArrayRecord
    assert list(arrived) == list(sent)
    for name in sent:
        assert isinstance(arrived[name], Array)
        arrived_array, sent_array = arrived[name].numpy(), sent[name].numpy()
        assert (arrived_array.dtype, arrived_array.shape, arrived_array.flags.f_contiguous) == (
            sent_array.dtype,
            sent_array.shape,
            sent_array.flags.f_contiguous,
        )
        assert (arrived_array == sent_array).all()
        arrived_array += 1  # writable, like an array from np.load
    assert arrived == sent and sent == arrived


def test_a_worker_trains_with_torch() -> None:
    sent = record(value=2)
    arrived = run_in_worker(array_tasks.torch_step, sent, start_method="forkserver")
    assert (arrived["large"].numpy() == 3).all()
    assert (sent["large"].numpy() == 2).all()


def test_changing_the_result_of_numpy_does_not_change_the_array() -> None:
    sent = Array(np.zeros(300_000))
    first, again, same = run_in_fork(array_tasks.add_one_and_look_again, sent)
    assert (first, again, same) == (300_000, 0, True)
    arrived = run_in_fork(array_tasks.same, sent)
    changed = arrived.numpy()
    changed += 1
    assert not arrived.numpy().any()
    assert arrived == sent


def test_an_array_can_be_sent_after_its_object_id_was_read() -> None:
    """After ``object_id`` is read, Flower keeps views in the array that cannot be pickled."""
    for size in (10, 300_000):
        sent = ArrayRecord([np.arange(size, dtype=np.float32)])
        sent_id = sent.object_id
        arrived = run_in_fork(array_tasks.same, sent)
        assert arrived.object_id == sent_id


@needs_seals
def test_the_serialised_bytes_are_created_on_first_access() -> None:
    arrived = arrived_from(record())
    array = arrived["large"]
    assert type(array) is arrays.Array
    assert "data" not in vars(array)
    array.numpy()
    assert "data" not in vars(array)
    assert array.data == record()["large"].data
    assert array.data is array.data
    assert not hasattr(array, "something_else")


def test_a_received_array_behaves_like_flowers_array() -> None:
    sent = record()["large"]
    arrived = arrived_from(sent)
    assert isinstance(arrived, Array)
    assert arrived == sent and sent == arrived
    assert arrived != Array(np.ones(300_000, np.float32)) and arrived != 5
    with pytest.raises(TypeError):
        hash(arrived)
    assert repr(arrived)[:100] == repr(sent)[:100]
    assert arrived.object_id == sent.object_id
    assert arrived.deflate() == sent.deflate()
    assert Array.inflate(arrived.deflate(), arrived.children) == sent
    assert ArrayRecord({"a": arrived}) == ArrayRecord({"a": sent})
    assert ArrayRecord({"a": arrived}).count_bytes() == ArrayRecord({"a": sent}).count_bytes()


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda array: pickle.loads(pickle.dumps(array))]
)
def test_copies_are_plain_arrays(duplicate: Any) -> None:
    arrived = arrived_from(record())
    assert arrived["large"].object_id
    for array in (duplicate(arrived["large"]), *duplicate(arrived_from(record())).values()):
        assert isinstance(array, Array)
    twin = duplicate(arrived["large"])
    assert type(twin) is Array
    assert twin == record()["large"]


def test_assigned_data_replaces_the_received_data() -> None:
    arrived = arrived_from(record())["large"]
    id_before = arrived.object_id
    other = Array(np.ones(5))
    arrived.data, arrived.shape, arrived.dtype = other.data, other.shape, other.dtype
    assert arrived == other
    assert arrived.object_id == other.object_id != id_before
    assert (arrived.numpy() == 1).all()
    assert run_in_fork(array_tasks.same, arrived) == other


def test_unknown_serialisation_types_pass_through() -> None:
    sent = Array(dtype="mine", shape=(3,), stype="mine", data=os.urandom(10_000))
    arrived = run_in_fork(array_tasks.same, sent)
    assert arrived == sent
    with pytest.raises(TypeError, match="mine"):
        arrived.numpy()


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions_of_the_npy_format_are_read(version: tuple[int, int]) -> None:
    numbers = np.arange(5000.0)
    data = npy(numbers, version)
    arrived = arrived_from(Array(dtype="float64", shape=(5000,), stype="numpy.ndarray", data=data))
    assert (arrived.numpy() == numbers).all()


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_the_data_is_aligned_whatever_the_header_length(offset: int) -> None:
    """Programs other than numpy may write such headers. PyTorch needs 16-byte alignment all the same."""
    text = "{'descr': '<c16', 'fortran_order': False, 'shape': (5000,), }"
    header = text.ljust(128 - 10 + offset - 1) + "\n"
    numbers = np.arange(5000, dtype=np.complex128)
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + numbers.tobytes()
    arrived = arrived_from(Array(dtype="complex128", shape=(5000,), stype="numpy.ndarray", data=data)).numpy()
    assert (arrived == numbers).all()
    assert arrived.ctypes.data % 16 == 0
    assert arrived.flags.writeable


@pytest.mark.parametrize(
    "data",
    [
        os.urandom(5000),
        npy(np.arange(5000.0))[:-1],
        npy(np.arange(5000.0))[:5000],
        b"\x93NUMPY\x01\x00\xff\xff" + b" " * 6000,
        npy(np.array([None] * 5000)),
    ],
    ids=["random", "short", "half", "header", "objects"],
)
def test_broken_data_fails_as_in_flower(data: bytes) -> None:
    sent = Array(dtype="float64", shape=(5000,), stype="numpy.ndarray", data=data)
    with pytest.raises(Exception) as flower_error:  # an exception of numpy
        sent.numpy()
    with pytest.raises(type(flower_error.value)):
        arrived_from(sent).numpy()


@settings(max_examples=examples(25))
@given(
    hnp.arrays(
        dtype=st.one_of(
            hnp.boolean_dtypes(),
            hnp.integer_dtypes(),
            hnp.floating_dtypes(),
            hnp.complex_number_dtypes(),
            hnp.datetime64_dtypes(),
        ),
        shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=30),
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_array_makes_a_round_trip(values: np.ndarray, with_seals: bool, fortran: bool) -> None:
    sent = Array(np.asfortranarray(values) if fortran else values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_files, "SEALS", with_seals and memory_files.SEALS)
        patch.setattr(transport, "_MAPPED_BYTES", 0)
        arrived = arrived_from(sent)
    sent_array = sent.numpy()
    for _ in range(2):
        arrived_array = arrived.numpy()
        assert (arrived_array.dtype, arrived_array.shape) == (sent_array.dtype, sent_array.shape)
        assert arrived_array.tobytes() == sent_array.tobytes()
        assert arrived_array.flags.writeable
    assert arrived == sent


def test_an_array_can_be_used_at_exit() -> None:
    code = """
import atexit
@atexit.register  # the first one runs last
def use():
    numbers = array.numpy()
    numbers += 1
    print(numbers[-1], array.numpy()[-1], len(array.data))
import numpy as np
from flwr.common import Array
from flower_gpu.flower import arrays
from flower_gpu.workers import transport
reply = transport.create("test")
transport.write_reply(Array(np.ones(300_000)), reply)
array = transport.read_reply(reply)
"""
    completed = run_python(code)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "2.0 1.0 2400128\n", "")
