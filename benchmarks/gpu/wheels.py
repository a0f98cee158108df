"""Collect the wheels of host.sh for a host with torch and torchvision, but without a network.

These are the dependencies in pyproject.toml, and pytest. Each wheel is packed again with LZMA, to make it
smaller. Ray goes into a folder of its own, because only simulations with Ray need it. Its jars, its library
for reinforcement learning and its dashboard's pages are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.shared.processes import ROOT

#: Installed on the host, with their dependencies. rich and packaging are missing here, because Flower accepts
#: only some of their versions.
_INSTALLED = {"torch", "numpy", "matplotlib", "jinja2", "markupsafe", "nvidia-ml-py", "pygments", "tqdm"}
#: Dependencies of Flower that a run does not need: uv installs an app's dependencies, which takes a network,
#: and uvloop makes a server faster.
_UNUSED = {"uv", "uvloop"}
#: Optional dependencies for the tests, and for the model of the example.
_OPTIONAL = {"pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "safetensors"}
#: pip accepts wheels only for the C libraries in this list, and tries no older versions.
_PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)), "manylinux2014_x86_64", "any"]
_LEFT_OUT_OF_RAY = ("ray/jars/", "ray/dashboard/client/", "ray/rllib/", "ray/cpp/")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.wheels", description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the wheels; created if missing")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="Python of the host; default: 3.12")
    options = parser.parse_args()
    ray = next(text for text in requires("flwr") or () if _name(text) == "ray").partition(";")[0].strip()
    excluded = _INSTALLED | _UNUSED
    for requirements, folder in ((list(_required()), options.out), ([ray], options.out / "ray")):
        with tempfile.TemporaryDirectory() as downloads:
            _download(requirements, downloads, options.python)
            _keep(Path(downloads), folder, excluded)
            excluded |= {_project(wheel) for wheel in Path(downloads).iterdir()}
        wheels = list(folder.glob("*.whl"))
        print(
            f"{folder}: {len(wheels)} wheels, {sum(each.stat().st_size for each in wheels) / 2**20:.1f} MiB"
        )
    return 0


def _required() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from (text for text in project["dependencies"] if _name(text) not in _INSTALLED)
    for extra in ("examples", "dev"):
        yield from (text for text in project["optional-dependencies"][extra] if _name(text) in _OPTIONAL)


def _download(requirements: list[str], into: str, python: str) -> None:
    tags = [f"--platform={platform}" for platform in _PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *tags]
    command += [f"--python-version={python}", "--implementation=cp", f"--dest={into}", *requirements]
    subprocess.run(command, check=True)


def _keep(downloads: Path, folder: Path, excluded: set[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(downloads.iterdir()):
        if _project(wheel) in excluded:
            continue
        # pip refuses a folder with two versions of a package.
        for older in folder.glob(f"{wheel.name.partition('-')[0]}-*.whl"):
            older.unlink()
        pack(wheel, folder / wheel.name, _LEFT_OUT_OF_RAY)


def pack(wheel: Path, to: Path, left_out: tuple[str, ...]) -> None:
    """Write a smaller copy of a wheel, without some of its folders."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(to, "w") as new:
        for entry in old.infolist():
            if entry.filename.startswith(left_out):
                continue
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if not line.startswith(left_out)).encode()
            new.writestr(entry, data, zipfile.ZIP_LZMA)


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def _project(wheel: Path) -> str:
    return canonicalize_name(wheel.name.partition("-")[0])


if __name__ == "__main__":
    sys.exit(main())
