"""A parent wakes its waiting SuperExec: which processes can wake it, when, and how long it waits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from run_programs import run_python

from flower_gpu.programs import waits
from flower_gpu.programs.superexec import SuperExecTime

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's abstract sockets"),
]

LONG_S = 50.0
#: Writes to a socket from another account.
WRITE_AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"\\n", "\\0" + sys.argv[1])
"""
#: Waits like a SuperExec, and ends with its parent.
WAIT = """
import os, sys
from flower_gpu.programs import superexec
from flower_gpu.programs import waits
clock = superexec.SuperExecTime(waits.of_environment())
superexec.end_with(int(sys.argv[1]))
print(os.environ.get("FLOWER_GPU_WAKEUP"), flush=True)
try:
    while True:
        clock.sleep(0.1)
        print("woken", flush=True)
except KeyboardInterrupt:
    print("ended", flush=True)
"""


@pytest.fixture
def waker(monkeypatch: pytest.MonkeyPatch) -> waits.Waker:
    monkeypatch.setenv(waits.VARIABLE, "")
    waker = waits.Waker()
    waker.announce()
    return waker


def test_a_wake_up_before_the_wait_is_not_lost(waker: waits.Waker) -> None:
    waker.wake()  # no process waits yet
    wake_ups = waits.of_environment()
    assert wake_ups is not None
    assert not wake_ups.wait(0.01)
    waker.wake()
    waker.wake()
    assert [wake_ups.wait(LONG_S), wake_ups.wait(LONG_S), wake_ups.wait(0.01)] == [True, True, False]


def test_only_one_process_is_woken_and_the_name_is_not_inherited(waker: waits.Waker) -> None:
    name = os.environ[waits.VARIABLE]
    first = waits.of_environment()
    assert first is not None
    assert waits.VARIABLE not in os.environ
    assert waits.of_environment() is None
    os.environ[waits.VARIABLE] = name
    assert waits.of_environment() is None, "the name is in use"
    for _ in range(1000):
        waker.wake()  # more often than the queue of the socket can hold
    assert first.wait(LONG_S)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_account_cannot_wake_a_superexec(waker: waits.Waker) -> None:
    name = os.environ[waits.VARIABLE]
    wake_ups = waits.of_environment()
    assert wake_ups is not None
    subprocess.run([sys.executable, "-c", WRITE_AS_NOBODY, name], check=True, timeout=150)
    assert not wake_ups.wait(0.3)
    waker.wake()
    assert wake_ups.wait(LONG_S)


def test_without_a_wake_up_it_polls_and_waits_at_least_as_long_as_flower(waker: waits.Waker) -> None:
    wake_ups = waits.of_environment()
    assert wake_ups is not None
    clock = SuperExecTime(wake_ups, longest_s=0.2)
    began_s = clock.monotonic()
    clock.sleep(0.01)
    clock.sleep(0.3)
    assert clock.monotonic() - began_s >= 0.5


def test_a_waiting_superexec_is_woken_and_ends_with_its_parent(waker: waits.Waker) -> None:
    parent = subprocess.Popen(["sleep", "100"])
    waiting = subprocess.Popen(
        [sys.executable, "-c", WAIT, str(parent.pid)], stdout=subprocess.PIPE, text=True
    )
    assert waiting.stdout is not None
    try:
        assert waiting.stdout.readline() == "None\n"
        for _ in range(3):
            waker.wake()
            assert waiting.stdout.readline() == "woken\n"
        parent.kill()
        parent.wait()  # a killed process exists until its parent has waited for it
        assert waiting.stdout.readline() == "ended\n"
        assert waiting.wait(60) == 0
    finally:
        for process in (parent, waiting):
            process.kill()
            process.wait()
        waiting.stdout.close()


#: Imitates the loop of a SuperNode and the thread that serves SuperExec and ClientApp, with Flower's states.
SUPERNODE = """
import threading
from types import SimpleNamespace
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate import NodeStateFactory
from flower_gpu.programs import waits
from flower_gpu.programs.supernode import SuperNodeTime

clock = SuperNodeTime(1.0, 1.0)
clock.listen()
wait_for_reply = clock._wait_for_reply
wake_ups = waits.of_environment()
state = NodeStateFactory(ObjectStoreFactory()).state()

def in_thread(target, *arguments):
    thread = threading.Thread(target=target, args=arguments)
    thread.start()
    thread.join()

def make_task():
    assert state.create_task(task_type="flwr-clientapp", run_id=1) is not None

make_task()
print(wake_ups.wait(0.01))
wait_for_reply(0.01)
print(wake_ups.wait(1000))
wait_for_reply(0.01)
print(wake_ups.wait(0.01))
in_thread(make_task)
print(wake_ups.wait(1000))
in_thread(state.store_message, SimpleNamespace(metadata=SimpleNamespace(message_id="1")))
wait_for_reply(1000)
"""


def test_a_supernode_wakes_its_superexec_for_a_complete_message_and_is_woken_by_the_reply() -> None:
    completed = run_python(SUPERNODE, check=True)
    assert completed.stdout.split() == ["False", "True", "False", "True"]
