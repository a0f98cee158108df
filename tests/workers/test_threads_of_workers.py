"""How many threads the libraries of a worker use.

By default, the workers of a host share its cores. A number that the user sets takes precedence. The start
method of the worker must make no difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forkservers import WITH_TASKS
from hypothesis import given
from hypothesis import strategies as st
from processes import Run
from run_programs import run_python

from flower_gpu import run_in_worker
from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import ConfigError
from flower_gpu.frameworks.cuda_answers import initialized_cuda_devices
from flower_gpu.workers.threads import cores, openmp_threads, planned_threads

pytestmark = pytest.mark.timeout(180)

VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "FLOWER_GPU_CONCURRENCY",
)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torch_of_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Import torch into this process and have it use one thread for each core, as it does by default.

    Forked workers inherit the loaded torch with its number of threads.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torchinductor"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch = pytest.importorskip("torch")
    previous = torch.get_num_threads()
    torch.set_num_threads(cores())
    yield torch
    torch.set_num_threads(previous)


@pytest.fixture
def worker_start(start_method: str, torch_of_the_caller: Any) -> str:
    return start_method


# Tests of the planned number of threads.


@given(st.integers(1, 10**9))
def test_workers_share_the_cores(concurrency: int) -> None:
    threads = planned_threads({"FLOWER_GPU_CONCURRENCY": str(concurrency)})
    assert threads == max(1, cores() // concurrency)
    assert threads == 1 or threads * concurrency <= cores()


@given(
    st.integers(1, 2**31 - 1), st.lists(st.integers(1, 99)), st.integers(1, 99), st.sampled_from(["", " "])
)
def test_a_number_of_the_user_takes_precedence(
    first: int, nested: list[int], concurrency: int, space: str
) -> None:
    # OMP_NUM_THREADS may list one number for each level of nested parallelism. The first one counts.
    text = space + f"{space},{space}".join(map(str, [first, *nested])) + space
    environ = {"OMP_NUM_THREADS": text, "FLOWER_GPU_CONCURRENCY": str(concurrency)}
    assert planned_threads(environ) == first


@given(st.text() | st.text("0123456789,+- \tx"), st.integers(1, 99))
def test_invalid_numbers_are_ignored(text: str, concurrency: int) -> None:
    concurrent = {"FLOWER_GPU_CONCURRENCY": str(concurrency)}
    threads = planned_threads({"OMP_NUM_THREADS": text, **concurrent})
    assert threads == (openmp_threads({"OMP_NUM_THREADS": text}) or planned_threads(concurrent))
    assert 1 <= threads < 2**31


@pytest.mark.parametrize("text", ["0", "٣"])
def test_an_invalid_concurrency_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_CONCURRENCY", text)
    with pytest.raises(ConfigError) as caught:
        run_in_worker("plain_tasks:answer")
    assert f"FLOWER_GPU_CONCURRENCY must be a whole number, 1 or more, not {text!r}" in str(caught.value)


def test_a_setting_of_the_call_takes_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert call_settings({}).worker.threads == 5
    assert call_settings({"env": {"OMP_NUM_THREADS": "7,2"}}).worker.threads == 7
    # An empty value counts as not set.
    assert call_settings({"env": {"OMP_NUM_THREADS": ""}}).worker.threads == cores()
    assert call_settings({"env": {"FLOWER_GPU_CONCURRENCY": "2"}}).worker.threads == 5


TEXTS = ["1", " 3 ", "+3", "03", "4,2", "4 , 2", "4,", ",4", "4,x", "4,0", "0", "-3", "3x", "x", "", "3.0"]


def test_numbers_are_read_as_openmp_reads_them() -> None:
    """Compare with torch's OpenMP runtime, which reads the variable once in each process."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    libraries = sorted(Path(spec.origin).parent.glob("lib/libgomp*"))
    if not libraries:
        pytest.skip("this torch has another OpenMP runtime")
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).omp_get_max_threads())"
    command = [sys.executable, "-I", "-S", "-c", code, str(libraries[0])]

    def read_by_openmp(text: str | None) -> int:
        env = {**os.environ, **({} if text is None else {"OMP_NUM_THREADS": text})}
        return int(subprocess.run(command, env=env, capture_output=True, check=True, timeout=150).stdout)

    default = read_by_openmp(None)
    for text in TEXTS:
        number = openmp_threads({"OMP_NUM_THREADS": text})
        assert read_by_openmp(text) == (number or default), text


# Tests of the threads that workers use.


def test_every_library_uses_the_planned_number(worker_start: str, run: Run) -> None:
    counts = run_in_worker("tasks_threads:count_threads", start_method=worker_start)
    assert len(counts) >= 4, counts  # torch, its OpenMP runtime, and the BLAS of numpy and of scipy
    assert set(counts.values()) == {cores()}
    for event in ("worker_started", "worker_finished"):
        assert [line["threads"] for line in run.events(event)] == [cores()]


# Result of the task variable_and_torch if the worker uses all cores.
ALL_CORES = (str(cores()), cores())


