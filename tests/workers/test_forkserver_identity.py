"""What makes another environment of installed packages, and so another fork server; and what does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forkservers
import pytest

from flower_gpu.workers.forkserver import client, identity

pytestmark = pytest.mark.skipif(not client.is_supported(), reason="needs Linux 5.3")

# As a user's: this environment may have been told not to write bytecode.
WRITING = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
NAME = (
    "import os, sys; sys.path.append(sys.argv[1])\n"
    "from flower_gpu.workers.forkserver import identity\n"
    "print(identity.server_name(os.environ, [], []))"
)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with installed packages of several kinds."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    forkservers.install(folder, "package", "VALUE = 1\n")
    (folder / "namespace" / "part").mkdir(parents=True)
    (folder / "single.py").write_text("VALUE = 1\n")
    (folder / "editable.pth").write_text("/somewhere\n")
    return folder


def name(site: Path) -> str:
    """Return the name of the server that a new process uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        identity._packages.cache_clear()
        return identity.server_name(WRITING, [], [])


def imports(site: Path) -> None:
    program = "import sys; sys.path.append(sys.argv[1]); import single, package"
    subprocess.run([sys.executable, "-c", program, str(site)], env=WRITING, check=True, timeout=150)


def compiles(site: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", str(site)], env=WRITING, check=True, timeout=150
    )


@pytest.mark.parametrize("write", [imports, compiles])
def test_bytecode_is_no_change(site: Path, write: Callable[[Path], None]) -> None:
    folders = site, site / "package"
    before, times = name(site), [folder.stat().st_mtime_ns for folder in folders]
    write(site)
    assert (site / "__pycache__").is_dir() and (site / "package" / "__pycache__").is_dir()
    assert all(folder.stat().st_mtime_ns > time for folder, time in zip(folders, times, strict=True))
    assert name(site) == before
    shutil.rmtree(site / "__pycache__")
    assert name(site) == before


def installed(site: Path) -> None:
    forkservers.install(site, "another", "")


def removed(site: Path) -> None:
    shutil.rmtree(site / "package")
    shutil.rmtree(site / "package-1.0.dist-info")


def installed_again(site: Path) -> None:
    """The same version, as of a development build."""
    removed(site)
    forkservers.install(site, "package", "VALUE = 1\n")


CHANGES: dict[str, Callable[[Path], object]] = {
    "installed": installed,
    "updated": lambda site: (site / "package-1.0.dist-info").rename(site / "package-1.1.dist-info"),
    "installed again": installed_again,
    "removed": removed,
    "copied by hand": lambda site: (site / "namespace" / "__init__.py").touch(),
    "replaced by hand": lambda site: (site / "package" / "__init__.py").write_text("VALUE = 2\n"),
    "a single module": lambda site: (site / "single.py").write_text("VALUE = 2\n"),
    "editable": lambda site: (site / "editable.pth").write_text("/elsewhere\n"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_packages_is_one(site: Path, change: Callable[[Path], object]) -> None:
    before = name(site)
    folder_ns = site.stat().st_mtime_ns
    change(site)
    os.utime(site, ns=(folder_ns, folder_ns))  # whatever its own time says
    assert name(site) != before


def test_a_change_is_seen_in_a_process_that_goes_on(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    before = identity.server_name(WRITING, [], [])
    installed(site)
    os.utime(site, ns=(1, 1))  # the clock for files may not have gone on
    assert identity.server_name(WRITING, [], []) != before


def test_a_change_of_this_package_is_one(tmp_path: Path) -> None:
    """In a copy, as an editable install is one."""
    source = Path(identity.__file__).parents[2]
    shutil.copytree(source, tmp_path / "flower_gpu", ignore=shutil.ignore_patterns("__pycache__"))

    def its_name() -> str:
        done = subprocess.run(
            [sys.executable, "-c", NAME, str(tmp_path)],
            env={**WRITING, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
            check=True,
        )
        return done.stdout

    before = its_name()
    assert (tmp_path / "flower_gpu" / "__pycache__").is_dir()  # written by the first
    assert its_name() == before
    with (tmp_path / "flower_gpu" / "options.py").open("a") as file:
        file.write("# edited\n")
    assert its_name() != before
