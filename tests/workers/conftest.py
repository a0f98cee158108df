"""Fixtures for start methods, fork servers and callers, and the check that a call left nothing behind."""

from __future__ import annotations

import os
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import forkservers
import pytest
from processes import (
    SHARED_MEMORY,
    SUPERVISED,
    Run,
    descriptors,
    new_in_shared_memory,
    running_in_groups,
    wait_until,
    zombies_of,
)
from worker_lines import Caller

from flower_gpu import run_in_worker
from flower_gpu.frameworks.cuda_answers import initialized_cuda_devices
from flower_gpu.workers import state_folder
from flower_gpu.workers.forkserver import client


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Give the module its own fork servers, without torch, and yield their folder."""
    with forkservers.own_servers(light=True) as path:
        yield path


@pytest.fixture
def caller() -> Iterator[Caller]:
    """A caller that runs calls on lines of workers. After the test, no worker may be left."""
    new_caller = Caller()
    yield new_caller
    new_caller.close()


@pytest.fixture(params=SUPERVISED)
def start_method(request: pytest.FixtureRequest) -> str:
    if request.param == "fork" and initialized_cuda_devices() is not None:
        pytest.skip("an earlier test has initialised CUDA in this process")
    return str(request.param)


@pytest.fixture
def run_with_methods(run_script: Callable[..., Any]) -> Callable[..., Any]:
    """Run a script that makes calls with all METHODS. It can import the tasks of this folder."""
    start = (
        "import multiprocessing, os, signal, subprocess, sys, threading, time\n"
        "from flower_gpu import WorkerDiedError, WorkerError, WorkerStartError, run_in_worker\n"
        f"METHODS = {SUPERVISED}\n"
    )

    def run(text: str, *, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        env = {**forkservers.WITH_TASKS, **(env or {})}
        return run_script(start + textwrap.dedent(text), env=env, **options)

    return run


@pytest.fixture(scope="session")
def first_call() -> None:
    """Make one call per method, so that everything opened or imported only once is present."""
    for method in ("spawn", "forkserver"):
        run_in_worker("plain_tasks:answer", start_method=method)


@pytest.fixture
def run(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    first_call: None,
) -> Iterator[Run]:
    """Trace the calls of a test, and check afterwards that they left nothing behind."""
    folder, temporary = tmp_path / "run", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(folder))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # PyTorch's compiler creates this folder when it is imported, in any thread, and keeps it. All tests
    # share one folder: another folder is another environment, which needs its own fork server of 300 MB.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "torchinductor"))
    # Forks share the resource tracker of this process, which an earlier test may have started. What they
    # leak would then stay until this process ends.
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    before = descriptors()
    shared = set(SHARED_MEMORY.iterdir())
    traced = Run(folder, temporary)

    yield traced

    assert zombies_of(os.getpid()) == []
    # This process may have run a call itself, and may lead a group.
    for pid in {*traced.pids()} - {os.getpid()}:
        assert wait_until(lambda pid=pid: not running_in_groups(pid)), (
            f"group {pid}: {running_in_groups(pid)}"
        )
    folders = set((state_folder.state_dir() / "sockets").iterdir())
    assert not [path for path in folders for pid in traced.pids() if path.name.endswith(f"-{pid}")]
    kept = {str(connection.fileno()) for connection in client._memory.stays.connections.values()}
    assert {name: target for name, target in descriptors().items() if name not in before.keys() | kept} == {}
    assert wait_until(lambda: not new_in_shared_memory(shared)), new_in_shared_memory(shared)
    assert list(temporary.iterdir()) == []


@pytest.fixture
def after_reaching(tmp_path: Path) -> Callable[..., BaseException]:
    """Call a task that hangs, and return the error of the first call whose task started in time.

    A short limit keeps the test short. On a busy machine the call is repeated with a longer limit.
    """

    def call(
        task: Any,
        *args: Any,
        expected: type[BaseException],
        says: Sequence[str] = (),
        limits_s: tuple[float, ...] = (0.4, 3, 20),
        **options: Any,
    ) -> BaseException:
        for number, timeout_s in enumerate(limits_s):
            reached = tmp_path / f"reached{number}"
            with pytest.raises(expected) as caught:
                run_in_worker(task, str(reached), *args, timeout_s=timeout_s, **options)
            missing = [part for part in says if part not in str(caught.value)]
            # The task may start between the limit and the end of the worker.
            if reached.exists() and not missing:
                return caught.value
        raise AssertionError(f"{task} not reached in {limits_s} s, or {missing} not in: {caught.value}")

    return call