@pytest.mark.parametrize(
    ("caller_variables", "call_variables", "expected"),
    [
        ({"FLOWER_GPU_CONCURRENCY": "1000000"}, {}, ("1", 1)),
        ({"OMP_NUM_THREADS": "2", "FLOWER_GPU_CONCURRENCY": "7"}, {"OMP_NUM_THREADS": "1,3"}, ("1,3", 1)),
        ({"OMP_NUM_THREADS": ""}, {}, ALL_CORES),
    ],
)
def test_a_users_setting_takes_precedence_over_the_share_of_cores(
    caller_variables: dict[str, str],
    call_variables: dict[str, str],
    expected: tuple[str, int],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in caller_variables.items():
        monkeypatch.setenv(name, value)
    call = {"start_method": "forkserver", "env": call_variables}
    assert run_in_worker("tasks_threads:variable_and_torch", **call) == expected
    for event in ("worker_started", "worker_finished"):
        assert [line["threads"] for line in run.events(event)] == [expected[1]]
    assert caller_variables.items() <= os.environ.items()
    assert run_in_worker("tasks_threads:set_in_torch", 3, **call) == 3


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_task_module_may_set_its_own_number(start_method: str, torch_of_the_caller: Any, run: Run) -> None:
    assert run_in_worker("sets_threads:threads_of_torch", start_method=start_method) == ("1", 1)


def test_a_number_that_the_caller_set_in_torch_is_kept(torch_of_the_caller: Any, run: Run) -> None:
    """A client app that calls torch.set_num_threads intends this number for its training."""
    torch_of_the_caller.set_num_threads(cores() + 1)
    task = "tasks_threads:variable_and_torch"
    for method in ("fork", "in-process"):
        if method != "fork" or initialized_cuda_devices() is None:
            result = run_in_worker(task, start_method=method)
            assert result == (str(cores() + 1), cores() + 1), method
    # In a new process, torch itself uses at most one thread for each core. So compare only the variable.
    assert run_in_worker(task, start_method="forkserver")[0] == str(cores() + 1)
    assert run_in_worker(task, start_method="forkserver", num_cpus=1) == ("1", 1)
    assert run_in_worker(task, start_method="fork", env={"OMP_NUM_THREADS": "1"}) == ("1", 1)
    threads = [line["threads"] for line in run.events("worker_started")]
    assert threads[-5:] == [cores() + 1] * 3 + [1] * 2


def test_the_number_of_the_caller_is_restored(torch_of_the_caller: Any) -> None:
    import tasks_threads

    torch_of_the_caller.set_num_threads(cores() + 1)
    before = tasks_threads.count_threads()
    for method in ("in-process", "fork"):
        call = {"start_method": method, "env": {"OMP_NUM_THREADS": "1"}}
        assert set(run_in_worker("tasks_threads:count_threads", **call).values()) == {1}
        assert tasks_threads.count_threads() == before
        assert run_in_worker("tasks_threads:set_in_torch", 3, start_method=method) == 3
        assert tasks_threads.count_threads() == before
    tasks_threads.compute()


# Test of a fork that uses other numbers of threads than its parent, as in a fork server.

ENVIRONMENTS: list[dict[str, str]] = [
    # On a host with two cores, some libraries use only two of these three threads.
    {"OMP_NUM_THREADS": "3,1"},
    {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "1"},
]

# Program that uses one thread in each library, then forks once for each of the ENVIRONMENTS. It prints the
# number of threads in each fork, and the numbers of threads that the fork's libraries would use.
FORKS = """
import json, os, sys
cpus = os.sched_getaffinity(0)
if sys.argv[2] == "on one cpu":
    os.sched_setaffinity(0, {min(cpus)})
import tasks_threads, torch
from flower_gpu.workers import threads

torch.set_num_threads(1)
assert set(tasks_threads.count_threads().values()) == {1}
if sys.argv[2] == "after computing":
    tasks_threads.compute()
for variables in json.loads(sys.argv[1]):
    environ = {name: value for name, value in os.environ.items() if "_NUM_THREADS" not in name} | variables
    read, write = os.pipe()
    threads.prepare(environ)
    if os.fork() == 0:
        os.environ.clear()
        os.environ.update(environ)
        os.sched_setaffinity(0, cpus)
        threads.apply()
        counts = [len(os.listdir("/proc/self/task")), tasks_threads.count_threads()]
        tasks_threads.compute()
        os.write(write, json.dumps(counts).encode())
        os._exit(0)
    os.close(write)
    _, status = os.wait()
    assert status == 0, status
    print(os.read(read, 65536).decode(), flush=True)
    os.close(read)
"""


@pytest.fixture(scope="module")
def expected_counts() -> list[dict[str, int]]:
    """Numbers of threads of the libraries in a new process, for each of the ENVIRONMENTS."""
    code = "import json, tasks_threads; print(json.dumps(tasks_threads.count_threads()))"
    base = {name: value for name, value in os.environ.items() if name not in VARIABLES} | WITH_TASKS
    return [json.loads(run_python(code, env=base | env, check=True).stdout) for env in ENVIRONMENTS]


@pytest.mark.skipif(
    sys.platform != "linux", reason="on other systems, workers start without loaded libraries"
)
@pytest.mark.parametrize("parent", ["after computing", "on one cpu"])
def test_a_fork_uses_the_numbers_of_a_new_process(
    parent: str, expected_counts: list[dict[str, int]], run_script: Callable[..., Any]
) -> None:
    """The libraries of a fork server use one thread each. In its forks, they use several and do not hang."""
    done = run_script(
        FORKS,
        json.dumps(ENVIRONMENTS),
        parent,
        timeout_s=120,
        env={**WITH_TASKS, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [counts for _, counts in results] == expected_counts
    if parent != "on one cpu":
        # A fork starts no threads before it computes, because idle threads of OpenBLAS wait in a busy loop.
        assert {running for running, _ in results} == {1}


# Training ---------------------------------------------------------------------------------------------------


def test_weights_are_the_same_bit_for_bit(worker_start: str, run: Run) -> None:
    """This includes DataLoader workers, because order and seeds come from the training process."""
    import tasks_torch

    start = tasks_torch.initial_weights(seed=3)
    task = "tasks_torch:train_with_and_without_loader_workers"
    isolated = run_in_worker(task, start, seed=5, start_method=worker_start)
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


def test_a_process_can_fork_workers_after_openmp_regions(torch_of_the_caller: Any) -> None:
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
