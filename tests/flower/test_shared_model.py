"""The global model of a round is written to memory once, and all workers map it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import array_tasks
import numpy as np
import pytest
from array_records import arrived_from, record
from flwr.common import Array, ArrayRecord

from flower_gpu import run_in_worker
from flower_gpu.calls.grants import guard
from flower_gpu.workers import memory_files, transport

pytestmark = [
    pytest.mark.skipif(not memory_files.SEALS, reason="needs sealed memory files"),
]


@pytest.fixture(autouse=True)
def _fresh_sharing() -> Iterator[None]:
    memory_files.sharing.__init__()  # type: ignore[misc]
    yield
    memory_files.sharing.__init__()  # type: ignore[misc]


def shared_files() -> int:
    gc.collect()
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:
            continue
    return sum("memfd:flower-gpu-shared" in link for link in links)


def test_a_model_is_written_once_for_all_workers() -> None:
    model = record()

    def send_model() -> tuple[list[str], float]:
        files_and_sum: tuple[list[str], float] = run_in_worker(
            array_tasks.files, ArrayRecord(dict(model)), start_method="forkserver"
        )
        return files_and_sum

    first_files, first_sum = send_model()
    assert first_files == ["flower-gpu-request"]
    # A client that receives each model only once keeps no file.
    assert shared_files() == 0
    later = [send_model() for _ in range(3)]
    assert all("flower-gpu-shared" in files for files, _ in later)
    assert {total for _, total in later} == {first_sum}
    assert shared_files() == 1
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: send_model(), range(4)))
    assert all("flower-gpu-shared" in files for files, _ in together)
    assert shared_files() == 1

    model = record(value=1)  # the next round
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: send_model(), range(4)))
    assert all("flower-gpu-shared" in files for files, _ in together)
    assert {total for _, total in together} == {first_sum + 300_006}
    assert shared_files() == 1


def test_models_that_are_sent_once_are_not_kept() -> None:
    model = record()
    for _ in range(3):
        assert arrived_from(ArrayRecord(dict(model))) == model
    assert shared_files() == 1
    for value in range(1, 4):
        model = ArrayRecord([np.full(300_000, value)])
        assert arrived_from(model) == model
    assert shared_files() == 0


def test_the_state_of_a_client_is_not_shared() -> None:
    model = record()
    for value in range(6):
        state = Array(np.full(200_000, float(value)))
        assert arrived_from([ArrayRecord(dict(model)), state]) == [model, state]
    assert shared_files() == 1
    current = memory_files.sharing._current
    assert current is not None
    assert {id(buffer) for buffer in current.buffers} == {
        id(array.data) for name, array in model.items() if name != "small"
    }


def test_workers_cannot_change_the_shared_model() -> None:
    model = record()
    for _ in range(3):
        arrived = run_in_worker(array_tasks.update, ArrayRecord(dict(model)), start_method="forkserver")
        assert (arrived["0"].numpy() == 1).all()
    assert shared_files() == 1
    kept = run_in_worker(array_tasks.same, ArrayRecord(dict(model)), start_method="forkserver")
    assert kept == model


@pytest.mark.skipif(guard.problem() is not None, reason=str(guard.problem()))
def test_workers_under_the_gpu_guard_share_the_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_GUARDED", "/dev/full")
    model = record()
    for method in ("forkserver", "spawn"):
        files_and_sums = [
            run_in_worker(array_tasks.files, ArrayRecord(dict(model)), start_method=method, gpu="never")
            for _ in range(3)
        ]
        assert "flower-gpu-shared" in files_and_sums[-1][0]
        assert len({value for _, value in files_and_sums}) == 1


def test_a_worker_that_cannot_map_the_model_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = record()
    for _ in range(3):
        arrived_from(ArrayRecord(dict(model)))
    assert shared_files() == 1

    def fails(*args: Any) -> None:
        raise OSError("no memory, or too many maps")

    monkeypatch.setattr(memory_files, "Map", fails)
    assert arrived_from(ArrayRecord(dict(model))) == model


def test_a_failed_call_keeps_no_file_open() -> None:
    model = record()
    for _ in range(3):
        arrived_from(ArrayRecord(dict(model)))
    assert shared_files() == 1
    request = transport.create("test")
    shared = transport.write_request(ArrayRecord(dict(model)), request)
    for descriptor in (request, shared):  # as if the worker had died
        os.close(descriptor)
    del model
    assert arrived_from(1) == 1
    assert shared_files() == 0


def test_a_late_worker_receives_its_own_model_after_the_next_was_written() -> None:
    first = record()
    for _ in range(3):
        arrived_from(ArrayRecord(dict(first)))
    request = transport.create("test")
    try:
        shared = transport.write_request(ArrayRecord(dict(first)), request)
        second = record(value=1)
        for _ in range(3):
            assert arrived_from(ArrayRecord(dict(second))) == second
        assert shared_files() == 2
        assert transport.read_request(request, shared) == first
    finally:
        os.close(request)
        transport._leave_request()
