"""What ``flower-gpu supernode --confine`` refuses before anything is started, and what it says."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flower_gpu import seccomp
from flower_gpu.cli import supernode
from flower_gpu.errors import ConfigError
from flower_gpu.flower.confine import NEVER, WITH_PORTS, Allowed
from flower_gpu.flower.flwr_clientapp import RULE_VARIABLE
from flower_gpu.workers import confinement

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]


def environment(*line: str) -> dict[str, str]:
    parser = argparse.ArgumentParser()
    supernode.add_arguments(parser)
    arguments = parser.parse_args(line)
    arguments.command = "supernode"
    return supernode.environment(arguments, os.environ)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FLWR_HOME", raising=False)
    for name in ("data", "keys", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "keys" / "node").write_text("a key")
    return tmp_path


def test_what_is_named_reaches_the_messages(home: Path) -> None:
    data, results = str(home / "data"), str(home / "results")
    line = ("--confine", "--data-dir", data, "--data-dir", results, "--write-dir", results)
    found = Allowed.from_environment(environment(*line, "--allow-connect", "443"))
    assert found == Allowed((data, results), (results,), (443,))
    assert Allowed.from_environment(environment("--confine=strict")) == Allowed()
    assert Allowed.from_environment(environment()) is None


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--data-dir {home}/data", "--data-dir goes with --confine"),
        ("--allow-connect 443", "--allow-connect goes with --confine"),
        ("--confine --data-dir {home}/nothing", "there is no such folder"),
        ("--confine -- --allow-runtime-dependency-installation", "cannot be had together"),
        ("--confine --write-dir {home}/keys/node", "there is no such folder"),
        ("--confine --data-dir {home}", "what Flower keeps of this account"),
        ("--confine --data-dir /", "Name a folder that holds data alone"),
        ("--confine --data-dir {home}/keys -- --auth-supernode-private-key {home}/keys/node", "a key of"),
        ("--confine --data-dir {home}/keys -- --auth-supernode-private-key={home}/keys/node", "a key of"),
        ("--confine --write-dir {prefix}", "apps could change programs or libraries"),
        ("--confine --write-dir /usr/share", "apps could change programs or libraries"),
        ("--confine --write-dir {state}", "what flower-gpu keeps of this account"),
        ("--confine --data-dir {state}/inside", "what flower-gpu keeps of this account"),
    ],
)
def test_what_would_give_an_app_too_much_is_refused(home: Path, line: str, text: str) -> None:
    from flower_gpu.workers import state_folder

    state = state_folder.made_state_dir()
    (state / "inside").mkdir(exist_ok=True)
    words = line.format(home=home, prefix=sys.prefix, state=state).split()
    with pytest.raises(ConfigError, match=text):
        environment(*words)


def test_a_link_to_a_folder_of_keys_is_refused(home: Path) -> None:
    (home / ".ssh").mkdir()
    (home / "data" / "link").symlink_to(home / ".ssh")
    with pytest.raises(ConfigError, match=r"\.ssh, where keys and passwords are kept"):
        environment("--confine", "--data-dir", str(home / "data" / "link"))


@pytest.mark.parametrize("more", ["", "--allow-connect 443"])
def test_what_is_not_refused_is_said_at_the_start(home: Path, more: str) -> None:
    line = [sys.executable, "-m", "flower_gpu.cli", "supernode", "--confine", "--count", "1", *more.split()]
    line += ["--log-dir", str(home / "runs"), "--", "--insecure", "--superlink", "127.0.0.1:1"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        seen = ""
        while NEVER[-1] not in seen:
            text = process.stdout.readline()
            assert text, seen
            seen += text
        process.terminate()
    assert all(one in seen for one in NEVER)
    assert (WITH_PORTS in seen) == bool(more)


#: Makes the kernel answer landlock_create_ruleset as another one would: with a version, or with an error.
_OLDER = """
import ctypes, struct, sys
from flower_gpu import seccomp
refused = 0x50000 | int(sys.argv[1])
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, refused), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
program = struct.pack("@HP", len(lines), ctypes.addressof(code))
assert libc.syscall(seccomp._SECCOMP[seccomp._machine()], 1, 0, program) == 0
from flower_gpu.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def on_kernel_without_landlock(*line: str) -> subprocess.CompletedProcess[str]:
    no_such_call = "38"  # ENOSYS
    return subprocess.run(
        [sys.executable, "-c", _OLDER, no_such_call, *line], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("option", ["--confine", "--confine=strict"])
def test_a_kernel_without_landlock_is_refused(option: str) -> None:
    seccomp.check()
    done = on_kernel_without_landlock("supernode", option, "--", "--insecure")
    assert done.returncode == 2, done.stderr
    assert "apps cannot be confined on this host: the kernel has no Landlock" in done.stderr


@pytest.mark.parametrize(
    ("version", "missing"),
    [(2, ["emptying files", "TCP", "signals"]), (3, ["TCP", "signals"]), (4, ["signals"]), (6, [])],
)
def test_strict_refuses_a_kernel_that_cannot_do_all(
    monkeypatch: pytest.MonkeyPatch, version: int, missing: list[str]
) -> None:
    # The version is all that is asked for; what kernels of these versions refuse is landlock(7)'s word.
    monkeypatch.setattr("flower_gpu.landlock.version", lambda: version)
    assert [any(word in one for word in missing) for one in confinement.not_refused()] == [True] * len(
        missing
    )
    if missing:
        with pytest.raises(ConfigError, match="this kernel does not refuse"):
            environment("--confine=strict")
    else:
        environment("--confine=strict")
    environment("--confine")


def test_packages_of_an_apps_choice_are_not_installed(tmp_path: Path) -> None:
    program = "from flower_gpu.flower.flwr_clientapp import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--allow-runtime-dependency-installation"],
        env={**os.environ, **Allowed().environment(), RULE_VARIABLE: "lease"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "--allow-runtime-dependency-installation cannot be had together" in done.stderr
