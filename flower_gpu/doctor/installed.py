"""What is installed: flower-gpu, Flower, and whether its commands are those of this environment."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import flower_gpu
from flower_gpu.doctor.findings import Found
from flower_gpu.launch.environment import script_folders
from flower_gpu.printable import path_text

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
        editable = ", editable: changes of the clone take effect at once" if _is_editable(found) else ""
        yield "ok", f"{text}{editable}"


def _is_editable(found: metadata.Distribution) -> bool:
    try:
        told = json.loads(found.read_text("direct_url.json") or "{}")
        return bool(told.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return False


def flower() -> Iterator[Found]:
    """Check Flower's version and where its commands come from."""
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        yield "problem", "Flower is not installed beside flower-gpu", "pip install flwr"
        return
    wanted = _wanted("flwr")
    if not fits(version, wanted):
        yield "problem", f"flwr {version}, but flower-gpu needs {wanted}", f"pip install 'flwr{wanted}'"
    else:
        yield "ok", f"flwr {version}"
    yield from _commands()


def _commands() -> Iterator[Found]:
    folders = [Path(folder) for folder in script_folders()]
    missing, foreign = [], []
    for name in _COMMANDS:
        found = shutil.which(name)
        if found is None:
            missing.append(name)
        elif not any(_same(Path(found).parent, folder) for folder in folders):
            foreign.append(found)
    # That of a virtual environment: where python itself is.
    todo = f'export PATH="{folders[0]}:$PATH"'
    if foreign:
        text = f"{', '.join(foreign)} belong to another environment than this flower-gpu"
        yield "problem", f"{text}, and Flower starts its parts by their names", todo
    if missing:
        text = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not on PATH"
        yield "note", f"{text}; `flower-gpu launch` finds them, plain Flower does not", todo
    if not foreign and not missing:
        yield "ok", "its commands are on PATH, from this environment"


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _wanted(library: str) -> str:
    """Return the versions of a library that our metadata allow, such as ``>=1.40,<2``."""
    try:
        requirements = metadata.requires("flower-gpu") or []
    except metadata.PackageNotFoundError:
        return ""
    for requirement in requirements:
        found = re.fullmatch(r"([\w.-]+)\s*\(?([^;()]*)\)?\s*", requirement)  # those of extras have a marker
        if found and found[1].lower() == library:
            return ",".join(sorted(found[2].replace(" ", "").split(","), reverse=True))
    return ""


def fits(version: str, wanted: str) -> bool:
    """Tell whether a version is one of ``>=1.40,<2``; other kinds of conditions are not looked at."""
    number = _numbers(version)
    for condition in wanted.split(","):
        if condition.startswith(">=") and number < _numbers(condition[2:]):
            return False
        if condition.startswith("<") and condition[1:2].isdigit() and number >= _numbers(condition[1:]):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:  # 2 and 2.0 are the same
        numbers.pop()
    return tuple(numbers)
