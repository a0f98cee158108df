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
from collections.abc import Callable
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import cuda_stub
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from _pytest.outcomes import OutcomeException
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings
from properties import EXPLORED, USUAL, examples
from run_programs import TIMEOUT_S

# CI checks each property with the same examples every time, so that a rare example fails no change that has
# nothing to do with it. A deadline or a slow health check would say more of the machine than of the code.
settings.register_profile(
    "usual",
    max_examples=USUAL,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# In the whole suite, the first example that fails is enough. A smaller one costs minutes; -n 0 finds it.
settings.register_profile(
    "first",
    settings.get_profile("usual"),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    report_multiple_bugs=False,
)
# Rare examples are found here: new ones in each run, and many of them.
settings.register_profile(
    "explore", settings.get_profile("usual"), derandomize=False, max_examples=EXPLORED * USUAL
)
settings.load_profile("first" if "PYTEST_XDIST_WORKER" in os.environ else "usual")

# A shell without job control starts what it puts into the background with SIGINT ignored, nohup does so with
# SIGHUP, and programs inherit that; tests that press Ctrl-C need the usual state.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# The fork servers of the tests are none of the user's, and end with them. They wait for the next file that
# has a use for them: each import of PyTorch takes seconds of CPU.
STATE_DIR = Path(tempfile.mkdtemp(prefix="flower-gpu-tests-"))
os.environ["FLOWER_GPU_STATE_DIR"] = str(STATE_DIR)
os.environ["FLOWER_GPU_SERVER_IDLE_S"] = "180"
# A busy machine may take long to start one, and tests compare what a program writes.
os.environ["FLOWER_GPU_SAY_WAIT_S"] = "120"
# Nor do their calls wait for cores that others have.
(STATE_DIR / "ledger").mkdir(mode=0o1777)
os.environ["FLOWER_GPU_LEDGER_DIR"] = str(STATE_DIR / "ledger")
# For commands whose tests do not mind what else is in the state folder: processes of pytest-xdist have the
# fork servers of the one that starts them, as each new one imports for seconds.
os.environ.setdefault("TESTS_SHARED_STATE_DIR", str(STATE_DIR))
# Each SuperNode is asked so often whether it has a message. At the launcher's 0.1 s, eight of them keep half
# a core busy with that, while the tests wait for something else.
os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.5")
# A thread of OpenMP that spins takes the core from the thread that it waits for, where tests run beside each
# other. Read when PyTorch is imported. With it, training takes a fifth of the CPU time on two cores.
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
    end_later(item)  # once more, since pytest takes it back when a test has failed


class TimedOut(OutcomeException):
    """A test has taken too long. Hypothesis would take pytest's own exception as an example that fails."""


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
    """End a process of pytest-xdist whose test is still there a minute after it ought to have failed.

    pytest-timeout sends a signal, once. What waits in C, or in a ``finally`` after that, would wait for ever.
    The tracebacks of all threads are shown, and another process goes on with the next test.
    """
    if hasattr(item.config, "workerinput"):
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(limit_s(item) + 60, exit=True, file=stderr)


def limit_s(item: pytest.Item) -> float:
    """Return how many seconds a test may take."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side, files whose tests may take long come early: one at the end would leave others idle.

    Between them come shorter ones: whole federations at the same time would all want the CPU, and what is
    left for the end waits for most of its time.

    Tests of properties get as many times as long as they have examples.
    """
    if (factor := examples(1)) > 1:
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker(pytest.mark.timeout(factor * limit_s(item)), append=False)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        longest_s: dict[Path, float] = {}
        for item in items:
            longest_s[item.path] = max(longest_s.get(item.path, 0), limit_s(item))
        usual_s = float(config.getini("timeout"))
        long = sorted((path for path in longest_s if longest_s[path] > usual_s), key=lambda p: -longest_s[p])
        short = [path for path in longest_s if longest_s[path] <= usual_s]
        mixed = filter(None, chain.from_iterable(zip_longest(long, short)))
        place = {path: number for number, path in enumerate(mixed)}
        items.sort(key=lambda item: place[item.path])


Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cuda_host(tmp_path: Path) -> Callable[..., cuda_stub.Host]:
    """Make a host with cards that PyTorch can use; see tests/cuda_stub/README.md."""
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
    """Run a script in a Python of its own to its end, and fail with its stderr if it fails."""

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
