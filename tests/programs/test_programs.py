"""Programs that are forked by a server behave like newly started ones."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from flower_gpu.programs import server, starter
from flower_gpu.programs.commands import COMMANDS, SERVER_COMMANDS, CommandFolder
from flower_gpu.programs.server import NoEntryError, ProgramEntry, find
from flower_gpu.programs.starter import CONNECTION_VARIABLE, ProgramHandle, Programs
from flower_gpu.workers import messages
from flower_gpu.workers.forkserver.identity import script_folders
from flower_gpu.workers.interpreter import UNKNOWN
from flower_gpu.workers.life import adopt_orphans

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only"),
]

_PROBE = Path(__file__).with_name("programs_probe.py")


class Probe:
    """A server that forks the program of ``programs_probe.py``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        own_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            self.process = subprocess.Popen(
                [sys.executable, str(_PROBE), " " * 3000],
                env={**self.env, CONNECTION_VARIABLE: str(server_end.fileno()), "PROBE_MARK": "1"},
                pass_fds=[server_end.fileno()],
                process_group=0,
            )
        self.programs = Programs(own_end)

    def start(
        self, ending: str, env: dict[str, str] | None = None, name: str = "tell", **options: Any
    ) -> ProgramHandle | None:
        """Start the program. It writes its report to ``report_file``."""
        self.report_file = self.folder / "report"
        self.report_file.unlink(missing_ok=True)  # an earlier program may have written it
        argv = [name, str(self.report_file), ending]
        started = self.programs.start(argv, {**self.env, **(env or {})}, **options)
        return ProgramHandle(argv, *started) if started else None

    def run(self, ending: str, code: int, **options: Any) -> dict[str, Any]:
        """Run the program, check its exit code, and return its report."""
        program = self.start(ending, **options)
        assert program is not None, self.programs.reason
        assert program.wait(60) == code
        report: dict[str, Any] = json.loads(self.report_file.read_text())
        return report


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    probe = Probe(tmp_path_factory.mktemp("programs"))
    yield probe
    probe.programs.close()
    assert probe.process.wait(60) == 0


