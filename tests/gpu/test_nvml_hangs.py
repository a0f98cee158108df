"""NVML is asked in a thread of its own: what hangs costs only a while, and nothing stays open for long."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from nvml_stub import Host
from waiting import until

from flower_gpu.gpu.nvml_thread import _Query

Start = Callable[[dict[str, str]], Callable[..., Any]]


@pytest.fixture
def take(host: Host, taker: Start) -> Callable[..., Any]:
    return taker(host.env)


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        ("nvmlInit", "asked to start"),
        ("nvmlDeviceGetCount_v2", "asked to start"),
        ("nvmlDeviceGetMemoryInfo_v2", "asked about GPU 0"),
    ],
)
def test_a_driver_that_hangs(host: Host, take: Callable[..., Any], function: str, asked: str) -> None:
    """Whoever asks is told what hangs, and since when; it goes on as soon as the driver does."""

    def seconds(problem: str) -> int:
        return int(re.search(r"has not answered for (\d+) s", problem)[1])  # type: ignore[index]

    take("patience 0.3")
    host.hang(function)
    found = take()
    assert found["usable"] == [] and found["hangs"]
    assert asked in found["problem"] and "dmesg" in found["problem"]
    began = seconds(found["problem"])
    until(lambda: seconds(take()["problem"]) > began)
    take("patience 30")
    host.go_on()
    until(lambda: take()["usable"] == host.uuids)


def test_a_fork_beside_a_driver_that_hangs(host: Host, take: Callable[..., Any]) -> None:
    take("patience 0.2")
    host.hang("nvmlDeviceGetMemoryInfo_v2", take("pid"))
    assert take()["hangs"]
    assert take("fork")["usable"] == host.uuids  # it waits neither for the thread nor for an answer


def test_nvml_stays_open_between_questions(host: Host, take: Callable[..., Any]) -> None:
    take()
    host.hang("nvmlInit")
    assert take("user nvmlDeviceGetCount") == 2
    for _ in range(3):
        assert take()["usable"] == host.uuids


def test_nvml_is_closed_when_nobody_asks(host: Host, take: Callable[..., Any]) -> None:
    """Open device files keep an administrator from resetting a GPU."""
    take("idle-after 0.2")
    take()
    assert take("open")["users"] == 1
    until(lambda: take("open")["users"] == 0)
    assert take()["usable"] == host.uuids


def test_a_fork_finds_neither_nvml_nor_its_thread(host: Host, take: Callable[..., Any]) -> None:
    take()
    assert take("open") == {"users": 1, "threads": 2}
    assert take("fork-finds") == {"users": 0, "threads": 1}
    assert take("open") == {"users": 0, "threads": 1}
    assert take()["usable"] == host.uuids


def test_a_ctrl_c_that_comes_with_an_answer_keeps_nobody_waiting() -> None:
    """It came between two lines: who asked next waited for a minute, and was told that the driver hangs."""
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
