"""What workers had to import is in the next server, where that does no harm."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import forkservers
import pytest
from processes import is_running, wait_until
from run_server_lines import Caller

from flower_gpu.errors import WorkerTimeoutError
from flower_gpu.workers.forkserver import run_server

pytestmark = pytest.mark.timeout(90)

_OF_WORKERS = 'import os\nPID = os.getpid()\nif "OF_WORKERS" not in os.environ:\n    '

PACKAGES = {
    "grown_plain": "import os\nPID = os.getpid()\n",
    "grown_other": "import os\nPID = os.getpid()\n",
    "grown_slow": """
        import os, time
        from contextlib import suppress
        from importlib import import_module
        PID = os.getpid()
        while "NEVER_ENDS" in os.environ:
            time.sleep(0.05)
            with suppress(ImportError):
                import_module("grown_slow.nothing")
        """,
    "grown_thread": """
        import os, threading
        PID = os.getpid()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        """,
    "grown_fails": f'{_OF_WORKERS}raise RuntimeError("not here")\n',
    "grown_crashes": f"{_OF_WORKERS}os.kill(PID, 11)\n",
}


@pytest.fixture
def caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Caller]:
    own, site = tmp_path / "own", tmp_path / "site"
    for folder in (own, site):
        folder.mkdir()
    for name, text in PACKAGES.items():
        forkservers.install(site, name, text)
    (own / "own_module.py").write_text("import os\nPID = os.getpid()\n")
    monkeypatch.syspath_prepend(str(own))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(run_server, "_WORKERS_THAT_LACK", 1)
    caller = Caller("spawn")
    caller.run("plain_tasks:answer")
    yield caller
    caller.close()


@pytest.fixture
def grown(caller: Caller) -> Callable[[int], int]:
    """Wait for a run's fork server after this one; return its pid."""

    def wait(pid: int) -> int:
        assert wait_until(lambda: caller.server_pid() != pid)
        return caller.server_pid()

    return wait


def renewed(caller: Caller) -> None:
    """Wait until nobody is about to start a run's fork server."""
    thread = caller.server._renewing
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def test_what_a_worker_imported_is_there(caller: Caller, grown: Callable[[int], int]) -> None:
    first = caller.server_pid()
    worker = caller.run("tasks_run_server:imported_by", "grown_plain")
    assert worker == caller.pids[-1]
    second = grown(first)
    assert caller.run("tasks_run_server:imported_by", "grown_plain") == second
    assert wait_until(lambda: not is_running(first))
    # Nothing new: nobody starts another one.
    caller.run("tasks_run_server:imported_by", "grown_plain")
    renewed(caller)
    assert caller.server_pid() == second


def test_a_few_workers_have_to_lack_it(
    caller: Caller, grown: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_server, "_WORKERS_THAT_LACK", 3)
    first = caller.server_pid()
    for _ in range(2):
        assert caller.run("tasks_run_server:imported_by", "grown_plain") == caller.pids[-1]
        assert caller.server._renewing is None
    assert caller.run("tasks_run_server:imported_by", "grown_plain") == caller.pids[-1]
    second = grown(first)
    assert caller.run("tasks_run_server:imported_by", "grown_plain") == second


def test_one_that_is_ended_while_it_imports_is_enough(
    caller: Caller, grown: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_server, "_WORKERS_THAT_LACK", 3)
    first = caller.server_pid()
    with pytest.raises(WorkerTimeoutError, match=r"of which at least \d\.\d s went into imports"):
        caller.run("tasks_run_server:imported_by", "grown_slow", env={"NEVER_ENDS": "1"}, timeout_s=3)
    second = grown(first)
    assert caller.run("tasks_run_server:imported_by", "grown_slow", env={"NEVER_ENDS": "1"}) == second


def test_a_worker_that_stays_tells_of_each_call(caller: Caller, grown: Callable[[int], int]) -> None:
    first = caller.server_pid()
    pids = {caller.run("os:getpid", calls=10)}
    pids.add(caller.run("tasks_run_server:imported_by", "grown_plain", calls=10))
    second = grown(first)
    # It has its calls to the end, and its server as long.
    for _ in range(8):
        pids.add(caller.run("tasks_run_server:imported_by", "grown_plain", calls=10))
    assert len(pids) == 1
    assert is_running(first)
    assert caller.run("tasks_run_server:imported_by", "grown_plain", calls=10) == second
    assert wait_until(lambda: not is_running(first))


def test_own_modules_are_left_to_workers(caller: Caller) -> None:
    first = caller.server_pid()
    assert caller.run("tasks_run_server:imported_by", "own_module") == caller.pids[-1]
    assert caller.server._renewing is None
    assert caller.server_pid() == first


@pytest.mark.parametrize("name", ["grown_thread", "grown_fails", "grown_crashes"])
def test_what_cannot_be_there_is_left_to_workers(
    name: str, caller: Caller, capfd: pytest.CaptureFixture[str]
) -> None:
    variables = {"OF_WORKERS": "1"}
    first = caller.server_pid()
    assert caller.run("tasks_run_server:imported_by", name, env=variables) == caller.pids[-1]
    renewed(caller)
    assert "Exception in thread" not in capfd.readouterr().err
    assert caller.run("tasks_run_server:imported_by", name, env=variables) == caller.pids[-1]
    # Nor does it matter when another one has to be started.
    os.kill(caller.server_pid(), signal.SIGKILL)
    assert wait_until(lambda: not is_running(first))
    for _ in range(2):
        found = caller.run("tasks_run_server:imported_by", name, env=variables, timeout_s=60)
        assert found == caller.pids[-1]


@pytest.mark.parametrize("name", ["grown_thread", "no_such_library"])
def test_named_from_the_start(name: str, caller: Caller) -> None:
    """An app's file may name what is never imported, or fails."""
    other = Caller("spawn", modules=("grown_other", name, "grown_plain"))
    try:
        assert (
            other.run("tasks_run_server:imported_by", "grown_plain", env={"OF_WORKERS": "1"})
            == other.server_pid()
        )
        assert (
            other.run("tasks_run_server:imported_by", "grown_other", env={"OF_WORKERS": "1"})
            == other.server_pid()
        )
    finally:
        other.close()


def test_calls_go_on_meanwhile(caller: Caller, grown: Callable[[int], int]) -> None:
    first = caller.server_pid()
    caller.run("tasks_run_server:imported_by", "grown_plain")
    answers = []
    while caller.server_pid() == first and len(answers) < 5000:
        answers.append(caller.run("plain_tasks:answer", calls=2))
    grown(first)
    answers += [caller.run("plain_tasks:answer", calls=2) for _ in range(5)]
    assert set(answers) == {42}


def test_closed_while_the_next_one_starts(caller: Caller) -> None:
    caller.run("tasks_run_server:imported_by", "grown_plain")
    caller.server.close()
    renewed(caller)
    current = caller.server._current
    assert current is not None
    assert wait_until(lambda: not is_running(current.pid))
