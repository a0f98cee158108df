"""How long our SuperNode waits between two polls, and how often it sends heartbeats."""

from __future__ import annotations

import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_programs import run_python

from flower_gpu.programs import waits
from flower_gpu.programs.supernode import SuperNodeTime

IDLE_S = 20.0


@given(st.floats(0, 1000), st.floats(0.01, 10))
def test_polls_are_frequent_after_work_and_rare_without_work(waited_s: float, least_s: float) -> None:
    wait_s = waits.wait_s(waited_s, least_s, IDLE_S)
    assert wait_s >= least_s
    if waited_s < waits.IDLE_AFTER_S:
        assert wait_s <= max(least_s, min(0.05 * waited_s, waits.LONGEST_S))
    else:
        assert wait_s == IDLE_S


def test_without_a_group_the_wait_grows_with_the_time_since_the_last_work() -> None:
    now_s = 1000.0
    clock = SuperNodeTime(0.01, 0.05, monotonic=lambda: now_s)
    for after_s, least_s in ((0, 0.01), (0.4, 0.02), (100, 0.05)):
        now_s = 1000.0 + after_s
        began_s = time.monotonic()
        clock.sleep(3)
        assert time.monotonic() - began_s >= least_s


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's abstract sockets")
def test_nodes_of_a_group_wake_each_other_once() -> None:
    group = waits.group_of(waits.with_group({}, 3))
    other = waits.group_of(waits.with_group({}, 3))
    assert group is not None and other is not None
    environ = {waits.GROUP_VARIABLE: f"{group._name}:3"}
    nodes = [joined for _ in range(3) if (joined := waits.group_of(environ)) is not None]
    wake_ups = [node.join() for node in nodes]
    strangers = other.join()
    assert group.join() is None, "the group already has three nodes"
    server = group.lead()
    first, second, third = wake_ups
    assert first and second and third and strangers and server
    assert group.lead() is None
    nodes[1].wake_nodes()
    assert [wake_up.wait(0.01) for wake_up in (first, second, third, strangers, server)] == [
        True,
        False,
        True,
        *2 * [False],
    ]
    nodes[1].wake_server()
    group.wake_nodes()
    group.wake_nodes()
    assert [wake_up.wait(50) for wake_up in (first, second, third, server)] == 4 * [True]
    second.clear()
    assert [wake_up.wait(0.01) for wake_up in (first, second)] == [True, False]


def test_other_attributes_are_those_of_the_time_module() -> None:
    assert SuperNodeTime(0.5, 1.0).time is time.time


def test_the_installed_flower_has_the_names_that_our_supernode_replaces() -> None:
    """The installed version has the expected loop, and reads the heartbeat interval when it is needed."""
    code = """
import inspect
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.supercore import heartbeat
from flwr.supercore.inflatable import inflatable_utils
from flwr.supernode import fleet_http_connection, start_client_internal
from flower_gpu.programs.supernode import send_heartbeats_often
from flower_gpu.programs.objects import SUPERLINK, SUPERNODE, answer_for_many, ask_for_many
from flwr.superlink.grid import http_grid
from flwr.superlink.routers.fleet import router
send_heartbeats_often()
print(heartbeat.HEARTBEAT_DEFAULT_INTERVAL, fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL)
print(HEARTBEAT_MIN_INTERVAL)
for module in (heartbeat, fleet_http_connection):
    print("HEARTBEAT_DEFAULT_INTERVAL" in inspect.getsource(module).partition("def ")[2])
waits = inspect.getsource(start_client_internal).count("time.sleep(")
print(start_client_internal.time.__name__, waits)
original = inflatable_utils.pull_objects
ask_for_many()
print(original.__kwdefaults__["initial_backoff"])
print(inflatable_utils.pull_and_inflate_object_from_tree.__kwdefaults__["initial_backoff"])
for module in (inflatable_utils, start_client_internal, http_grid):
    print(module.pull_objects.__module__)
name = "push_object_contents_from_iterable"
for module in (inflatable_utils, start_client_internal):
    print(getattr(module, name).__module__)
answer_for_many(SUPERLINK + SUPERNODE)
print(router.fleet_handlers.pull_object.__module__, router.fleet_handlers.push_object.__module__)
"""
    completed = run_python(code, check=True)
    waits = ["10", "10", "10", "True", "True", "time", "3", "0.02", "0.02"]
    assert completed.stdout.split() == [*waits, *["flower_gpu.programs.objects"] * 7]
