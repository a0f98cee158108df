"""Programs that a server forks are as fresh ones: started, told apart, ended."""

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

from flower_gpu.flower.commands import COMMANDS, SERVER_COMMANDS, CommandFolder
from flower_gpu.flower.programs import server, starter
from flower_gpu.flower.programs.server import NoEntryError, ProgramEntry, find
from flower_gpu.flower.programs.starter import CONNECTION_VARIABLE, ProgramHandle, Programs
from flower_gpu.workers import messages
from flower_gpu.workers.forkserver.identity import script_folders
from flower_gpu.workers.interpreter import UNKNOWN
from flower_gpu.workers.life import adopt_orphans

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only"),
]

_PROBE = Path(__file__).with_name("programs_probe.py")


class Probe:
    """A server of the test's own programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(_PROBE), " " * 3000],
                env={**self.env, CONNECTION_VARIABLE: str(theirs.fileno()), "PROBE_MARK": "1"},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self.programs = Programs(ours)

    def start(
        self, how: str, env: dict[str, str] | None = None, name: str = "tell", **options: Any
    ) -> ProgramHandle | None:
        """Start the program that tells what it has."""
        self.told = self.folder / "told"
        self.told.unlink(missing_ok=True)  # of an earlier program
        argv = [name, str(self.told), how]
        started = self.programs.start(argv, {**self.env, **(env or {})}, **options)
        return ProgramHandle(argv, *started) if started else None

    def run(self, how: str, code: int, **options: Any) -> dict[str, Any]:
        """Have it run, and end so; return what it has told."""
        program = self.start(how, **options)
        assert program is not None, self.programs.reason
        assert program.wait(60) == code
        found: dict[str, Any] = json.loads(self.told.read_text())
        return found


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    probe = Probe(tmp_path_factory.mktemp("programs"))
    yield probe
    probe.programs.close()
    assert probe.process.wait(60) == 0


def test_it_has_what_it_was_started_with(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given, output = tmp_path / "given", tmp_path / "output"
    given.write_text("on standard input")
    odd = os.fsdecode(b"not UTF-8: \xff")
    large = {"LARGE": "x" * 100_000, "ODD": odd}
    with given.open() as stdin, output.open("w") as file:
        told = probe.run(
            "3", 3, env=large, stdin=stdin.fileno(), stdout=file.fileno(), stderr=file.fileno(), group=None
        )
    assert told["argv"] == ["/usr/bin/tell", str(probe.told), "3"]
    assert told["title"] == " ".join([sys.executable, *told["argv"]]) and told["name"] == "tell"
    assert told["main"] == ["__main__", "/usr/bin/tell"]
    assert told["environ"] == {**probe.env, **large}
    assert told["folder"] == str(tmp_path) and told["input"] == "on standard input"
    assert sorted(output.read_text().split()) == ["logged", "printed"]
    assert told["session"] == told["group"] != os.getpgrp()
    assert told["threads"] == 1
    assert told["signals"], "they are handled as in a fresh program"
    assert told["marked"], "by this a run's processes are found"


def test_it_has_no_descriptors_but_its_own(probe: Probe) -> None:
    other = probe.start("wait")
    until(lambda: probe.told.exists())
    assert other is not None
    first = probe.run("0", 0)["opened"]
    other.kill()
    other.wait(60)
    sockets_and_pipes = [name for name in first if name.startswith(("socket:", "pipe:"))]
    own = {str(Path(f"/proc/self/fd/{number}").readlink()) for number in (0, 1, 2)}
    # That to the server, over which it would start programs itself, and the one that tells its end.
    assert sorted(name.partition(":")[0] for name in {*sockets_and_pipes} - own) == ["socket", "socket"]


def test_forks_have_random_numbers_of_their_own(probe: Probe) -> None:
    told = [probe.run("0", 0)["random"] for _ in range(2)]
    assert all(one != other for one, other in zip(*told, strict=True))


def test_threads_are_those_of_its_own_environment(probe: Probe) -> None:
    assert set(probe.run("0", 0, env={"OMP_NUM_THREADS": "1"})["blas"]) == {1}
    cores = len(os.sched_getaffinity(0))
    if cores > 1:
        assert set(probe.run("0", 0, env={"OMP_NUM_THREADS": "2"})["blas"]) == {2}


def test_a_serverapp_has_all_cores(probe: Probe) -> None:
    everything = {name: value for name, value in probe.env.items() if name != "OMP_NUM_THREADS"}
    probe.env, before = everything, probe.env
    try:
        assert set(probe.run("0", 0, name="flwr-serverapp")["blas"]) == {len(os.sched_getaffinity(0))}
    finally:
        probe.env = before


@pytest.mark.parametrize(
    ("how", "code"), [("0", 0), ("255", 255), ("raise", 1), ("text", 1), ("kill", -9), ("interrupt", -2)]
)
def test_how_it_ends(probe: Probe, how: str, code: int, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("w") as file:
        probe.run(how, code, stderr=file.fileno())
    if how == "kill":
        until(lambda: said.read_text().endswith("flower-gpu: tell was killed by SIGKILL (9)\n"))
    words = {"raise": "ValueError: as it was told", "text": "a text", "interrupt": "KeyboardInterrupt"}
    assert words.get(how, "") in said.read_text()


def test_signals(probe: Probe) -> None:
    probe.told = probe.folder / "told"
    probe.told.unlink(missing_ok=True)
    program = probe.start("wait")
    assert program is not None and program.poll() is None
    until(lambda: probe.told.exists())
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.05)
    program.terminate()
    assert program.wait(60) == -signal.SIGTERM
    program.kill()  # nobody is hit


def test_who_adopts_what_an_ended_server_leaves_learns_how_that_ends(tmp_path: Path) -> None:
    probe = Probe(tmp_path)
    assert adopt_orphans()
    try:
        program = probe.start("wait")
        assert program is not None
        os.killpg(program.pid, 0)  # a group of its own, from the beginning
        until(lambda: probe.told.exists() and probe.told.read_text().endswith("}"))
        assert json.loads(probe.told.read_text())["group"] == program.pid
        probe.process.kill()
        probe.process.wait(60)
        assert program.poll() is None
        program.kill()
        assert program.wait(60) == -signal.SIGKILL
    finally:
        adopt_orphans(False)


def test_what_it_starts_is_forked_as_well(probe: Probe) -> None:
    probe.run("start", 0)
    told = json.loads(Path(f"{probe.told}.child").read_text())
    assert told["argv"][-1] == "7" and told["parent"] == probe.process.pid
    assert told["session"] == told["group"] != os.getsid(probe.process.pid)


@pytest.mark.parametrize(
    ("argv", "env", "reason"),
    [
        (["ls"], {}, "ls is another program"),
        (["tell", "x", "0"], {"FLWR_LOG_LEVEL": "DEBUG"}, "read at the start"),
        (["tell", "x", "0"], {"PYTHONHASHSEED": "1"}, "read at the start"),
    ],
)
def test_what_is_refused(
    probe: Probe, argv: list[str], env: dict[str, str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    probe.programs.reason = ""
    for _ in range(2):
        assert probe.programs.start(argv, {**probe.env, **env}) is None
        assert reason in probe.programs.reason
    said = capsys.readouterr().err
    assert said.count("Flower's programs are started one by one") == 1 and reason in said


def test_flower_starts_by_popen_what_is_refused(probe: Probe, capfd: pytest.CaptureFixture[str]) -> None:
    with starter.Subprocess(probe.programs).Popen([sys.executable, "-c", "print('by Popen')"]) as process:
        assert isinstance(process, subprocess.Popen) and process.wait(60) == 0
    assert capfd.readouterr().out == "by Popen\n"


def test_what_nobody_waits_for_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers late would start it once more, beside what was started by Popen meanwhile."""
    probe = Probe(tmp_path)
    os.kill(probe.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(starter, "_ANSWER_S", 0.2)
    probe.told = tmp_path / "told"
    assert probe.start("0") is None
    assert probe.programs.reason == "no answer within 0.2 s"
    os.kill(probe.process.pid, signal.SIGCONT)
    assert probe.process.wait(60) == 0
    assert not probe.told.exists()


def test_a_fork_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(os, "fork", fork)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        forks = server._ProgramForker(theirs, {})
        request = server._ProgramRequest(["flwr"], {}, 0, [0, 1, 2], folder=-1, answer=ours)
        before = os.listdir("/proc/self/fd")  # noqa: PTH208
        with pytest.raises(BlockingIOError):
            forks._fork(request, ProgramEntry("flwr", "os", "getpid"))
        assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_who_waits_may_have_thousands_of_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("no right to so many")
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


def test_a_server_that_is_killed_ends_nothing(tmp_path: Path) -> None:
    probe = Probe(tmp_path)
    program = probe.start("wait")
    assert program is not None
    until(lambda: probe.told.exists())
    probe.process.kill()
    probe.process.wait(60)
    assert program.poll() is None
    assert probe.start("0") is None
    program.kill()
    assert program.wait(60) == UNKNOWN != 0, "nobody knows how it has ended"


def test_a_program_of_a_server_that_is_gone_is_not_waited_for_without_a_limit() -> None:
    """This process has adopted the program, which runs on."""
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


# What a command of Flower's name runs, by where it is found -------------------------------------------------

FLOWERS = os.pathsep.join(script_folders())


@pytest.mark.parametrize("name", ["flower-superlink", "flower-supernode", "flower-superexec", "flwr"])
def test_flowers_own(name: str) -> None:
    found = find(name, {"PATH": FLOWERS})
    assert found.module.startswith("flwr.") and Path(found.path).name == name
    assert callable(found.load())


@pytest.mark.parametrize(
    ("commands", "name"), [(COMMANDS, "flower-supernode"), (SERVER_COMMANDS, "flwr-serverapp")]
)
def test_ours(commands: dict[str, str], name: str) -> None:
    found = find(name, {"PATH": CommandFolder(commands).first_on(FLOWERS)})
    assert (found.module, found.function) == (commands[name], "main")


def test_one_of_another_environment(tmp_path: Path) -> None:
    other = tmp_path / "flower-supernode"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    with pytest.raises(NoEntryError, match=r"flower-supernode is another program"):
        find("flower-supernode", {"PATH": f"{tmp_path}{os.pathsep}{FLOWERS}"})


def test_one_that_is_not_flowers() -> None:
    with pytest.raises(NoEntryError, match="another program"):
        find("python", {"PATH": FLOWERS})
    with pytest.raises(NoEntryError, match="no command flower-supernode"):
        find("flower-supernode", {"PATH": ""})
