"""The settings of a deterministic run: the same seed gives the same bits.

    interpreter    hashes of strings: Python must be started with a fixed PYTHONHASHSEED
    environment    number of threads, and variables that frameworks read when they start
    frameworks     deterministic algorithms: in the ServerApp's process by ``applied``, in workers by
                   ``in_worker.handle_deterministically``

Every run seeds random number generators, see ``run.simulate``. The grid and
:mod:`flower_gpu.strategies.averaging` sum in a fixed order, and :mod:`.messages` retries messages. A worker
handles only one message, because otherwise earlier clients could change module state for later ones.

A run also depends on processors, GPUs and versions of libraries. The end of this file records and compares
them.
"""

from __future__ import annotations

import os
import platform
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from logging import WARNING
from pathlib import Path
from typing import Any, Final

import flower_gpu
from flower_gpu import frameworks
from flower_gpu.errors import ConfigError
from flower_gpu.flower import distribution
from flower_gpu.frameworks.framework import Framework, Setting
from flower_gpu.gpu.gpus import GPU
from flower_gpu.workers import threads
from flower_gpu.workers.own_process import restored_environment

HASH_SEED: Final = "PYTHONHASHSEED"
#: The value of :data:`HASH_SEED` in all processes of a deterministic run: hashes are not randomized.
FIXED: Final = "0"

_RUN_ID_BITS: Final = 63


def has_fixed_hashes() -> bool:
    """Return True if this interpreter was started with fixed hashes of strings."""
    return not sys.flags.hash_randomization


def check_interpreter() -> None:
    """Check that sets of strings have the same order in each process.

    Raises ConfigError if they do not.
    """
    if not has_fixed_hashes():
        raise ConfigError(
            f"a deterministic run needs {HASH_SEED}={FIXED} from the start of Python: sets of strings have "
            "a different order in each process, also in your ServerApp. Start Python, or Jupyter, with "
            f"{HASH_SEED}={FIXED}, or use the command flower-gpu simulate --deterministic"
        )


def check_gpus(on_oom: str, gpus: Sequence[GPU], uuids: Sequence[str]) -> None:
    """Check that all messages run on one kind of device.

    ``on_oom``: option for calls that are out of memory.
    ``gpus``: the usable GPUs.
    ``uuids``: UUIDs of the GPUs for calls.

    Raises ConfigError if chance would decide between two kinds of devices.
    """
    if uuids and on_oom == "cpu":
        raise ConfigError(
            "--on-oom cpu cannot be used in a deterministic run: chance would decide which calls run on the "
            "CPU. Use --on-oom retry"
        )
    models = sorted({gpu.name for gpu in gpus if gpu.uuid in uuids})
    if len(models) > 1:
        raise ConfigError(
            f"a deterministic run needs GPUs of one model, and these are {', '.join(models)}: choose some of "
            "them with --gpu-ids"
        )


def variables(environ: Mapping[str, str], count: int = 1) -> dict[str, str]:
    """Return the environment variables of all processes of a deterministic run.

    ``count``: number of threads, unless ``environ`` has another number.
    """
    count = threads.openmp_threads(environ) or count
    names = {threads.VARIABLE, *threads.variables(environ)}
    return {
        HASH_SEED: FIXED,
        # All libraries get the same number, because the run records one number.
        **{name: str(count) for name in sorted(names)},
        **frameworks.deterministic_variables(count, environ),
    }


def run_id(seed: int) -> int:
    """Return the id of a deterministic run. It depends on the seed only, because apps can read it."""
    return random.Random(f"flower-gpu run {seed}").getrandbits(_RUN_ID_BITS)


@contextmanager
def applied(env: Mapping[str, str]) -> Iterator[None]:
    """Use deterministic algorithms in the process of the ServerApp while the block runs.

    ``env``: environment variables to set in the block, see :func:`variables`.
    """
    previous: list[tuple[Setting, Any]] = []

    def prepare(framework: Framework, is_new: bool) -> None:
        for setting in () if is_new else framework.settings():
            with suppress(RuntimeError, AttributeError, TypeError):
                previous.append((setting, setting.get()))
        framework.be_deterministic()

    with restored_environment(env):
        os.environ.update(env)
        try:
            with threads.restored(), frameworks.each_loaded(prepare):
                threads.apply(env)
                yield
        finally:
            for setting, value in previous:
                with suppress(RuntimeError, AttributeError):
                    if setting.get() != value:
                        setting.set(value)


#: Settings that must be the same when a deterministic run is resumed.
KEYS: Final = ("cpu", "gpus", "versions")
_LIBRARIES: Final = ("numpy", "torch", "tensorflow", "jax")


def described(gpus: Sequence[GPU]) -> dict[str, Any]:
    """Return the models of processors and GPUs, and versions, in the format of a run's settings."""
    return {"cpu": _cpu_model(), "gpus": [gpu.name for gpu in gpus], "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of this package, of Python, and of libraries that results depend on."""
    libraries = {"flwr": distribution.version(), **{name: _version(name) for name in _LIBRARIES}}
    installed = {name: version for name, version in libraries.items() if version is not None}
    return {"flower-gpu": flower_gpu.__version__, **installed, "python": sys.version.split()[0]}


def check_same(earlier: Mapping[str, Any], now: Mapping[str, Any], *, is_strict: bool) -> None:
    """Check that a resumed run has the same :data:`KEYS` as the earlier run.

    Logs a warning if a setting differs. In a strict run, raises ConfigError instead.

    ``earlier``: settings of the earlier run. Missing settings are not compared.
    ``now``: settings of this run.
    """
    different = [
        f"{name} was {_shown(earlier[name])} and is {_shown(now[name])}"
        for name in KEYS
        if name in earlier and earlier[name] != now[name]
    ]
    if not different:
        return
    text = f"this deterministic run began in another environment: {'; '.join(different)}"
    if is_strict:
        raise ConfigError(
            f"{text}. Continue it in the first environment, or accept another model with --keep-going"
        )
    # Imported here because launch needs only the versions from this module, without Flower.
    from flwr.common.logger import log

    log(WARNING, "%s. The model may differ", text)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
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
