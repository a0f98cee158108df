"""The rule that derives a footprint from the memory use of calls. The allocator is simulated by numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples

from flower_gpu.leases.footprint import REMEMBERED, Peaks
from flower_gpu.leases.footprint_rule import (
    LEAST_SPARE,
    MOST_SPARE,
    Measured,
    footprint_bytes,
    is_context,
    needed_bytes,
    spare_after,
)

GIB, MIB = 1 << 30, 1 << 20
WHOLE = 192 * GIB
NOTHING = Peaks((), 0, 0.0)

amounts = st.integers(1, 40 * GIB)


def torch_call(allocated: int, reserved: int, cap: int, retries: int = 0, *, first: bool = True) -> Measured:
    """Return the measurement of a call that uses half a GiB outside of the allocator."""
    return Measured(reserved + GIB // 2, GIB // 2, reserved, allocated, cap, retries, first)


calls = st.builds(
    lambda allocated, kept, room, retries, first: torch_call(
        allocated, allocated + kept, allocated + kept + room, retries, first=first
    ),
    *(amounts, amounts, amounts, st.integers(0, 30), st.booleans()),
)
spares = st.floats(LEAST_SPARE, MOST_SPARE)


@given(calls, spares)
def test_a_footprint_is_at_least_the_tensors_and_at_most_the_cap(call: Measured, spare: float) -> None:
    assert call.allocated_bytes is not None and call.reserved_bytes is not None
    footprint = footprint_bytes(call, spare)
    assert call.outside_bytes + call.allocated_bytes <= footprint <= call.outside_bytes + call.cap_bytes
    if not call.is_near_cap:
        assert footprint <= call.outside_bytes + call.reserved_bytes


@given(calls, spares)
def test_a_call_near_its_cap_raises_the_footprint_and_the_spare_never_shrinks(
    call: Measured, spare: float
) -> None:
    assert spare <= spare_after(call, spare) <= MOST_SPARE
    if call.is_near_cap:
        assert needed_bytes(footprint_bytes(call, spare)) >= 1.09 * (call.outside_bytes + call.cap_bytes)
    else:
        assert spare_after(call, spare) == spare


@given(amounts, st.integers(0, 40 * GIB))
def test_without_a_report_of_the_allocator_the_footprint_is_the_peak(peak: int, outside: int) -> None:
    assert footprint_bytes(Measured(peak)) == footprint_bytes(Measured(peak, outside)) == peak


# 85 % of the memory that the allocator had, plus half a GiB outside of it. These amounts include the margin.
STEP_OF_10_GIB, STEP_OF_4_GIB = (GIB // 2 + 17 * size // 20 for size in (10 * GIB, 4 * GIB))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # For tensors of 2 GiB the spare is an eighth and two blocks, or less if the allocator had less.
        (torch_call(2 * GIB, 5 * GIB // 2, 15 * GIB), GIB // 2 + 2 * GIB + GIB // 4 + 40 * MIB),
        (torch_call(2 * GIB, 2 * GIB + 50 * MIB, 15 * GIB), GIB // 2 + 2 * GIB + 50 * MIB),
        # The first call of a task had a whole GPU and its cache grew large. The footprint shrinks in steps.
        (torch_call(2 * GIB, 10 * GIB, 15 * GIB), STEP_OF_10_GIB),
        # The cache belongs to an earlier call of the same worker.
        (torch_call(2 * GIB, 10 * GIB, 15 * GIB, first=False), GIB // 2 + 2 * GIB + GIB // 4 + 40 * MIB),
        # A full cache is no sign of a shortage. Many retries are, and so are tensors that fill nearly all of
        # it.
        (torch_call(2 * GIB, 4 * GIB, 4 * GIB, 10), STEP_OF_4_GIB),
        (torch_call(2 * GIB, 4 * GIB, 4 * GIB, 11), GIB // 2 + 4 * GIB),
        (torch_call(39 * GIB // 10, 4 * GIB, 4 * GIB), GIB // 2 + 4 * GIB),
    ],
)
def test_the_footprint_of_a_call(call: Measured, expected: int) -> None:
    footprint = footprint_bytes(call)
    if expected in (STEP_OF_10_GIB, STEP_OF_4_GIB):
        footprint = needed_bytes(footprint)
    assert abs(footprint - expected) <= 1


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, False), (63 * MIB, False), (64 * MIB, True), (500 * MIB, True), (2 * GIB, True), (10 * GIB, False)],
)
def test_a_plausible_context_size(size: int, expected: bool) -> None:
    assert is_context(size) == expected


# Sequences of calls -----------------------------------------------------------------------------------------


@dataclass
class Task:
    """Calls of one task on a GPU that is large enough for it.

    ``tensors``: size of the task's tensors in bytes.
    ``kept``: memory that the allocator reserves if it has room, as a multiple of ``tensors``.
    ``pieces``: least memory that the allocator can work with, as a multiple of ``tensors``. With less than
    1.1 times that memory, the allocator has to empty its cache in each step.
    """

    tensors: int
    kept: float
    pieces: float
    outside: int
    peaks: Peaks = NOTHING
    ran_out: int = 0
    slow: int = 0

    def request_bytes(self) -> int:
        return min(WHOLE, needed_bytes(self.peaks.peak_bytes)) if self.peaks.recent_bytes else WHOLE

    def call(self) -> None:
        lease = self.request_bytes()
        while not self._fits(lease - self.outside):
            self.ran_out += 1
            needed = int(self.tensors * self.pieces)
            self.peaks = self.peaks.after_out_of_memory(needed + self.outside, (needed, self.tensors))
            lease = min(WHOLE, 2 * lease)
        cap = lease - self.outside
        minimum, maximum = self.tensors * self.pieces, int(self.tensors * self.kept)
        retries = 0 if cap >= maximum else 100 if cap < 1.1 * minimum else 3
        self.slow += retries > 10
        reserved = min(cap, maximum)
        peak = reserved + self.outside
        self.peaks = self.peaks.after(Measured(peak, self.outside, reserved, self.tensors, cap, retries))

    def _fits(self, cap: int) -> bool:
        return cap >= int(self.tensors * self.pieces)


tasks = st.builds(
    lambda tensors, pieces, kept, outside: Task(tensors, pieces + kept, pieces, outside),
    st.integers(16 * MIB, 12 * GIB),
    st.floats(1.02, 3.0),
    st.floats(0.0, 2.5),
    st.integers(200 * MIB, 4 * GIB),
)


# Each example makes 600 calls.
@settings(max_examples=examples(30))
@given(tasks)
def test_footprints_converge_to_the_need_and_stay_there(task: Task) -> None:
    for _ in range(16 * REMEMBERED):
        task.call()
    settled, ran_out, slow = task.request_bytes(), task.ran_out, task.slow
    for _ in range(3 * REMEMBERED):
        task.call()
        assert task.request_bytes() == settled
    assert (task.ran_out, task.slow) == (ran_out, slow)
    # Only a task with unusually fragmented memory runs out of memory.
    assert ran_out <= 2
    need = task.tensors * max(LEAST_SPARE, task.pieces) + task.outside
    assert settled <= 1.35 * need + 256 * MIB


@settings(max_examples=examples(30))
@given(tasks.filter(lambda task: task.pieces <= 1.2))
def test_an_ordinary_task_never_runs_out_of_memory(task: Task) -> None:
    for _ in range(16 * REMEMBERED):
        task.call()
    assert task.ran_out == 0


@settings(max_examples=examples(30))
@given(tasks, st.floats(0.2, 3.0))
def test_footprints_follow_a_task_that_changes(task: Task, factor: float) -> None:
    for _ in range(8 * REMEMBERED):
        task.call()
    task.tensors, ran_out = int(task.tensors * factor), task.ran_out
    for _ in range(17 * REMEMBERED):
        task.call()
    assert task.ran_out <= ran_out + 3
    share = max(task.peaks.spare, task.pieces)
    assert task.request_bytes() <= 1.35 * (task.tensors * share + task.outside) + 256 * MIB
