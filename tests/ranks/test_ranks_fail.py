"""What goes wrong in a rank, for each start method: it is named, nothing is left, the next call works."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flower_gpu import RankError, run_in_worker
from flower_gpu.errors import WorkerTimeoutError

pytestmark = pytest.mark.timeout(120)

WAIT_S = 30


@pytest.fixture(params=["forkserver", "spawn", "fork"])
def start_method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


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
        found += [target] if "flower-gpu-ranks" in target else []
    return found


@pytest.fixture
def nothing_left(tmp_path: Path, start_method: str) -> Callable[[int], None]:
    """Check that so many processes were there, at least, and are gone, and that the next call works."""

    def check(count: int) -> None:
        pids = pids_in(tmp_path)
        assert len(pids) >= count
        deadline = time.monotonic() + WAIT_S
        while running := [pid for pid in pids if is_running(pid)]:
            assert time.monotonic() < deadline, running
            time.sleep(0.02)
        assert memory_files() == []
        if start_method == "spawn":  # imports PyTorch three times, and has nothing that could be left
            return
        assert run_in_worker("ranks_tasks:who", num_gpus=2, start_method=start_method)["total"] == 3

    return check


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exception", ["ValueError: the number is odd"]),
        ("SIGKILL", ["was killed by SIGKILL"]),
        ("exit", ["exited with code 7"]),
    ],
)
def test_a_rank_fails(
    how: str,
    says: list[str],
    failing: int,
    start_method: str,
    tmp_path: Path,
    nothing_left: Callable[[int], None],
) -> None:
    if failing == 0 and start_method == "spawn":
        pytest.skip("ranks are all alike, and these are slow")
    with pytest.raises(RankError) as caught:
        run_in_worker(
            "ranks_tasks:fail",
            str(tmp_path),
            how,
            failing,
            num_gpus=2,
            start_method=start_method,
            timeout_s=100,
        )
    text = str(caught.value)
    assert [part for part in (f"rank {failing} of 2", *says) if part not in text] == []
    assert caught.value.rank == failing
    nothing_left(3)


def test_a_rank_hangs(start_method: str, tmp_path: Path, nothing_left: Callable[[int], None]) -> None:
    """The one that the others wait for is named, with where it is."""
    with pytest.raises(RankError) as caught:
        run_in_worker("ranks_tasks:hang", str(tmp_path), 1, num_gpus=2, start_method=start_method)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 (at ")
    assert "in sleep_for_ever" in text
    assert "did not answer: rank 0 of 2 waited for it in vain" in text
    assert caught.value.rank == 1
    nothing_left(2)


def test_the_call_takes_too_long(
    start_method: str, tmp_path: Path, nothing_left: Callable[[int], None]
) -> None:
    """All ranks are named, with where they were."""
    if start_method == "spawn":
        pytest.skip("how long the imports take is not known")
    with pytest.raises(WorkerTimeoutError) as caught:
        run_in_worker(
            "ranks_tasks:hang_all", str(tmp_path), num_gpus=2, start_method=start_method, timeout_s=15
        )
    text = str(caught.value)
    assert "rank 0 of 2 was at" in text
    assert "rank 1 of 2 was at" in text
    assert "in sleep_for_ever" in text
    nothing_left(2)


def test_a_rank_ends_before_they_meet(
    start_method: str, tmp_path: Path, nothing_left: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"RANKS_TEST_FOLDER": str(tmp_path)}
    with pytest.raises(RankError, match="exited with code 9"):
        run_in_worker("ranks_exits_at_import:task", num_gpus=2, start_method=start_method, env=env)
    nothing_left(2)  # the other rank may be ended before it has imported anything
