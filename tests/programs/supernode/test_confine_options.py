"""Options that ``flower-gpu supernode --confine`` refuses before it starts a process, and its messages."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from flwr.cli import install
from run_programs import run_python

from flower_gpu import seccomp
from flower_gpu.cli import main as cli
from flower_gpu.cli import supernode
from flower_gpu.errors import ConfigError
from flower_gpu.programs import clientapp
from flower_gpu.programs.confine import NEVER, WITH_PORTS, Allowed, not_enforced
from flower_gpu.workers import confinement

pytestmark = [
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]


def environment(*line: str) -> dict[str, str]:
    arguments = cli.build_parser().parse_args(["supernode", *line])
    return supernode.environment(arguments, os.environ)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FLWR_HOME", raising=False)
    for name in ("data", "keys", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "keys" / "node").write_text("a key")
    return tmp_path


def test_the_named_folders_and_ports_reach_the_messages(home: Path) -> None:
    data, results = str(home / "data"), str(home / "results")
    line = ("--confine", "--data-dir", data, "--data-dir", results, "--write-dir", results)
    allowed = Allowed.from_environment(environment(*line, "--allow-connect", "443"))
    assert allowed == Allowed((data, results), (results,), (443,))
    assert Allowed.from_environment(environment("--confine=strict")) == Allowed()
    assert Allowed.from_environment(environment()) is None


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--data-dir {home}/data", "--data-dir needs --confine"),
        ("--confine --data-dir {home}/nothing", "there is no such folder"),
        ("--confine --data-dir {home}", "Flower's files of this account"),
        ("--confine --data-dir /", "Name a folder that holds data alone"),
        ("--confine --data-dir {home}/keys -- --auth-supernode-private-key {home}/keys/node", "a key of"),
        ("--confine --write-dir {prefix}", "apps could change programs or libraries"),
        ("--confine --write-dir /usr/share", "apps could change programs or libraries"),
        ("--confine --write-dir {state}", "flower-gpu's own files of this account"),
        ("--confine --data-dir {home}/keys -- --ssl-keyfile {home}/keys/node", "a key of"),
        (
            "--confine --write-dir {home}/data --data-dir {home}/data/one",
            "is within --write-dir .*Leave it out",
        ),
        ("--confine --write-dir {home}/data --data-dir {home}/link", "is within --write-dir .*Leave it out"),
    ],
)
def test_folders_with_secrets_or_programs_are_refused(home: Path, line: str, text: str) -> None:
    from flower_gpu.workers import state_folder

    state = state_folder.made_state_dir()
    (state / "inside").mkdir(exist_ok=True)
    (home / "data" / "one").mkdir()
    (home / "link").symlink_to(home / "data" / "one")
    words = line.format(home=home, prefix=sys.prefix, state=state).split()
    with pytest.raises(ConfigError, match=text):
        environment(*words)


def test_a_link_to_a_folder_of_keys_is_refused(home: Path) -> None:
    (home / ".ssh").mkdir()
    (home / "data" / "link").symlink_to(home / ".ssh")
    with pytest.raises(ConfigError, match=r"\.ssh, where keys and passwords are kept"):
        environment("--confine", "--data-dir", str(home / "data" / "link"))


def test_libraries_beside_secrets_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(home))
    with pytest.raises(ConfigError, match=r"Flower's files of this account.*CUDA_HOME"):
        environment("--confine")
    monkeypatch.setenv("CUDA_HOME", str(home / "data"))
    with pytest.raises(ConfigError, match="apps could change programs or libraries"):
        environment("--confine", "--write-dir", str(home / "data"))


def test_an_mps_daemon_is_mentioned_and_its_folder_must_hold_nothing_else(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(home / "data"))
    text = f"errors on a GPU for all clients of the MPS daemon in {home / 'data'}"
    assert text not in not_enforced(Allowed())
    (home / "data" / "control").touch()
    assert text in not_enforced(Allowed())
    environment("--confine")
    (home / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(home))
    with pytest.raises(ConfigError, match=r"Flower's files of this account.*CUDA_MPS_PIPE_DIRECTORY"):
        environment("--confine")


def test_apps_get_the_folder_that_a_link_leads_to_at_the_start(home: Path) -> None:
    (home / "link").symlink_to(home / "data")
    allowed = Allowed.from_environment(environment("--confine", "--data-dir", str(home / "link")))
    assert allowed == Allowed((str(home / "data"),))


@pytest.mark.parametrize("more", ["", "--allow-connect 443"])
def test_the_start_message_lists_the_actions_that_are_not_refused(home: Path, more: str) -> None:
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
    (log,) = home.glob("runs/*/supernode-0.log")
    assert all(text in seen and text in log.read_text() for text in NEVER)
    assert [text in seen for text in WITH_PORTS] == [bool(more)] * len(WITH_PORTS)


#: Makes landlock_create_ruleset fail with an error number, as it does on an older kernel.
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


def test_a_kernel_without_landlock_is_refused() -> None:
    seccomp.check()
    no_such_call = "38"  # ENOSYS
    completed = run_python(_OLDER, no_such_call, "supernode", "--confine", "--", "--insecure")
    assert completed.returncode == 2, completed.stderr
    assert "apps cannot be confined on this host: the kernel has no Landlock" in completed.stderr


@pytest.mark.parametrize("ports", [(), ("--allow-connect", "443")])
@pytest.mark.parametrize(
    ("version", "missing"),
    [(2, ["emptying files", "TCP", "signals"]), (4, ["signals"]), (6, [])],
)
def test_strict_refuses_a_kernel_without_all_protections(
    monkeypatch: pytest.MonkeyPatch, version: int, missing: list[str], ports: tuple[str, ...]
) -> None:
    # The code asks only for the version. The man page landlock(7) says what each version can refuse.
    monkeypatch.setattr("flower_gpu.landlock.version", lambda: version)
    # Without ports, TCP sockets are refused by other means.
    missing = [word for word in missing if ports or word != "TCP"]
    not_refused = confinement.not_refused(with_ports=bool(ports))
    assert [any(word in text for word in missing) for text in not_refused] == [True] * len(missing)
    if missing:
        with pytest.raises(ConfigError, match="this kernel does not refuse"):
            environment("--confine=strict", *ports)
    else:
        environment("--confine=strict", *ports)
    environment("--confine", *ports)


def bundle(version: str) -> bytes:
    """Return an app in the format in which Flower sends it."""
    config = f"""
        [project]
        name = "app"
        version = "{version}"
        description = ""
        license = "Apache-2.0"
        [tool.flwr.app]
        publisher = "somebody"
        [tool.flwr.app.components]
        serverapp = "app:app"
        clientapp = "app:app"
        """.encode()
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("pyproject.toml", config)
        digest = hashlib.sha256(config).hexdigest()
        archive.writestr(".info/CONTENT", f"pyproject.toml,{digest},{8 * len(config)}")
    return written.getvalue()


def test_an_app_is_installed_only_in_the_folder_of_apps(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower unpacks an app outside of the worker. The app's version is part of the folder's name."""
    monkeypatch.setenv("FLWR_HOME", str(home / "flwr"))
    monkeypatch.setattr(install, "validate_and_install", install.validate_and_install)
    elsewhere = bundle("1/../../../elsewhere")
    with monkeypatch.context() as patch:
        patch.setenv("FLWR_HOME", str(home / "other"))
        installed = install.install_from_fab(elsewhere, skip_prompt=True)
        assert installed.resolve().parent == home, "Flower itself would leave the folder"
    paths_before = set(home.iterdir())
    clientapp.install_among_apps()
    with pytest.raises(ConfigError, match="leads out of the folder of apps"):
        install.install_from_fab(elsewhere, skip_prompt=True)
    assert set(home.iterdir()) == paths_before
    assert install.install_from_fab(bundle("1.0"), skip_prompt=True).parent == home / "flwr" / "apps"
