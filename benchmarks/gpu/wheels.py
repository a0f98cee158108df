"""Collect the wheels that host.sh needs on a host without a network that has torch and torchvision.

They are what pyproject.toml asks for, and pytest. All are made smaller: they are packed with LZMA. Ray goes
into a folder of its own, as only simulations beside it need it, without its jars, its library for
reinforcement learning and the pages of its dashboard.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

from benchmarks.shared.processes import ROOT

# With what they need themselves. rich and packaging are not among them: Flower takes some versions only.
_THERE = {"torch", "numpy", "matplotlib", "jinja2", "markupsafe", "nvidia-ml-py", "pygments", "tqdm"}
# Flower asks for them: uv installs what apps need, which takes a network, and uvloop makes a server faster.
_UNUSED = {"uv", "uvloop"}
# Of the optional ones: for the tests, and for the example's model.
_OPTIONAL = {"pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "safetensors"}
# Of each wheel the tag says which C library it needs; pip takes those that are named, and no older ones.
_PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)), "manylinux2014_x86_64", "any"]
_NOT_OF_RAY = ("ray/jars/", "ray/dashboard/client/", "ray/rllib/", "ray/cpp/")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.wheels", description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for them; made where it is missing")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="of that host; default: 3.12")
    parser.add_argument("--flwr", metavar="VERSION", help="default: the newest that pyproject.toml allows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own, rays = Path(folder) / "own", Path(folder) / "rays"
        wanted = [*_wanted(), *([f"flwr=={options.flwr}"] if options.flwr else [])]
        _download(wanted, own, options.python)
        _download([_ray()], rays, options.python)
        _keep(own, options.out, set())
        _keep(rays, options.out / "ray", {_name(wheel) for wheel in own.iterdir()})
    for each in (options.out, options.out / "ray"):
        found = list(each.glob("*.whl"))
        print(f"{each}: {len(found)} wheels, {sum(wheel.stat().st_size for wheel in found) / 2**20:.1f} MiB")
    return 0


def _wanted() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        if _project(requirement) not in _THERE:
            yield requirement
    for extra in ("examples", "dev"):
        for requirement in project["optional-dependencies"][extra]:
            if _project(requirement) in _OPTIONAL:
                yield requirement


def _ray() -> str:
    """Return the requirement by which Flower's Simulation Runtime asks for Ray."""
    return next(each for each in requires("flwr") or () if _project(each) == "ray").partition(";")[0].strip()


def _download(wanted: list[str], into: Path, python: str) -> None:
    tags = [f"--platform={platform}" for platform in _PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *tags]
    command += [f"--python-version={python}", "--implementation=cp", f"--dest={into}", *wanted]
    subprocess.run(command, check=True)


def _keep(found: Path, into: Path, others: set[str]) -> None:
    into.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(found.iterdir()):
        if _name(wheel) in _THERE | _UNUSED | others:
            continue
        for older in into.glob(f"{wheel.name.partition('-')[0]}-*.whl"):  # two versions cannot be installed
            older.unlink()
        pack(wheel, into / wheel.name, _NOT_OF_RAY)


def pack(wheel: Path, to: Path, left_out: tuple[str, ...]) -> None:
    """Write a wheel once more, smaller, and without some folders."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(to, "w") as new:
        for entry in old.infolist():
            if entry.filename.startswith(left_out):
                continue
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if not line.startswith(left_out)).encode()
            new.writestr(entry, data, zipfile.ZIP_LZMA)


def _project(requirement: str) -> str:
    return _normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def _name(wheel: Path) -> str:
    return _normal(wheel.name.partition("-")[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
