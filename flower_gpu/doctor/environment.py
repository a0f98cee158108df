"""The Python environment and the shell: flower-gpu, Flower and its commands, and variables of ours."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import flower_gpu
from flower_gpu.calls.settings import GPUSettings, HostSettings
from flower_gpu.doctor import Found
from flower_gpu.flower import private_names
from flower_gpu.leases.lease import VARIABLE as LEASE
from flower_gpu.options import INTERNAL_VARIABLES, SCRIPT_VARIABLES, VARIABLES, value_of
from flower_gpu.printable import path_text
from flower_gpu.workers.forkserver.identity import script_folders

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

# What ours begin with, and what somebody may have written for it.
_ALMOST = ("FLOWER_GPU", "FLOWERGPU", "FLWR_GPU", "FLOWER_GPUS")
_LIKE = 0.75
_COMMANDS = ("flwr", "flower-superlink", "flower-supernode", "flwr-clientapp")


def ourselves() -> Iterator[Found]:
    """Check flower-gpu itself."""
    folder = Path(flower_gpu.__file__).parent
    python = ".".join(map(str, sys.version_info[:3]))
    text = f"flower-gpu {flower_gpu.__version__} in {path_text(folder)}, Python {python}"
    try:
        found = metadata.distribution("flower-gpu")
    except metadata.PackageNotFoundError:
        yield "note", f"{text}, not installed", f"{sys.executable} -m pip install ."
        return
    if found.version != flower_gpu.__version__:
        todo = f"{sys.executable} -m pip install . (in the clone)"
        yield "problem", f"{text}, but {found.version} is installed", todo
    else:
        yield "ok", text


def flower() -> Iterator[Found]:
    """Check Flower's version and where its commands come from."""
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        yield "problem", "Flower is not installed beside flower-gpu", "pip install flwr"
        return
    wanted = wanted_flower()
    if not wanted.contains(version, prereleases=True):
        yield "problem", f"flwr {version}, but flower-gpu needs {wanted}", f"pip install 'flwr{wanted}'"
    else:
        yield "ok", f"flwr {version}"
    yield from _private_names()
    yield from _commands()


def _private_names() -> Iterator[Found]:
    lacking = _lacking()
    all_names = len(private_names.NAMES)
    if len(lacking) == all_names:
        yield "problem", "Flower cannot be imported", f"see why: {path_text(sys.executable)} -c 'import flwr'"
        return
    there = all_names - len(lacking)
    yield "ok", f"{there} of {all_names} private names of Flower that are used here are there"
    for name, effect in lacking.items():
        yield "note", f"Flower has no {name.replace(':', '.')}: {effect}"


def _lacking() -> dict[str, str]:
    # In another process: they are in modules of Flower's servers, and this one is to stay small.
    code = "import json; from flower_gpu.flower import private_names as n; print(json.dumps(n.lacking()))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def wanted_flower() -> SpecifierSet:
    """Return the versions of Flower that our metadata allow; all of them where there are no metadata."""
    from packaging.requirements import Requirement  # here: --help works without any dependency
    from packaging.specifiers import SpecifierSet

    try:
        requirements = map(Requirement, metadata.requires("flower-gpu") or [])
    except metadata.PackageNotFoundError:
        return SpecifierSet()
    # Those of extras have a marker.
    return next(
        (each.specifier for each in requirements if each.name == "flwr" and not each.marker), SpecifierSet()
    )


def _commands() -> Iterator[Found]:
    # pip install --target puts them into a folder beside the packages.
    beside = Path(str(metadata.distribution("flwr").locate_file("bin")))
    folders = [folder for folder in (*map(Path, script_folders()), beside) if folder.exists()]
    found = {name: shutil.which(name) for name in _COMMANDS}
    missing = [name for name, path in found.items() if path is None]
    foreign = [path for path in found.values() if path and not any(map(Path(path).parent.samefile, folders))]
    having = (folder for folder in folders if (folder / _COMMANDS[0]).exists())
    todo = f'export PATH="{next(having, folders[0])}:$PATH"'
    if foreign:
        text = f"{', '.join(foreign)} belong to another environment than this flower-gpu"
        yield "problem", f"{text}, and Flower starts its parts by their names", todo
    if missing:
        text = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not on PATH"
        yield "note", f"{text}; `flower-gpu launch` finds them, plain Flower does not", todo
    if not foreign and not missing:
        yield "ok", "its commands are on PATH, from this environment"


def variables() -> Iterator[Found]:
    """Check the variables that are set."""
    ours = {name: value for name, value in os.environ.items() if name.upper().startswith(_ALMOST)}
    fine = []
    for name in sorted(ours):
        if name not in {*VARIABLES, *INTERNAL_VARIABLES, *SCRIPT_VARIABLES}:
            yield _unknown(name)
        elif name == LEASE and ours[name]:
            todo = f"unset {LEASE}, unless this is a worker"
            yield "problem", f"{LEASE} is set: calls from here are taken for part of a worker's", todo
        elif (reason := _refused(partial(_read, name, ours[name]))) is not None:
            yield "problem", reason, f"correct or unset {name}"
        else:
            fine.append(name)
    together = {name: value for name, value in ours.items() if name in fine}
    if (reason := _refused(lambda: GPUSettings.resolve(environ=together))) is not None:
        yield "problem", reason, "unset one of them"
    elif fine:
        yield "ok", ", ".join(f"{name}={ours[name]}" for name in fine)
    elif not ours:
        yield "ok", "none is set: all settings are the defaults, or the code's"


def _unknown(name: str) -> Found:
    near = difflib.get_close_matches(name.upper(), [*VARIABLES, *SCRIPT_VARIABLES], 1, _LIKE)
    todo = f"{near[0]} is meant?" if near else "see docs/reference/environment.md for those that there are"
    return "problem", f"{name} is set, and nothing reads it", todo


def _read(name: str, value: str) -> None:
    alone: Mapping[str, str] = {name: value}
    if name in VARIABLES:
        value_of(name, alone)
    GPUSettings.resolve(environ=alone)
    HostSettings.resolve(environ=alone)


def _refused(read: Callable[[], object]) -> str | None:
    try:
        read()
    except (ValueError, TypeError) as error:  # a ConfigError is a ValueError
        return str(error)
    return None
