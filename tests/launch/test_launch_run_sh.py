"""run.sh with a real virtual environment and a real pip, in a clone of a package without dependencies."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run_programs

ROOT = Path(__file__).parents[2]
PYTHON = Path(getattr(sys, "_base_executable", sys.executable)).resolve()

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "flower-gpu"
version = "0"
"""

# An editable wheel only needs a .pth file, which is enough to test run.sh.
BACKEND = """
import base64, hashlib, os, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "flower_gpu-0-py3-none-any.whl"
    info = "flower_gpu-0.dist-info"
    files = {
        "flower_gpu.pth": os.getcwd(),
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: flower-gpu\\nVersion: 0\\n"
        "Provides-Extra: examples\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    record = "".join(f"{path},," + "\\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)
    return name

def build_wheel(*args, **kwargs):
    raise NotImplementedError
"""

CLI = """
import sys
print("cli of", sys.prefix, *sys.argv[1:], sep="|")
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the package in a folder with a space in its path."""
    folder = tmp_path / "my clone"
    (folder / "flower_gpu").mkdir(parents=True)
    (folder / "flower_gpu" / "__init__.py").write_text("")
    (folder / "flower_gpu" / "cli.py").write_text(CLI)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    shutil.copy(ROOT / "run.sh", folder)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    return folder


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Environment variables in which python3 is the Python of these tests.

    Virtual environments use its pip, because installing pip into each of them takes seconds.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    venv_options = "-m venv --without-pip --system-site-packages"
    has_pip = f'[ "$1 $2" = "-m venv" ] && "{PYTHON}" -c "import pip" 2>/dev/null'
    replace_python(
        folder, f'if {has_pip}; then shift 2; set -- {venv_options} "$@"; fi\nexec "{PYTHON}" "$@"'
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FLOWER_GPU")}
    return {**kept, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def run(script: Path, *arguments: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_programs.run([str(script), *arguments], env=env, cwd=cwd)


def expected(clone: Path, *arguments: str) -> str:
    return "|".join(["cli of", str(clone / ".venv"), "launch", *arguments]) + "\n"


def test_the_first_start_installs_and_later_starts_do_not(
    clone: Path, env: dict[str, str], tmp_path: Path
) -> None:
    quickstart = str(clone / "examples" / "quickstart")
    link = tmp_path / "link"
    link.symlink_to(clone / "run.sh")
    # A folder named flower_gpu in the current folder must not be imported as the package.
    (tmp_path / "flower_gpu").mkdir()

    (clone / "backend.py").write_text("raise SystemExit('broken build')")
    failed = run(clone / "run.sh", env=env, cwd=tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.splitlines()[-1].startswith("run.sh: the installation failed")
    # The marker makes the next start create the environment again.
    assert (clone / ".venv" / ".flower-gpu-unfinished").exists()
    (clone / "backend.py").write_text(BACKEND)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    commands = [[link, "--rounds", "2", "a b"], [clone / "run.sh", "my app", "--x"]]
    processes = [subprocess.Popen(command, env=env, cwd=tmp_path, text=True, **pipes) for command in commands]
    results = [process.communicate(timeout=150) for process in processes]
    assert results[0][0] == expected(clone, quickstart, "--rounds", "2", "a b")
    assert results[1][0] == expected(clone, "my app", "--x")
    stderr = "".join(err for _, err in results)
    assert stderr.count("\n") == 1 and "only this once" in stderr
    assert not (clone / ".venv" / ".flower-gpu-unfinished").exists()

    env["FLOWER_GPU_APP"] = "other app"
    later = run(clone / "run.sh", "-v", env=env, cwd=tmp_path)
    assert (later.stdout, later.stderr) == (expected(clone, "other app", "-v"), "")

    with (clone / "pyproject.toml").open("a") as file:
        file.write("# other dependencies\n")
    assert "only this once" in run(clone / "run.sh", env=env, cwd=tmp_path).stderr
    assert run(clone / "run.sh", env=env, cwd=tmp_path).stderr == ""


def test_an_existing_environment_is_used_as_it_is(clone: Path, env: dict[str, str], tmp_path: Path) -> None:
    env["FLOWER_GPU_VENV"] = sys.prefix
    env["PYTHONPATH"] = str(clone)
    result = run(clone / "run.sh", "--rounds=1", env=env, cwd=tmp_path)
    quickstart = clone / "examples" / "quickstart"
    assert result.stdout == f"cli of|{sys.prefix}|launch|{quickstart}|--rounds=1\n"
    assert not (clone / ".venv").exists()
    env["FLOWER_GPU_VENV"] = str(tmp_path)
    result = run(clone / "run.sh", env=env, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


def without_ensurepip(folder: Path) -> None:
    """Make python3 like Debian's, which cannot create virtual environments without a further package."""
    broken_modules = folder.parent / "broken"
    broken_modules.mkdir()
    (broken_modules / "ensurepip.py").write_text("raise ModuleNotFoundError('ensurepip')\n")
    replace_python(folder, f'PYTHONPATH="{broken_modules}" exec "{PYTHON}" "$@"')


def replace_python(folder: Path, line: str) -> None:
    (folder / "python3").unlink(missing_ok=True)
    (folder / "python3").write_text(f"#!/bin/sh\n{line}\n")
    (folder / "python3").chmod(0o755)


def with_minimal_path(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return the variables with a PATH that has no other Python, no uv and no virtualenv."""
    folder = tmp_path / "bin"
    for name in ("bash", "sh", "cat", "cksum", "dirname", "env", "flock", "mkdir", "readlink", "rm", "touch"):
        if program := shutil.which(name):
            (folder / name).symlink_to(program)
    return {**env, "PATH": str(folder)}


def test_a_python_that_cannot_create_environments_is_reported(
    clone: Path, env: dict[str, str], tmp_path: Path
) -> None:
    env = with_minimal_path(env, tmp_path)
    without_ensurepip(tmp_path / "bin")
    failed = run(clone / "run.sh", env=env, cwd=tmp_path)
    version = "{}.{}".format(*sys.version_info)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == (
        "run.sh: python3 cannot make virtual environments: install what it lacks, on Debian and Ubuntu by "
        f"`apt install python{version}-venv`, or install uv or virtualenv\n"
    )
    assert not (clone / ".venv").exists()


def test_uv_creates_the_environment_if_python_cannot(
    clone: Path, env: dict[str, str], tmp_path: Path
) -> None:
    env = with_minimal_path(env, tmp_path)
    without_ensurepip(tmp_path / "bin")
    # Stands in for the two commands of uv that run.sh uses: `uv venv` and `uv pip install`.
    uv = tmp_path / "bin" / "uv"
    uv.write_text(
        f"""#!{sys.executable}
import subprocess, sys
print(*sys.argv[1:3], flush=True)
if sys.argv[1] == "venv":
    command = [sys.executable, "-m", "venv", "--without-pip", sys.argv[-1]]
    subprocess.run(command, check=True)
"""
    )
    uv.chmod(0o755)
    env["PYTHONPATH"] = str(clone)
    result = run(clone / "run.sh", env=env, cwd=tmp_path)
    assert result.stdout.splitlines()[:2] == ["venv --quiet", "pip install"]
    assert result.stdout.splitlines()[2].startswith(f"cli of|{clone / '.venv'}|")
    assert run(clone / "run.sh", env=env, cwd=tmp_path).stdout.startswith("cli of|")


def test_an_environment_keeps_its_python(clone: Path, env: dict[str, str], tmp_path: Path) -> None:
    """Another Python comes first on PATH later, when further packages have to be installed."""
    subprocess.run([PYTHON, "-m", "venv", clone / ".venv"], check=True, timeout=100)
    python = (clone / ".venv" / "bin" / "python").resolve()
    (clone / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "run.sh", clone / "tests")
    (clone / ".venv" / "mine").touch()
    replace_python(tmp_path / "bin", "echo another python >&2\nexit 0")
    result = run(clone / "tests" / "run.sh", env=env, cwd=tmp_path)
    assert "another python" not in result.stderr and "No module named pytest" in result.stderr
    assert (clone / ".venv" / ".flower-gpu-dev").exists() and (clone / ".venv" / "mine").exists()
    assert (clone / ".venv" / "bin" / "python").resolve() == python


def test_an_environment_with_a_missing_python_is_not_touched(
    clone: Path, env: dict[str, str], tmp_path: Path
) -> None:
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to("/nowhere/python3")
    result = run(clone / "run.sh", env=env, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "remove it, or set FLOWER_GPU_VENV" in result.stderr
    assert (clone / ".venv" / "bin" / "python").is_symlink()


def test_an_existing_environment_without_the_package_is_refused_with_a_command(
    clone: Path, env: dict[str, str], tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "mine"], check=True, timeout=60)
    env["FLOWER_GPU_VENV"] = str(tmp_path / "mine")
    result = run(clone / "run.sh", env=env, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    command = result.stderr.rstrip().partition("not there: ")[2]
    assert shlex.split(command) == [
        f"{tmp_path}/mine/bin/python", "-m", "pip", "install", "-e", f"{clone}[examples]",
    ]  # fmt: skip


def test_tests_refuse_the_package_of_another_checkout(
    clone: Path, env: dict[str, str], tmp_path: Path
) -> None:
    (clone / "tests").mkdir()
    shutil.copy(ROOT / "tests/run.sh", clone / "tests")
    other = tmp_path / "other"
    shutil.copytree(clone / "flower_gpu", other / "flower_gpu")
    env["FLOWER_GPU_VENV"] = sys.prefix
    env["PYTHONPATH"] = str(other)
    # The clone as the current folder makes no difference, because programs of the environment still import
    # the other checkout.
    for cwd in (tmp_path, clone):
        result = run(clone / "tests/run.sh", "--version", env=env, cwd=cwd)
        assert (result.returncode, result.stdout) == (2, "")
        assert f"is another checkout, {other}, and not this one, {clone}; to install" in result.stderr
        assert shlex.split(result.stderr.rstrip().rpartition("there: ")[2]) == [
            f"{sys.prefix}/bin/python", "-m", "pip", "install", "-e", f"{clone}[dev]",
        ]  # fmt: skip
    env["PYTHONPATH"] = str(clone)
    result = run(clone / "tests/run.sh", "--version", env=env, cwd=tmp_path)
    assert result.returncode == 0 and "pytest" in result.stdout + result.stderr


def test_a_python_that_is_too_old_is_reported(clone: Path, env: dict[str, str], tmp_path: Path) -> None:
    env = with_minimal_path(env, tmp_path)
    replace_python(tmp_path / "bin", "[ $1 = --version ] && echo Python 3.8.1 || exit 1")
    for arguments in ([], ["--help"]):
        result = run(clone / "run.sh", *arguments, env=env, cwd=tmp_path)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr == ("run.sh: needs Python 3.11 or newer; python3 here is Python 3.8.1\n")
    assert not (clone / ".venv").exists()


def test_help_lists_the_options_without_installing(env: dict[str, str], tmp_path: Path) -> None:
    had_venv = (ROOT / ".venv").exists()
    result = run(ROOT / "run.sh", "--clients", "3", "--help", env=env, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    for word in ("--clients", "--start-method", "FLOWER_GPU_VENV", "num-server-rounds"):
        assert word in result.stdout
    assert (ROOT / ".venv").exists() == had_venv
