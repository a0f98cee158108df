"""The folder that comes first on a SuperNode's `PATH`: its owner, its content and its interpreter."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from properties import examples
from run_programs import run

from flower_gpu.errors import ConfigError
from flower_gpu.programs import commands
from flower_gpu.programs.flwr_clientapp import takes_lease
from flower_gpu.workers import state_folder
from flower_gpu.workers.forkserver import identity

COMMAND = "flwr-clientapp"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

# Creates the folder and immediately reads a command in it, as a new SuperNode may do.
MAKE_AND_READ = """
import ast, sys
from flower_gpu.programs import commands
sys.stdin.readline()
folder = commands.CommandFolder().make()
print(folder, len(ast.parse((folder / "python" / "flwr-clientapp").read_text()).body))
"""
# An interpreter that writes its arguments to a file.
SHOW = '#!/bin/sh\nprintf \'%s\\0\' "$@" >"$SHOWN"\n'


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(folder))
    return folder


def test_only_its_owner_can_enter_the_folder(state: Path) -> None:
    previous = os.umask(0)
    try:
        folder = commands.CommandFolder().make()
    finally:
        os.umask(previous)
    assert folder.is_relative_to(state)
    for path in (state, folder.parent, folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o777 == 0o700, path
        assert path.stat().st_uid == os.getuid()


def test_the_folder_comes_first_on_the_path_and_a_variable_holds_the_rule(state: Path) -> None:
    for with_lease, word in ((True, "lease"), (False, "start")):
        env = commands.fast_start({"PATH": "/somewhere:/bin", "OTHER": "kept"}, with_lease=with_lease)
        first, *rest = env["PATH"].split(":")
        assert first == str(commands.CommandFolder().make())
        assert rest == ["/somewhere", "/bin"]
        assert (env["OTHER"], env["FLOWER_GPU_SUPERNODE"]) == ("kept", word)
        assert takes_lease(env) == with_lease
        assert shutil.which(COMMAND, path=env["PATH"]) == f"{first}/{COMMAND}"
    without = commands.fast_start({}, with_lease=True)
    assert without["PATH"] == f"{first}:{os.defpath}"


@pytest.mark.parametrize("word", ["", "lease", "Start", "no", "0"])
def test_an_unknown_rule_requires_a_lease(word: str) -> None:
    assert takes_lease({"FLOWER_GPU_SUPERNODE": word})
    assert takes_lease({})


def test_a_folder_that_is_not_safe_is_refused(state: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    state.mkdir()
    state_folder.state_dir().symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"must be a folder of this user .* FLOWER_GPU_STATE_DIR") as caught:
        commands.CommandFolder().make()
    assert str(state) in str(caught.value)
    assert list(tmp_path.rglob(COMMAND)) == []


def test_processes_that_create_the_folder_at_the_same_time_find_it_complete(state: Path) -> None:
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE_AND_READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    for maker in makers:  # most of them wait for this line by now
        assert maker.stdin is not None
        maker.stdin.write("\n")
        maker.stdin.flush()
    outputs = {maker.communicate(timeout=150)[0] for maker in makers}
    assert [maker.returncode for maker in makers] == [0] * len(makers)
    (line,) = outputs
    folder, statements = line.split()
    assert int(statements) == len(ast.parse(Path(folder, "python", COMMAND).read_text()).body)
    assert sorted(path.name for path in Path(folder).iterdir()) == sorted([*commands.COMMANDS, "python"])
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name]


def test_a_supernode_recreates_a_removed_folder(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so whenever it waits, and in the same place, because its environment is the same."""
    monkeypatch.syspath_prepend(state)
    folder = commands.CommandFolder().make()
    as_in_supernode = (folder / "python" / "flower-supernode").read_text().splitlines()[0]
    wait = "from flower_gpu.programs import commands, supernode as own; make = commands.CommandFolder().make"
    wait += "; own.SuperNodeTime(0.01, 1.0, before_waiting=make).sleep(3.0)"
    shutil.rmtree(folder)
    python = [sys.executable, *identity.interpreter_flags()]
    subprocess.run([*python, "-c", f"{as_in_supernode}\n{wait}"], timeout=150, check=True)
    assert os.access(folder / COMMAND, os.X_OK)


