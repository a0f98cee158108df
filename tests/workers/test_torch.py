"""Training in a worker: the same weights as in process, with DataLoader and OpenMP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from processes import Run

from flower_gpu import run_in_worker
from flower_gpu.frameworks.cuda_answers import initialized_cuda_devices


@pytest.fixture(autouse=True)
def torch_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import torch here, so that forked workers inherit it. Its compiler gets a temporary cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torchinductor"))
    # If backward() initialised CUDA, a fork would be refused.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)  # A call in this process may have changed it.


def test_weights_are_the_same_bit_for_bit(start_method: str, run: Run) -> None:
    """This includes DataLoader workers, because order and seeds come from the training process."""
    import tasks_torch

    start = tasks_torch.initial_weights(seed=3)
    task = "tasks_torch:train_with_and_without_loader_workers"
    isolated = run_in_worker(task, start, seed=5, start_method=start_method)
    call = {"start_method": "in-process"}
    expected, examples, metrics = run_in_worker("tasks_torch:train", start, {"seed": 5}, **call)
    for result in isolated:
        assert result[1:] == (examples, metrics)
        for array, expected_array in zip(result[0], expected, strict=True):
            assert array.dtype == expected_array.dtype
            assert np.array_equal(array, expected_array)
            assert array.tobytes() == expected_array.tobytes()
    # The equality is not trivial: training changes every array, and the seed matters.
    assert not any(np.array_equal(old, new) for old, new in zip(start, expected, strict=True))
    other_seed, _, _ = run_in_worker("tasks_torch:train", start, {"seed": 6}, **call)
    assert not np.array_equal(expected[0], other_seed[0])


def test_a_process_can_fork_workers_after_openmp_regions() -> None:
    """A fork of a process with idle OpenMP threads would wait for these threads for ever."""
    if initialized_cuda_devices() is not None:
        pytest.skip("an earlier test has initialised CUDA in this process")
    import tasks_torch

    def compute_in_process_and_in_a_fork() -> None:
        for _ in range(2):
            expected = tasks_torch.matmul(600)
            assert run_in_worker(tasks_torch.matmul, 600, start_method="fork", timeout_s=60) == expected

    compute_in_process_and_in_a_fork()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(compute_in_process_and_in_a_fork).result()
    tasks_torch.matmul(600)


def test_each_worker_draws_other_random_numbers(run: Run) -> None:
    """The fork server has already loaded torch, which has its own random numbers."""
    draws = [run_in_worker("tasks_forkserver:random_numbers", start_method="forkserver") for _ in range(3)]
    for column in zip(*draws, strict=True):
        assert len(set(column)) == 3
