"""After a failure in a rank, the error names the rank, no process is left, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_processes import is_running
from waiting import until

from flower_gpu import RankError, run_in_worker
from flower_gpu.errors import WorkerTimeoutError


def pids_in(folder: Path) -> list[int]:
    written = [int(path.read_text()) for path in (*folder.glob("rank-*"), *folder.glob("grandchild"))]
    return [*written, *(int(path.name.partition("-")[2]) for path in folder.glob("pid-*"))]


def memory_files() -> list[str]:
    """Return the memory files through which the ranks of this process find each other."""
    names = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = str(path.readlink())
        except OSError:
            continue
        names += [target] if "flower-gpu-temporary-ranks" in target else []
    return names


@pytest.fixture
def assert_cleaned_up(tmp_path: Path) -> Callable[[int], None]:
    """Check that at least ``count`` processes had started and all ended, and that the next call works."""

    def check(count: int) -> None:
        pids = pids_in(tmp_path)
        assert len(pids) >= count
        until(lambda: not any(map(is_running, pids)), "ranks are gone")
        assert memory_files() == []
        assert run_in_worker("ranks_tasks:rank_info", num_gpus=2)["total"] == 3

    return check


@pytest.mark.parametrize(
    ("failure", "text", "failing", "start_method"),
    [
        ("exception", "ValueError: the number is odd", 1, "forkserver"),
        ("SIGKILL", "was killed by SIGKILL", 1, "forkserver"),
        ("exit", "exited with code 7", 1, "forkserver"),
        # The fork server also forks the ranks of a forked worker.
        ("SIGKILL", "was killed by SIGKILL", 0, "fork"),
    ],
)
def test_the_error_names_a_rank_that_failed(
    failure: str,
    text: str,
    failing: int,
    start_method: str,
    tmp_path: Path,
    assert_cleaned_up: Callable[[int], None],
) -> None:
    call: dict[str, Any] = {"num_gpus": 2, "start_method": start_method, "timeout_s": 100}
    with pytest.raises(RankError) as caught:
        run_in_worker("ranks_tasks:fail", str(tmp_path), failure, failing, **call)
    assert f"rank {failing} of 2" in str(caught.value)
    assert text in str(caught.value)
    assert caught.value.rank == failing
    assert_cleaned_up(3)


def test_the_error_names_a_rank_that_hangs(tmp_path: Path, assert_cleaned_up: Callable[[int], None]) -> None:
    """The error also names the line at which the rank hangs."""
    with pytest.raises(RankError) as caught:
        run_in_worker("ranks_tasks:hang", str(tmp_path), 1, num_gpus=2)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 (at ")
    assert "in sleep_for_ever" in text
    assert "did not answer: rank 0 of 2 waited for it in vain" in text
    assert caught.value.rank == 1
    assert_cleaned_up(2)


def test_the_error_for_a_call_that_timed_out_names_all_ranks(
    tmp_path: Path, assert_cleaned_up: Callable[[int], None]
) -> None:
    """It also names the line of each rank."""
    with pytest.raises(WorkerTimeoutError) as caught:
        run_in_worker("ranks_tasks:hang_all", str(tmp_path), num_gpus=2, timeout_s=45)
    text = str(caught.value)
    assert "rank 0 of 2 was at" in text
    assert "rank 1 of 2 was at" in text
    assert "in sleep_for_ever" in text
    assert_cleaned_up(2)


def test_a_rank_that_ends_before_the_ranks_are_connected_is_reported(
    tmp_path: Path, assert_cleaned_up: Callable[[int], None]
) -> None:
    env = {"RANKS_TEST_FOLDER": str(tmp_path)}
    with pytest.raises(RankError, match="exited with code 9"):
        run_in_worker("ranks_exits_at_import:task", num_gpus=2, env=env)
    assert_cleaned_up(2)  # the other rank may be ended before it has imported the module