def test_each_environment_has_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = [commands.CommandFolder().make(), commands.CommandFolder().make()]
    assert folders[0] == folders[1]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "other" / "python"))
        folders.append(commands.CommandFolder().make())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), *sys.path])
        folders.append(commands.CommandFolder().make())
    assert len(set(folders)) == 3
    flags = [sys.executable, "-O", "-W", "error::UserWarning", "-c"]
    make = "from flower_gpu.programs import commands; print(commands.CommandFolder().make())"
    optimised = Path(run([*flags, make], check=True).stdout.strip())
    assert optimised not in folders
    assert "-O" in (optimised / COMMAND).read_text()


def test_the_command_starts_in_a_virtual_environment_with_an_unusual_name(
    state: Path, tmp_path: Path
) -> None:
    folder = tmp_path / 'it\'s a "$HOME" `id` \\n é 100% {env}'
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder], check=True, timeout=150
    )
    site = next((folder / "lib").glob("python*")) / "site-packages"
    paths = [entry for entry in sys.path if entry and Path(entry).is_dir()]
    (site / "ours.pth").write_text("\n".join(paths))
    make = "from flower_gpu.programs import commands; print(commands.CommandFolder().make())"
    python = str(folder / "bin" / "python")
    creation = run([python, "-c", make], check=True)
    command = f"{creation.stdout.strip()}/{COMMAND}"
    # Flower's help shows that the right interpreter ran, so the name was quoted correctly.
    completed = run(
        [command, "--help"],
        cwd="/",
        env={**os.environ, "FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0"},
    )
    assert (completed.returncode, "Run a Flower ClientApp" in completed.stdout) == (0, True), completed.stderr


# Paths and arguments may hold all characters that the file system accepts, also bytes that are not UTF-8.
_CHARACTERS = st.sampled_from(
    string.ascii_letters + string.digits + " '\"$`!*?~#&;|<>(){}[]%\n\t\r=:,@^-.é中"
)
_TEXTS = st.text(_CHARACTERS, min_size=1, max_size=12)


@settings(
    max_examples=examples(30),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(_TEXTS, st.lists(_TEXTS, max_size=3), st.lists(_TEXTS, max_size=4))
@example("it's", ["a b", 'c"d', "e\\f", "{path}"], ["--token", "", "$HOME", "-"])
@example("a\\x", ["a/\U0001f600/lib", "a/\udcff/lib"], ["argument"])
@example("a\\N \\u12", [], [])
def test_paths_and_arguments_arrive_unchanged(
    tmp_path: Path, name: str, entries: list[str], arguments: list[str]
) -> None:
    folder = tmp_path / name.replace("/", "_")
    folder.mkdir(exist_ok=True)
    python, shown = folder / "python", tmp_path / "shown"
    python.write_text(SHOW)
    python.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        patch.setattr(sys, "path", [*(f"/{entry}" for entry in entries), *sys.path])
        command = commands.CommandFolder().make() / COMMAND
        path = list(sys.path)
    subprocess.run([command, *arguments], env={"SHOWN": str(shown)}, timeout=150, check=True)
    *_, program = shown.read_bytes().decode().split("\0")[:-1][: -len(arguments) or None]
    assert shown.read_bytes().decode().split("\0")[:-1][-len(arguments) :] == arguments or not arguments
    assert program == str(command.parent / "python" / COMMAND)
    # A real interpreter would read this program.
    tree = ast.parse(Path(program).read_text())
    (assigned,) = (node for node in tree.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(assigned.value) == [entry for entry in path if entry]


def test_a_folder_with_a_colon_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path / "a:b"))
    with pytest.raises(ConfigError):
        commands.fast_start({"PATH": "/bin"}, with_lease=True)


@needs_root
def test_a_folder_on_a_noexec_file_system_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "noexec"
    state.mkdir()
    make = "from flower_gpu.programs import commands; commands.fast_start({}, with_lease=True)"
    mount = f"mount -t tmpfs -o noexec,mode=0700 none {shlex.quote(str(state))} || exit 77"
    completed = run(
        ["unshare", "-m", "sh", "-c", f'{mount}; exec "$0" "$@"', sys.executable, "-c", make],
        env={**os.environ, "FLOWER_GPU_STATE_DIR": str(state)},
    )
    if completed.returncode == 77:
        pytest.skip("file systems cannot be mounted here")
    assert "ConfigError" in completed.stderr, (
        "messages would be handled by Flower's own command, without a lease"
    )