def test_a_program_gets_the_arguments_and_the_environment_of_its_start(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    input_file, output = tmp_path / "input", tmp_path / "output"
    input_file.write_text("on standard input")
    odd = os.fsdecode(b"not UTF-8: \xff")
    large = {"LARGE": "x" * 100_000, "ODD": odd}
    with input_file.open() as stdin, output.open("w") as file:
        report = probe.run(
            "3", 3, env=large, stdin=stdin.fileno(), stdout=file.fileno(), stderr=file.fileno(), group=None
        )
    assert report["argv"] == ["/usr/bin/tell", str(probe.report_file), "3"]
    assert report["title"] == " ".join([sys.executable, *report["argv"]]) and report["name"] == "tell"
    assert report["main"] == ["__main__", "/usr/bin/tell"]
    assert report["environ"] == {**probe.env, **large}
    assert report["folder"] == str(tmp_path) and report["input"] == "on standard input"
    assert sorted(output.read_text().split()) == ["logged", "printed"]
    assert report["session"] == report["group"] != os.getpgrp()
    assert report["threads"] == 1
    assert report["signals"], "signals have their default handlers"
    assert report["marked"], "the mark that identifies the processes of a run is inherited"


def test_a_program_inherits_no_other_descriptors(probe: Probe) -> None:
    other = probe.start("wait")
    until(lambda: probe.report_file.exists())
    assert other is not None
    first = probe.run("0", 0)["opened"]
    other.kill()
    other.wait(60)
    sockets_and_pipes = [name for name in first if name.startswith(("socket:", "pipe:"))]
    of_test = {str(Path(f"/proc/self/fd/{number}").readlink()) for number in (0, 1, 2)}
    # One socket leads to the server and starts further programs. The other reports the end of the program.
    assert sorted(name.partition(":")[0] for name in {*sockets_and_pipes} - of_test) == ["socket", "socket"]


def test_two_programs_draw_different_random_numbers(probe: Probe) -> None:
    numbers = [probe.run("0", 0)["random"] for _ in range(2)]
    assert all(first != second for first, second in zip(*numbers, strict=True))


def test_the_number_of_threads_follows_the_environment_of_the_program(probe: Probe) -> None:
    assert set(probe.run("0", 0, env={"OMP_NUM_THREADS": "1"})["blas"]) == {1}
    cores = len(os.sched_getaffinity(0))
    if cores > 1:
        assert set(probe.run("0", 0, env={"OMP_NUM_THREADS": "2"})["blas"]) == {2}


def test_a_serverapp_may_use_all_cores(probe: Probe) -> None:
    without_limit = {name: value for name, value in probe.env.items() if name != "OMP_NUM_THREADS"}
    probe.env, previous = without_limit, probe.env
    try:
        assert set(probe.run("0", 0, name="flwr-serverapp")["blas"]) == {len(os.sched_getaffinity(0))}
    finally:
        probe.env = previous


@pytest.mark.parametrize(
    ("ending", "code"), [("0", 0), ("255", 255), ("raise", 1), ("text", 1), ("kill", -9), ("interrupt", -2)]
)
def test_the_end_of_a_program_is_reported(probe: Probe, ending: str, code: int, tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    with stderr.open("w") as file:
        probe.run(ending, code, stderr=file.fileno())
    if ending == "kill":
        until(lambda: stderr.read_text().endswith("flower-gpu: tell was killed by SIGKILL (9)\n"))
    words = {"raise": "ValueError: as it was told", "text": "a text", "interrupt": "KeyboardInterrupt"}
    assert words.get(ending, "") in stderr.read_text()


def test_a_program_can_be_terminated(probe: Probe) -> None:
    probe.report_file = probe.folder / "report"
    probe.report_file.unlink(missing_ok=True)
    program = probe.start("wait")
    assert program is not None and program.poll() is None
    until(lambda: probe.report_file.exists())
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.05)
    program.terminate()
    assert program.wait(60) == -signal.SIGTERM
    program.kill()  # no effect after the end


def test_the_process_that_adopts_the_programs_of_a_dead_server_gets_their_exit_status(tmp_path: Path) -> None:
    probe = Probe(tmp_path)
    assert adopt_orphans()
    try:
        program = probe.start("wait")
        assert program is not None
        os.killpg(program.pid, 0)  # raises an error unless the program leads a process group already
        until(lambda: probe.report_file.exists() and probe.report_file.read_text().endswith("}"))
        assert json.loads(probe.report_file.read_text())["group"] == program.pid
        probe.process.kill()
        probe.process.wait(60)
        assert program.poll() is None
        program.kill()
        assert program.wait(60) == -signal.SIGKILL
    finally:
        adopt_orphans(False)


def test_programs_started_by_a_program_are_forked_as_well(probe: Probe) -> None:
    probe.run("start", 0)
    report = json.loads(Path(f"{probe.report_file}.child").read_text())
    assert report["argv"][-1] == "7" and report["parent"] == probe.process.pid
    assert report["session"] == report["group"] != os.getsid(probe.process.pid)


@pytest.mark.parametrize(
    ("argv", "env", "reason"),
    [
        (["ls"], {}, "ls is another program"),
        (["tell", "x", "0"], {"FLWR_LOG_LEVEL": "DEBUG"}, "read at the start"),
        (["tell", "x", "0"], {"PYTHONHASHSEED": "1"}, "read at the start"),
    ],
)
def test_programs_that_cannot_be_forked_are_refused(
    probe: Probe, argv: list[str], env: dict[str, str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    probe.programs.reason = ""
    for _ in range(2):
        assert probe.programs.start(argv, {**probe.env, **env}) is None
        assert reason in probe.programs.reason
    stderr = capsys.readouterr().err
    assert stderr.count("Flower's programs are started one by one") == 1 and reason in stderr


def test_refused_programs_are_started_by_popen(probe: Probe, capfd: pytest.CaptureFixture[str]) -> None:
    with starter.Subprocess(probe.programs).Popen([sys.executable, "-c", "print('by Popen')"]) as process:
        assert isinstance(process, subprocess.Popen) and process.wait(60) == 0
    assert capfd.readouterr().out == "by Popen\n"


def test_a_request_that_timed_out_is_not_served_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Popen has started the program meanwhile, so a late server would start it a second time."""
    probe = Probe(tmp_path)
    os.kill(probe.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(starter, "_ANSWER_S", 0.2)
    probe.report_file = tmp_path / "report"
    assert probe.start("0") is None
    assert probe.programs.reason == "no answer within 0.2 s"
    os.kill(probe.process.pid, signal.SIGCONT)
    assert probe.process.wait(60) == 0
    assert not probe.report_file.exists()


def test_a_fork_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", fork)
    own_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own_end, server_end:
        forks = server._ProgramForker(server_end, {})
        request = server._ProgramRequest(["flwr"], {}, 0, [0, 1, 2], folder=-1, reply_socket=own_end)
        open_before = os.listdir("/proc/self/fd")  # noqa: PTH208
        with pytest.raises(BlockingIOError):
            forks._fork(request, ProgramEntry("flwr", "os", "getpid"))
        assert os.listdir("/proc/self/fd") == open_before  # noqa: PTH208


def test_a_process_with_thousands_of_descriptors_can_wait() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this account may not open 2000 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    try:
        answer, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with answer, end:
            high = socket.socket(fileno=fcntl.fcntl(answer, fcntl.F_DUPFD_CLOEXEC, 1500))
            program = ProgramHandle(["x"], os.getpid(), high)
            assert program.poll() is None
            messages.send(end, {"status": 3})
            assert program.wait(60) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_killing_the_server_does_not_end_its_programs(tmp_path: Path) -> None:
    probe = Probe(tmp_path)
    program = probe.start("wait")
    assert program is not None
    until(lambda: probe.report_file.exists())
    probe.process.kill()
    probe.process.wait(60)
    assert program.poll() is None
    assert probe.start("0") is None
    program.kill()
    assert program.wait(60) == UNKNOWN != 0, "the exit status is lost with the server"


def test_the_wait_for_a_program_of_a_dead_server_has_a_limit() -> None:
    """This process has adopted the program, which is still running."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    answer, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.close()
    program = ProgramHandle(["x"], child.pid, answer)
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.1)
    program.kill()
    assert program.wait(60) == -signal.SIGKILL
    child.communicate()


# Which program a command of Flower runs, depending on its place on the PATH ---------------------------------

FLOWERS = os.pathsep.join(script_folders())


@pytest.mark.parametrize("name", ["flower-superlink", "flower-supernode", "flower-superexec", "flwr"])
def test_a_command_of_flower_is_found_as_a_function(name: str) -> None:
    entry = find(name, {"PATH": FLOWERS})
    assert entry.module.startswith("flwr.") and Path(entry.path).name == name
    assert callable(entry.load())


@pytest.mark.parametrize(
    ("commands", "name"), [(COMMANDS, "flower-supernode"), (SERVER_COMMANDS, "flwr-serverapp")]
)
def test_our_command_comes_first_on_the_path(commands: dict[str, str], name: str) -> None:
    entry = find(name, {"PATH": CommandFolder(commands).first_on(FLOWERS)})
    assert (entry.module, entry.function) == (commands[name], "main")


def test_a_command_of_another_environment_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "flower-supernode"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    with pytest.raises(NoEntryError, match=r"flower-supernode is another program"):
        find("flower-supernode", {"PATH": f"{tmp_path}{os.pathsep}{FLOWERS}"})


def test_a_command_that_is_not_flowers_is_refused() -> None:
    with pytest.raises(NoEntryError, match="another program"):
        find("python", {"PATH": FLOWERS})
    with pytest.raises(NoEntryError, match="no command flower-supernode"):
        find("flower-supernode", {"PATH": ""})
