"""No more processes can be started: an error that says which limit was reached, and what to do."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

import pytest

from flower_gpu.workers import life

# For root there is no limit. Nobody else has this account.
LIMITED = """
import os, resource, sys
from flower_gpu import run_in_worker
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(54377)
    os.setuid(54377)
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
try:
    run_in_worker("os:getpid", start_method="fork")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_worker_that_the_account_may_not_start_is_explained() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "1"], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert "WorkerStartError cannot start a worker: " in done.stdout, done.stderr
    assert " processes and threads and may have 1 (ulimit -u)" in done.stdout
    assert "Raise that limit, or let fewer workers run at a time" in done.stdout


def test_other_errors_are_left_as_they_are() -> None:
    error = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert life.explained(error) == str(error)


def test_without_a_limit_of_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda number: (infinite, infinite))
    text = life.explained(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    assert text.startswith("Resource temporarily unavailable; ") and "ulimit" not in text
