"""What goes wrong in a rank: it is named, nothing is left, the next call works."""

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
    named = [int(path.read_text()) for path in (*folder.glob("rank-*"), *folder.glob("grandchild"))]
    return [*named, *(int(path.name.partition("-")[2]) for path in folder.glob("pid-*"))]


def memory_files() -> list[str]:
    """Return the memory files in which ranks of this process would meet."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = str(path.readlink())
        except OSError:
            continue
        found += [target] if "flower-gpu-temporary-ranks" in target else []
    return found


@pytest.fixture
def nothing_left(tmp_path: Path) -> Callable[[int], None]:
    """Check that so many processes were there, at least, and are gone, and that the next call works."""

    def check(count: int) -> None:
        pids = pids_in(tmp_path)
        assert len(pids) >= count
        until(lambda: not any(map(is_running, pids)), "ranks are gone")
        assert memory_files() == []
        assert run_in_worker("ranks_tasks:who", num_gpus=2)["total"] == 3

    return check


@pytest.mark.parametrize(
    ("how", "says", "failing", "start_method"),
    [
        ("exception", "ValueError: the number is odd", 1, "forkserver"),
        ("SIGKILL", "was killed by SIGKILL", 1, "forkserver"),
        ("exit", "exited with code 7", 1, "forkserver"),
        # The ranks of a worker that was forked are forked by the fork server, as in the rows above.
        ("SIGKILL", "was killed by SIGKILL", 0, "fork"),
    ],
)
def test_a_rank_fails(
    how: str,
    says: str,
    failing: int,
    start_method: str,
    tmp_path: Path,
    nothing_left: Callable[[int], None],
) -> None:
    call: dict[str, Any] = {"num_gpus": 2, "start_method": start_method, "timeout_s": 100}
    with pytest.raises(RankError) as caught:
        run_in_worker("ranks_tasks:fail", str(tmp_path), how, failing, **call)
    assert f"rank {failing} of 2" in str(caught.value)
    assert says in str(caught.value)
    assert caught.value.rank == failing
    nothing_left(3)


def test_a_rank_hangs(tmp_path: Path, nothing_left: Callable[[int], None]) -> None:
    """The one that the others wait for is named, with where it is."""
    with pytest.raises(RankError) as caught:
        run_in_worker("ranks_tasks:hang", str(tmp_path), 1, num_gpus=2)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 (at ")
    assert "in sleep_for_ever" in text
    assert "did not answer: rank 0 of 2 waited for it in vain" in text
    assert caught.value.rank == 1
    nothing_left(2)


def test_the_call_takes_too_long(tmp_path: Path, nothing_left: Callable[[int], None]) -> None:
    """All ranks are named, with where they were."""
    with pytest.raises(WorkerTimeoutError) as caught:
        run_in_worker("ranks_tasks:hang_all", str(tmp_path), num_gpus=2, timeout_s=45)
    text = str(caught.value)
    assert "rank 0 of 2 was at" in text
    assert "rank 1 of 2 was at" in text
    assert "in sleep_for_ever" in text
    nothing_left(2)


def test_a_rank_ends_before_they_meet(tmp_path: Path, nothing_left: Callable[[int], None]) -> None:
    env = {"RANKS_TEST_FOLDER": str(tmp_path)}
    with pytest.raises(RankError, match="exited with code 9"):
        run_in_worker("ranks_exits_at_import:task", num_gpus=2, env=env)
    nothing_left(2)  # the other rank may be ended before it has imported anything
