"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import cuda_stub
import nvml_stub
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from _pytest.outcomes import OutcomeException
from command_shell import Shell
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings
from properties import EXPLORED, USUAL, examples
from run_programs import TIMEOUT_S

# CI checks each property with the same examples every time, so a rare example never fails an unrelated
# change. A deadline or a slow health check would depend on the machine rather than on the code.
settings.register_profile(
    "usual",
    max_examples=USUAL,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# In the whole suite, the first failing example is enough. Shrinking it takes minutes, so only -n 0 does it.
settings.register_profile(
    "first",
    settings.get_profile("usual"),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    report_multiple_bugs=False,
)
# This profile looks for rare examples, with many new ones in each run.
settings.register_profile(
    "explore", settings.get_profile("usual"), derandomize=False, max_examples=EXPLORED * USUAL
)
settings.load_profile("first" if "PYTEST_XDIST_WORKER" in os.environ else "usual")

# A shell without job control ignores SIGINT in its background jobs, and nohup ignores SIGHUP. Programs
# inherit this, but tests that press Ctrl-C need the default handlers.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# The tests have fork servers of their own, which end with the tests and are never the user's. They stay
# alive between files, because each import of PyTorch takes seconds of CPU.
STATE_DIR = Path(tempfile.mkdtemp(prefix="flower-gpu-tests-"))
os.environ["FLOWER_GPU_STATE_DIR"] = str(STATE_DIR)
os.environ["FLOWER_GPU_SERVER_IDLE_S"] = "180"
# Starting a fork server may take long on a busy machine. Tests compare the output of programs, which must not
# contain the notice about this wait.
os.environ["FLOWER_GPU_SAY_WAIT_S"] = "120"
# With a ledger of their own, calls of tests do not wait for cores that other programs have leased.
(STATE_DIR / "ledger").mkdir(mode=0o1777)
os.environ["FLOWER_GPU_LEDGER_DIR"] = str(STATE_DIR / "ledger")
# For commands in tests that do not depend on the content of the state folder. All processes of pytest-xdist
# share the fork servers of their parent, because each new server imports for seconds.
os.environ.setdefault("TESTS_SHARED_STATE_DIR", str(STATE_DIR))
# Interval in seconds at which each SuperNode is polled for a message. At the launcher's 0.1 s, polling eight
# SuperNodes keeps half a core busy while the tests wait for something else.
os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.5")
# If tests run in parallel, a spinning OpenMP thread takes the core from the thread that it waits for. With
# this setting, training takes a fifth of the CPU time on two cores. PyTorch reads it during its import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_sessionfinish() -> None:
    from flower_gpu.workers.forkserver import control

    control.stop(wait_s=10)
    shutil.rmtree(STATE_DIR)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    end_later(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    # Pytest cancels the timer when a test fails, so it is set again.
    end_later(item)


class TimedOut(OutcomeException):
    """A test exceeded its time limit. Hypothesis would treat pytest's own exception as a failing example."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer() -> object:
    was_set = yield
    fail = signal.getsignal(signal.SIGALRM)

    def time_out(number: int, frame: FrameType | None) -> None:
        try:
            fail(number, frame)
        except pytest.fail.Exception as failed:
            raise TimedOut(failed.msg) from None

    if callable(fail):
        signal.signal(signal.SIGALRM, time_out)
    return was_set


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def end_later(item: pytest.Item) -> None:
    """Exit a pytest-xdist process if its test still runs a minute after its time limit.

    pytest-timeout sends a single signal. A test that blocks in C, or in a ``finally`` after the signal, would
    never end. The tracebacks of all threads are printed, and another process continues with the next test.
    """
    if hasattr(item.config, "workerinput"):
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(limit_s(item) + 60, exit=True, file=stderr)


def limit_s(item: pytest.Item) -> float:
    """Return the time limit of a test in seconds."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files for pytest-xdist, and extend the time limits of property tests.

    Files with long tests come early, because a long file at the end would leave the other processes idle.
    They alternate with short files, because several federations at the same time would compete for the CPU.

    The time limit of a property test is multiplied by the same factor as its number of examples.
    """
    if (factor := examples(1)) > 1:
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker(pytest.mark.timeout(factor * limit_s(item)), append=False)
    # Only processes of pytest-xdist have this attribute.
    if hasattr(config, "workerinput"):
        longest_s: dict[Path, float] = {}
        for item in items:
            longest_s[item.path] = max(longest_s.get(item.path, 0), limit_s(item))
        usual_s = float(config.getini("timeout"))
        long = sorted((path for path in longest_s if longest_s[path] > usual_s), key=lambda p: -longest_s[p])
        short = [path for path in longest_s if longest_s[path] <= usual_s]
        mixed = filter(None, chain.from_iterable(zip_longest(long, short)))
        position = {path: number for number, path in enumerate(mixed)}
        items.sort(key=lambda item: position[item.path])


Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell on a machine without GPUs."""
    shell = Shell(tmp_path)
    yield shell
    shell.end()


@pytest.fixture
def host(tmp_path: Path) -> nvml_stub.Host:
    """A host with two stub GPUs of 16 GiB."""
    return nvml_stub.Host(tmp_path / "host")


@pytest.fixture
def cuda_host(tmp_path: Path) -> Callable[..., cuda_stub.Host]:
    """Create a host with stub GPUs that PyTorch can use; see tests/cuda_stub/README.md."""
    if reason := cuda_stub.reason_not_to_run():
        pytest.skip(reason)
    return partial(cuda_stub.Host, tmp_path / "cuda-host")


@pytest.fixture
def write_script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a Python script into the test's folder."""

    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def run_script(write_script: Callable[..., Path]) -> Script:
    """Run a script in a new Python process until it exits, and fail with its stderr if it fails."""

    def run(
        text: str,
        *arguments: str,
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        name: str = "script.py",
        check: bool = True,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *flags, str(write_script(text, name)), *arguments],
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **options,
        )
        if check:
            assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
