"""The memory files of a call: which arrays are copied, and which process can change them."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import struct
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from processes import descriptors, wait_until
from properties import examples

from flower_gpu.workers import memory_files, transport

pytestmark = pytest.mark.timeout(240)

needs_seals = pytest.mark.skipif(not memory_files.SEALS, reason="needs sealed memory files")


class Call:
    """A call through the two memory files, with a fork as the worker."""

    def __init__(self) -> None:
        self.request, self.reply = (
            transport.create("flower-gpu-request"),
            transport.create("flower-gpu-reply"),
        )

    def __call__(
        self, task: Callable[..., Any], *args: Any, then: Callable[[Any], None] | None = None
    ) -> Any:
        transport.write_request((None, args, {}), self.request)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _, arguments, _ = transport.read_request(self.request)
                value = task(*arguments)
                transport.write_reply(value, self.reply)
                if then is not None:
                    then(value)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        return transport.read_reply(self.reply, self.request)

    def reply_size(self) -> int:
        return os.fstat(self.reply).st_size

    def close(self) -> None:
        os.close(self.request)
        os.close(self.reply)


@pytest.fixture
def call() -> Iterator[Call]:
    new_call = Call()
    yield new_call
    new_call.close()


def echo(*args: Any) -> Any:
    return args


def add_one(weights: list[np.ndarray]) -> list[np.ndarray]:
    for array in weights:
        array += 1
    return weights


def maps_of(name: str) -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count(f"memfd:flower-gpu-{name}")


DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.byte_string_dtypes(max_len=5),
    hnp.unicode_string_dtypes(max_len=5),
)

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda array: array,
    "fortran order": np.asfortranarray,
    "transposed": np.transpose,
    "every other": lambda array: array[..., ::2] if array.ndim else array,
    "backwards": lambda array: array[::-1] if array.ndim else array,
    "byte-swapped": lambda array: array.astype(array.dtype.newbyteorder()),
    "broadcast": lambda array: np.broadcast_to(array, (30, *array.shape)),
    "misaligned": lambda array: misaligned(array),
}


def misaligned(array: np.ndarray) -> np.ndarray:
    memory = bytearray(array.nbytes + 1)
    memory[1:] = array.tobytes()
    return np.ndarray(array.shape, array.dtype, memory, 1)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40))
    array = draw(hnp.arrays(draw(DTYPES), shape, fill=st.nothing() if np.prod(shape) < 20 else None))
    array = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](array)
    if draw(st.booleans()):
        array = array.view()
        array.flags.writeable = False
    return array


@settings(max_examples=examples(50))
@given(st.lists(arrays(), max_size=4), st.booleans(), st.sampled_from([0, 1 << 20]))
def test_arrays_of_all_layouts_arrive_unchanged(
    sent: list[np.ndarray], with_seals: bool, mapped_from: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "_MAPPED_BYTES", mapped_from)
        patch.setattr(memory_files, "SEALS", with_seals and memory_files.SEALS)
        new_call = Call()
        try:
            (arrived,) = new_call(echo, sent)
        finally:
            new_call.close()
    for result, original in zip(arrived, sent, strict=True):
        assert (result.dtype, result.shape) == (original.dtype, original.shape)
        assert result.tobytes() == original.tobytes()
        assert result.flags.writeable == original.flags.writeable
        assert result.size == 0 or result.ctypes.data % 16 == 0


@needs_seals
def test_arrays_updated_in_place_are_not_written_again(call: Call) -> None:
    sent = [np.zeros(300_000), np.zeros((500, 600), np.float32, order="F")]
    arrived = call(add_one, sent)
    assert call.reply_size() < 4096
    assert [(array == 1).all() for array in arrived] == [True, True]
    assert [array.any() for array in sent] == [False, False]
    assert [array.flags.c_contiguous for array in arrived] == [True, False]
    arrived[0] += 1  # The caller may change the array.
    assert (arrived[0] == 2).all() and (arrived[1] == 1).all()


@needs_seals
def test_parts_of_an_argument_are_written_only_if_they_overlap(call: Call) -> None:
    sent = np.arange(400_000.0)

    def task(array: np.ndarray) -> Any:
        return array[1000:300_000], array[300_000:].reshape(1000, 100), array[299_000:301_000], array[:3]

    arrived = call(task, sent)
    # Only the third part is written, because it overlaps the others.
    assert 16_000 < call.reply_size() < 30_000
    for result, expected in zip(arrived, task(sent), strict=True):
        assert (result == expected).all()
    arrived[0][-1] = arrived[1][0, 0] = -1
    assert arrived[2].tolist() == sent[299_000:301_000].tolist()


@needs_seals
def test_a_small_part_does_not_keep_a_large_request(call: Call) -> None:
    arrived = call(lambda array: array[:50_000], np.arange(1_000_000.0))
    assert call.reply_size() > 400_000
    assert maps_of("request") == 0
    assert arrived.tolist() == list(range(50_000))


@needs_seals
def test_a_file_is_unmapped_with_its_last_array(call: Call) -> None:
    before = descriptors()
    arrived = call(lambda array: [array, np.ones(300_000)], np.zeros(300_000))
    assert (maps_of("request"), maps_of("reply")) == (1, 1)
    assert descriptors() == before
    part = arrived[0][5:10]
    del arrived
    assert (maps_of("request"), maps_of("reply")) == (1, 0)
    del part
    assert (maps_of("request"), maps_of("reply")) == (0, 0)


def test_read_only_arrays_stay_read_only(call: Call) -> None:
    sent = np.arange(300_000.0)
    sent.flags.writeable = False

    def task(array: np.ndarray) -> Any:
        with pytest.raises(ValueError, match="read-only"):
            array += 1
        return array, array * 2

    same, doubled = call(task, sent)
    assert (same == sent).all() and (doubled == 2 * sent).all()
    assert (same.flags.writeable, doubled.flags.writeable) == (False, True)


def test_changes_after_the_reply_have_no_effect(call: Call) -> None:
    def later(weights: list[np.ndarray]) -> None:
        weights[0][:] = 99

    (arrived,) = call(add_one, [np.zeros(300_000)], then=later)
    assert (arrived == 1).all()


@needs_seals
def test_a_process_that_still_writes_into_the_request_cannot_change_the_result(call: Call) -> None:
    pids, write_pid = os.pipe()
    mapped, report_mapped = os.pipe()

    def task(array: np.ndarray) -> np.ndarray:
        if os.fork() == 0:
            os.setsid()
            # Children do not inherit the worker's map.
            with mmap.mmap(call.request, 0) as memory:
                os.write(report_mapped, b"x")
                os.write(write_pid, struct.pack("<Q", os.getpid()))
                while True:
                    memory[-8] = (memory[-8] + 1) % 256
        os.read(mapped, 1)
        return array

    pid = None
    try:
        arrived = call(task, np.zeros(300_000))
        (pid,) = struct.unpack("<Q", os.read(pids, 8))
        last = os.fstat(call.request).st_size - 8
        assert wait_until(lambda: os.pread(call.request, 1, last) != os.pread(call.request, 1, last))
        before = arrived.tobytes()
        for _ in range(20):
            assert arrived.tobytes() == before
        assert maps_of("request") == 0
    finally:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        for descriptor in (pids, write_pid, mapped, report_mapped):
            os.close(descriptor)


@needs_seals
def test_hundreds_of_results_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_MAPPED_BYTES", 0)
    before = descriptors()
    kept = []
    for number in range(300):
        reply = transport.create("flower-gpu-reply")
        transport.write_reply(np.full(600, float(number)), reply)
        kept.append(transport.read_reply(reply))
        os.close(reply)
    assert descriptors() == before
    assert maps_of("reply") == 300
    assert all((array == number).all() for number, array in enumerate(kept))


@needs_seals
def test_a_reply_can_be_read_without_a_map(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise OSError("too many maps")

    def reply_only(array: np.ndarray) -> np.ndarray:
        return array + 1

    transport.write_request((None, (), {}), call.request)
    transport.write_reply(reply_only(np.zeros(300_000)), call.reply)
    monkeypatch.setattr(memory_files, "Map", fails)
    assert (transport.read_reply(call.reply, call.request) == 1).all()
