"""What a run depends on beside the app and its seed: processors, GPUs, versions of libraries."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from logging import WARNING
from pathlib import Path
from typing import Any, Final

import flower_gpu
from flower_gpu.errors import ConfigError
from flower_gpu.gpu.gpus import GPU

#: Settings that a deterministic run goes on with.
KEYS: Final = ("cpu", "gpus", "versions")
_LIBRARIES: Final = ("flwr", "numpy", "torch", "tensorflow", "jax")


def described(gpus: Sequence[GPU]) -> dict[str, Any]:
    """Return the models of processors and GPUs, and versions, as the settings of a run have them."""
    return {"cpu": _cpu_model(), "gpus": [gpu.name for gpu in gpus], "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of this package, of libraries that a model depends on, and of Python."""
    found = {name: told for name in _LIBRARIES if (told := _version(name)) is not None}
    return {"flower-gpu": flower_gpu.__version__, **found, "python": sys.version.split()[0]}


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], *, is_strict: bool) -> None:
    """Check that a run goes on where it began; what ``before`` does not have is left out.

    Raises ConfigError if something is different, and the run is strict. Else a line in the log says so.
    """
    different = [
        f"{name} was {_shown(before[name])} and is {_shown(now[name])}"
        for name in KEYS
        if name in before and before[name] != now[name]
    ]
    if not different:
        return
    text = f"this deterministic run began in another environment: {'; '.join(different)}"
    if is_strict:
        raise ConfigError(
            f"{text}. Continue it in the first environment, or accept another model with --keep-going"
        )
    from flwr.common.logger import log  # launch, which asks for versions only, does without Flower

    log(WARNING, "%s. The model may be another one", text)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not on Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
