"""A separate thread calls NVML, so a driver that hangs delays callers only briefly. Idle NVML is closed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from nvml_stub import Host
from waiting import until

from flower_gpu.gpu.query_thread import _Query

Take = Callable[..., Any]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("nvmlInit", "asked to start"),
        ("nvmlDeviceGetCount_v2", "asked for the number of GPUs"),
        ("nvmlDeviceGetMemoryInfo_v2", "asked about GPU 0"),
    ],
)
def test_the_problem_says_what_hangs_and_for_how_long(
    host: Host, take: Take, function: str, text: str
) -> None:
    """When the driver continues, the inventory works again."""

    def seconds(problem: str) -> int:
        return int(re.search(r"has not answered for (\d+) s", problem)[1])  # type: ignore[index]

    take("patience 0.3")
    host.hang(function)
    result = take()
    assert result["usable"] == [] and result["hangs"]
    assert text in result["problem"] and "dmesg" in result["problem"]
    first_seconds = seconds(result["problem"])
    until(lambda: seconds(take()["problem"]) > first_seconds)
    take("patience 30")
    host.go_on()
    until(lambda: take()["usable"] == host.uuids)


def test_a_fork_is_not_delayed_by_a_call_that_hangs_in_its_parent(host: Host, take: Take) -> None:
    take("patience 0.2")
    host.hang("nvmlDeviceGetMemoryInfo_v2", take("pid"))
    assert take()["hangs"]
    assert take("fork")["usable"] == host.uuids  # waits neither for the parent's thread nor for its answer


def test_nvml_stays_open_between_inventories(host: Host, take: Take) -> None:
    take()
    host.hang("nvmlInit")
    assert take("user nvmlDeviceGetCount") == 2
    for _ in range(3):
        assert take()["usable"] == host.uuids


def test_idle_nvml_is_closed(host: Host, take: Take) -> None:
    """While device files are open, an administrator cannot reset the GPU."""
    take("idle-after 0.2")
    take()
    assert take("open")["users"] == 1
    until(lambda: take("open")["users"] == 0)
    assert take()["usable"] == host.uuids


def test_a_fork_has_neither_nvml_nor_its_thread(host: Host, take: Take) -> None:
    take()
    assert take("open") == {"users": 1, "threads": 2}
    assert take("fork-finds") == {"users": 0, "threads": 1}
    assert take("open") == {"users": 0, "threads": 1}
    assert take()["usable"] == host.uuids


def test_ctrl_c_at_the_moment_of_an_answer_does_not_block_the_next_caller() -> None:
    """Such a Ctrl-C once made the next caller wait for a minute, and report that the driver hangs."""
    query = _Query(lambda: 7)
    lock = query._done

    class Interrupted:
        def acquire(self, *, timeout: float) -> bool:
            query._done = lock
            query.run()
            assert lock.acquire(timeout=timeout)
            raise KeyboardInterrupt

    query._done = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        query.wait(60)
    assert query.answer(0) == 7
