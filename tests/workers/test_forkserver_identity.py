"""Changes of the installed packages that lead to another fork server, and changes that do not."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import forkservers
import pytest
from run_programs import run, run_python

from flower_gpu.workers.forkserver import client, identity

pytestmark = pytest.mark.skipif(not client.is_supported(), reason="needs Linux 5.3")

# A user's environment writes bytecode. The environment of the tests may have turned that off.
WRITING = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
NAME = (
    "import os, sys; sys.path.append(sys.argv[1])\n"
    "from flower_gpu.workers.forkserver import identity\n"
    "print(identity.server_name(os.environ, [], []))"
)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with several kinds of installed packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    forkservers.install(folder, "package", "VALUE = 1\n")
    (folder / "namespace" / "part").mkdir(parents=True)
    (folder / "single.py").write_text("VALUE = 1\n")
    (folder / "editable.pth").write_text("/somewhere\n")
    return folder


def name(site: Path) -> str:
    """Return the name of the server that a new process would use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        identity._packages.cache_clear()
        return identity.server_name(WRITING, [], [])


def import_packages(site: Path) -> None:
    program = "import sys; sys.path.append(sys.argv[1]); import single, package"
    run_python(program, site, env=WRITING, check=True)


def compile_packages(site: Path) -> None:
    run([sys.executable, "-m", "compileall", "-q", site], env=WRITING, check=True)


@pytest.mark.parametrize("write", [import_packages, compile_packages])
def test_writing_bytecode_does_not_change_the_server(site: Path, write: Callable[[Path], None]) -> None:
    folders = site, site / "package"
    before, times = name(site), [folder.stat().st_mtime_ns for folder in folders]
    write(site)
    assert (site / "__pycache__").is_dir() and (site / "package" / "__pycache__").is_dir()
    assert all(folder.stat().st_mtime_ns > time for folder, time in zip(folders, times, strict=True))
    assert name(site) == before
    shutil.rmtree(site / "__pycache__")
    assert name(site) == before


def install_another(site: Path) -> None:
    forkservers.install(site, "another", "")


def remove(site: Path) -> None:
    shutil.rmtree(site / "package")
    shutil.rmtree(site / "package-1.0.dist-info")


def install_again(site: Path) -> None:
    """Install the same version again, as with a development build."""
    remove(site)
    forkservers.install(site, "package", "VALUE = 1\n")


CHANGES: dict[str, Callable[[Path], object]] = {
    "installed": install_another,
    "updated": lambda site: (site / "package-1.0.dist-info").rename(site / "package-1.1.dist-info"),
    "installed again": install_again,
    "removed": remove,
    "copied by hand": lambda site: (site / "namespace" / "__init__.py").touch(),
    "replaced by hand": lambda site: (site / "package" / "__init__.py").write_text("VALUE = 2\n"),
    "a single module": lambda site: (site / "single.py").write_text("VALUE = 2\n"),
    "editable": lambda site: (site / "editable.pth").write_text("/elsewhere\n"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_packages_changes_the_server(site: Path, change: Callable[[Path], object]) -> None:
    before = name(site)
    folder_ns = site.stat().st_mtime_ns
    change(site)
    os.utime(site, ns=(folder_ns, folder_ns))  # The folder's own time does not show the change.
    assert name(site) != before


def test_a_running_process_notices_a_change_of_packages(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    before = identity.server_name(WRITING, [], [])
    install_another(site)
    # The clock of the file system may be too coarse to show the change.
    os.utime(site, ns=(1, 1))
    assert identity.server_name(WRITING, [], []) != before


def test_a_change_of_this_package_changes_the_server(tmp_path: Path) -> None:
    """The test uses a copy, which is like an editable install."""
    source = Path(identity.__file__).parents[2]
    shutil.copytree(source, tmp_path / "flower_gpu", ignore=shutil.ignore_patterns("__pycache__"))

    def name_with_copy() -> str:
        env = {**WRITING, "PYTHONPATH": str(tmp_path)}
        return run_python(NAME, tmp_path, env=env, cwd=tmp_path, check=True).stdout

    before = name_with_copy()
    assert (tmp_path / "flower_gpu" / "__pycache__").is_dir()  # The first process has written it.
    assert name_with_copy() == before
    with (tmp_path / "flower_gpu" / "options.py").open("a") as file:
        file.write("# edited\n")
    assert name_with_copy() != before
