"""Checks of the Python environment and the shell: flower-gpu, Flower, its commands, and our variables."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import flower_gpu
from flower_gpu.calls.settings import command_settings
from flower_gpu.doctor import FindingParts
from flower_gpu.flower import distribution, private_names
from flower_gpu.leases.lease import VARIABLE as LEASE
from flower_gpu.options import INTERNAL_VARIABLES, SCRIPT_VARIABLES, VARIABLES
from flower_gpu.printable import path_text
from flower_gpu.workers.forkserver.identity import script_folders

#: Our prefix of environment variables, and a likely misspelling of it.
_PREFIXES = ("FLOWER_GPU", "FLWR_GPU")
_COMMANDS = ("flwr", "flower-superlink", "flower-supernode", "flwr-clientapp")


def packages() -> Iterator[FindingParts]:
    """Check the installation of flower-gpu and Flower, including Flower's version."""
    folder = Path(flower_gpu.__file__).parent
    python = ".".join(map(str, sys.version_info[:3]))
    yield "ok", f"flower-gpu {flower_gpu.__version__} in {path_text(folder)}, Python {python}"
    if not (distributions := distribution.installed()):
        yield "problem", "Flower is not installed beside flower-gpu", "pip install flwr"
        return
    yield _flowers(distributions)
    yield from _private_names()
    yield from _commands()


def _flowers(distributions: Mapping[str, metadata.Distribution]) -> FindingParts:
    """Check that a single distribution of Flower is installed, in a supported version."""
    shown = [f"{name} {package.version}" for name, package in distributions.items()]
    wanted = _wanted_flower()
    if len(distributions) > 1:
        places = sorted({path_text(str(package.locate_file(""))) for package in distributions.values()})
        both = f"{' and '.join(shown)} are both installed, in {' and '.join(places)}"
        text = f"{both}: each has overwritten files of the other"
        return (
            "problem",
            text,
            f"pip uninstall -y {' '.join(distributions)} && pip install '{wanted or 'flwr'}'",
        )
    if not _fits(next(iter(distributions.values())).version, wanted):
        return "problem", f"{shown[0]}, but flower-gpu needs {wanted}", f"pip install '{wanted}'"
    return "ok", shown[0]


def _wanted_flower() -> str:
    """Return our requirement of Flower, or "" if flower-gpu is not installed and so has no metadata."""
    try:
        required = metadata.requires("flower-gpu") or []
    except metadata.PackageNotFoundError:
        return ""
    # A requirement with ";" belongs to an extra.
    return next(
        (
            requirement
            for requirement in required
            if requirement.startswith("flwr") and ";" not in requirement
        ),
        "",
    )


def _fits(version: str, requirement: str) -> bool:
    # Import it here, so that --help works without any dependency.
    from packaging.requirements import Requirement

    return not requirement or Requirement(requirement).specifier.contains(version, prereleases=True)


def _private_names() -> Iterator[FindingParts]:
    lacking = _lacking()
    all_names = len(private_names.NAMES)
    if len(lacking) == all_names:
        yield "problem", "Flower cannot be imported", f"see why: {path_text(sys.executable)} -c 'import flwr'"
        return
    known_names = all_names - len(lacking)
    yield "ok", f"{known_names} of {all_names} private names of Flower that are used here exist"
    for name, effect in lacking.items():
        yield "note", f"Flower has no {name.replace(':', '.')}: {effect}"


def _lacking() -> dict[str, str]:
    # Use another process, because the names are in modules of Flower's servers. This process should stay
    # small.
    code = "import json; from flower_gpu.flower import private_names as n; print(json.dumps(n.lacking()))"
    process = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(process.stdout))


def _commands() -> Iterator[FindingParts]:
    """Check that Flower's commands on PATH belong to this environment."""
    # pip install --target puts the commands into a folder beside the packages.
    distribution_folders = [
        Path(str(package.locate_file("bin"))) for package in distribution.installed().values()
    ]
    folders = [folder for folder in (*map(Path, script_folders()), *distribution_folders) if folder.exists()]
    commands = {name: shutil.which(name) for name in _COMMANDS}
    missing = [name for name, path in commands.items() if path is None]
    foreign = [
        path for path in commands.values() if path and not any(map(Path(path).parent.samefile, folders))
    ]
    having = (folder for folder in folders if (folder / _COMMANDS[0]).exists())
    todo = f'export PATH="{next(having, folders[0])}:$PATH"'
    if foreign:
        text = (
            f"{', '.join(foreign)}: from an environment other than that of this flower-gpu, and first on PATH"
        )
        yield "problem", text, todo
    elif missing:
        text = f"not on PATH: {', '.join(missing)}. `flower-gpu launch` finds them, plain Flower does not"
        yield "note", text, todo


def variables() -> Iterator[FindingParts]:
    """Check the environment variables of flower-gpu that are set."""
    our_variables = {name: value for name, value in os.environ.items() if name.upper().startswith(_PREFIXES)}
    fine: dict[str, str] = {}
    for name, value in sorted(our_variables.items()):
        if name not in {*VARIABLES, *INTERNAL_VARIABLES, *SCRIPT_VARIABLES}:
            yield _unknown(name)
        elif name == LEASE and value:
            todo = f"unset {LEASE}, unless this is a worker"
            yield "problem", f"{LEASE} is set: calls from here count as part of a worker's call", todo
        elif reason := _refused({name: value}):
            yield "problem", reason, f"correct or unset {name}"
        else:
            fine[name] = value
    if reason := _refused(fine):
        yield "problem", reason, "unset one of them"
    elif fine:
        yield "ok", ", ".join(f"{name}={value}" for name, value in fine.items())
    elif not our_variables:
        yield "ok", "none is set: all settings are defaults or come from the code"


def _unknown(name: str) -> FindingParts:
    near = difflib.get_close_matches(name.upper(), [*VARIABLES, *SCRIPT_VARIABLES], 1, cutoff=0.75)
    todo = f"{near[0]} is meant?" if near else "see the variables in docs/reference/environment.md"
    return "problem", f"{name} is set, but nothing reads it", todo


def _refused(environ: Mapping[str, str]) -> str:
    """Return the reason why variables are invalid, or "" if they are valid."""
    try:
        for name in environ:
            if name in VARIABLES:
                VARIABLES[name].resolve(None, environ)
        # Some values are invalid only on this host, such as more cores than it has.
        command_settings({}, environ)
    except (ValueError, TypeError) as error:  # a ConfigError is a ValueError
        return str(error)
    return ""
