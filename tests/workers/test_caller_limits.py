"""Callers with more open files than `select.select` accepts, and callers that cannot start a thread."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forkservers
import pytest
from forkservers import WITH_TASKS
from run_programs import run_python

pytestmark = forkservers.marks(fixture="folder")

MANY_FILES = """
import json, os, signal, subprocess, sys
import light_servers, many_files
from flower_gpu import run_in_worker
from flower_gpu.workers import life
from flower_gpu.workers.forkserver import client, control

light_servers.begin()

def pid():
    return run_in_worker("os:getpid", gpu="never", start_method="forkserver")

pid()
many_files.open_many()

tracker = subprocess.Popen(["sleep", "600"])
life._TRACKER_S = 0.1
before = len(os.listdir("/proc/self/fd"))
life.end_later([tracker.pid])
ended_with = tracker.wait(60)

[server] = control.status()
os.kill(server.pid, signal.SIGSTOP)
client._ANSWER_S = 0.5
pid()
[other] = control.status()
print(json.dumps([ended_with, other.pid != server.pid]))
control.stop(wait_s=10)
"""

NO_THREADS = """
import json, os, sys, threading, time
from flower_gpu import run_in_worker

import light_servers

light_servers.begin()
os.environ["FLOWER_GPU_CPU_LEASES"] = "off"

def late(): return run_in_worker("tasks_threads:ends_late", gpu="never", start_method=sys.argv[1])

def files(): return len(os.listdir("/proc/self/fd"))

def start(self): raise RuntimeError("can't start new thread")

results = [late()]
for thread in threading.enumerate():
    if thread.name == "flower-gpu-leaving":
        thread.join()
before = files()
threading.Thread.start = start
results += [late(), late()]
print(json.dumps([results, files() - before]))
"""


def run_and_parse(code: str, *arguments: str) -> object:
    """Run a program, and return the JSON value in its last line."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), WITH_TASKS["PYTHONPATH"]])
    done = run_python(code, *arguments, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_caller_with_many_files_ends_processes_that_hang() -> None:
    """It ends a resource tracker, and replaces a fork server that does not answer."""
    assert run_and_parse(MANY_FILES) == [-9, True]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_without_threads_no_result_is_lost_and_no_file_stays_open(start_method: str) -> None:
    """Usually a thread waits for a worker that exits late. Here no thread can start."""
    assert run_and_parse(NO_THREADS, start_method) == [[42, 42, 42], 0]
