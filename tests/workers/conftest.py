"""Start methods, and the check that a call left nothing behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
    running_in_group,
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
    """Have fork servers of the module's own, without torch; yield their folder."""
    with forkservers.own_servers(light=True) as found:
        yield found


@pytest.fixture
def caller() -> Iterator[Caller]:
    """One who has calls run on lines of workers; after the test nothing of them is left."""
    made = Caller()
    yield made
    made.close()


@pytest.fixture(params=SUPERVISED)
def start_method(request: pytest.FixtureRequest) -> str:
    if request.param == "fork" and initialized_cuda_devices() is not None:
        pytest.skip("an earlier test has initialised CUDA in this process")
    return str(request.param)


@pytest.fixture(scope="session")
def first_call() -> None:
    """What is opened or imported once for all calls is there after this."""
    for method in ("spawn", "forkserver"):
        run_in_worker("plain_tasks:answer", start_method=method)


@pytest.fixture
def run(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    first_call: None,
) -> Iterator[Run]:
    """Trace the calls of a test, and check after it that nothing of them is left."""
    folder, temporary = tmp_path / "run", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(folder))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # PyTorch's compiler makes its folder as soon as it is imported, in any thread, and keeps the folder.
    # All tests share one: another folder is another environment, with a fork server of 300 MB of its own.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "torchinductor"))
    # Forks share that of this process, which an earlier test may have left: what they leak would be there
    # until this process ends.
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    before = descriptors()
    shared = set(SHARED_MEMORY.iterdir())
    this = Run(folder, temporary)

    yield this

    assert zombies_of(os.getpid()) == []
    for pid in {*this.pids()} - {os.getpid()}:  # a call in this process; it may lead a group
        assert wait_until(lambda pid=pid: not running_in_group(pid)), f"group {pid}: {running_in_group(pid)}"
    folders = set((state_folder.state_dir() / "sockets").iterdir())
    assert not [path for path in folders for pid in this.pids() if path.name.endswith(f"-{pid}")]
    kept = {str(connection.fileno()) for connection in client._memory.stays.connections.values()}
    assert {name: what for name, what in descriptors().items() if name not in before.keys() | kept} == {}
    assert wait_until(lambda: not new_in_shared_memory(shared)), new_in_shared_memory(shared)
    assert list(temporary.iterdir()) == []


@pytest.fixture
def after_reaching(tmp_path: Path) -> Callable[..., BaseException]:
    """Call a task that hangs, and return the error of a call whose task was reached in time.

    A short limit keeps the test short; a machine that is too busy to get there gets a longer one.
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
            if reached.exists() and not missing:  # it may get there between the limit and its end
                return caught.value
        raise AssertionError(f"{task} not reached in {limits_s} s, or {missing} not in: {caught.value}")

    return call
