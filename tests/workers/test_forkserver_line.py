"""Hundreds of simultaneous callers: a fork server with a long queue must not look as if it hangs."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack

import forkservers
import pytest
from forkservers import Client, only_server
from processes import is_running

from flower_gpu.workers import messages
from flower_gpu.workers.forkserver import client
from flower_gpu.workers.forkserver.waiting import Wait

pytestmark = forkservers.marks(timeout_s=300)

PROCESSES, THREADS = 3, 40
# Callers whose limit for an answer is shorter than the time that a server needs for all of them.
IMPATIENT = """
from flower_gpu.workers.forkserver import client, control
client._SAY_S = client._ANSWER_S = control._ANSWER_S = 2.0
"""
CALL_AT_ONCE = """
import threading
answer = []

def work():
    try:
        answer.append(run_in_worker("tasks_forkserver:server"))
    except Exception as error:
        answer.append(f"{{type(error).__name__}}: {{error}}")

threads = [threading.Thread(target=work) for _ in range({threads})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment in which forks are slow enough for a queue to form."""
    folder = tmp_path_factory.mktemp("line") / "venv"
    python = forkservers.make_environment(folder, {})
    (forkservers.site_packages(folder) / "slow.pth").write_text(
        "import sys; 'forkserver.program' in ' '.join(sys.orig_argv) and __import__('slow')\n"
    )
    (forkservers.site_packages(folder) / "slow.py").write_text(
        "import os, time\nfork = os.fork\nos.fork = lambda: (time.sleep(0.02), fork())[1]\n"
    )
    return python


def call_at_once(callers: list[Client]) -> list[int | str]:
    for caller in callers:
        caller.do(IMPATIENT)
        caller.send_code(CALL_AT_ONCE.format(threads=THREADS))
    return [server for caller in callers for server in caller.receive()]


def test_hundreds_of_calls_share_a_server_until_it_is_stopped(python: str) -> None:
    with forkservers.own_servers(light=True), ExitStack() as stack:
        callers = [stack.enter_context(Client(python)) for _ in range(PROCESSES)]
        server = callers[0].call("tasks_forkserver:server")
        assert call_at_once(callers) == [server] * (PROCESSES * THREADS)
        assert only_server().pid == server
        os.kill(server, signal.SIGSTOP)
        servers = call_at_once(callers[:1])
        assert not is_running(server)
        assert servers == [only_server().pid] * THREADS


def test_a_caller_in_the_queue_respects_its_time_limit() -> None:
    connection, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with connection, server_end:
        connection.settimeout(30)
        for _ in range(3):
            messages.send(server_end, messages.BUSY)
        with pytest.raises(TimeoutError, match="serves other callers first"):
            client._ask_or_end("0" * 20, connection, {"op": "open"}, [], time.monotonic() - 1, Wait())
        assert connection.fileno() == -1
