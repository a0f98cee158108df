"""How long our SuperNode waits between its questions."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu.flower.supernode import Clock, is_on_this_host

FLOWER_S = 3.0


class Time:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waits_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s


@given(st.lists(st.sampled_from([FLOWER_S, 0.5]), min_size=1), st.floats(0.01, 10))
def test_a_wait_is_never_longer_than_flowers_and_something_is_noticed_soon(
    waits: list[float], poll_s: float
) -> None:
    at = Time()
    clock = Clock(poll_s, sleep=at.sleep, monotonic=at.monotonic)
    began_s = at.now_s
    for number, wanted in enumerate(waits):
        if number and waits[number - 1] != wanted:
            began_s = at.now_s
        waited_s = at.now_s - began_s
        clock.sleep(wanted)
        least_s = poll_s if wanted == FLOWER_S else 0.05
        assert at.waits_s[-1] <= wanted
        assert at.waits_s[-1] <= max(least_s, waited_s * 0.05) + 1e-9
        assert at.waits_s[-1] >= min(wanted, least_s)


def test_a_node_without_work_asks_as_rarely_as_flowers() -> None:
    at = Time()
    clock = Clock(0.5, sleep=at.sleep, monotonic=at.monotonic)
    while at.now_s < 1100:
        clock.sleep(FLOWER_S)
    assert at.waits_s[0] == 0.5
    assert at.waits_s[-1] == FLOWER_S


def test_it_is_the_module_time_otherwise() -> None:
    assert Clock(0.5).time is time.time


@pytest.mark.parametrize(
    ("arguments", "is_there"),
    [
        ([], True),
        (["--insecure", "--superlink", "127.0.0.1:9092"], True),
        (["--superlink=localhost:9092", "--node-config", "a=1"], True),
        (["--superlink", "[::1]:9092"], True),
        (["--superlink", "10.0.0.7:9092"], False),
        (["--superlink", "superlink.example.org:9092"], False),
    ],
)
def test_only_a_superlink_on_this_host_is_told_more_often(arguments: list[str], is_there: bool) -> None:
    assert is_on_this_host(arguments) is is_there


def test_flowers_supernode_waits_by_it_and_a_killed_node_is_noticed_sooner() -> None:
    """The version of Flower that is installed has the loop, and reads its interval where it is set."""
    code = """
import inspect
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection, start_client_internal
from flower_gpu.flower.supernode import shorten_heartbeats
for least_s in (4.0, 1.0, 0.1):
    shorten_heartbeats(least_s, heartbeat, fleet_http_connection)
    print(heartbeat.HEARTBEAT_DEFAULT_INTERVAL, fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL)
print(HEARTBEAT_MIN_INTERVAL)
for module in (heartbeat, fleet_http_connection):
    print("HEARTBEAT_DEFAULT_INTERVAL" in inspect.getsource(module).partition("def ")[2])
waits = inspect.getsource(start_client_internal).count("time.sleep(")
print(start_client_internal.time.__name__, waits)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["30", "30", "20", "20", "10", "10", "10", "True", "True", "time", "3"]
