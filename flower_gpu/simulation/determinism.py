"""The settings of a deterministic run: the same seed gives the same bits.

    interpreter    hashes of texts, by PYTHONHASHSEED: this process must be started with it
    environment    threads, and what frameworks read when they start
    frameworks     deterministic algorithms: in the ServerApp's process by ``here``, in workers by
                   ``in_worker.handle_deterministically``

Random number generators are seeded in every run, see ``run.simulate``. Sums in order are the grid's and
:mod:`flower_gpu.flower.averaging`'s, retries are in :mod:`.messages`. A worker handles one message, because
what a client finds in modules would otherwise depend on the clients before it. The end of this file lists
what a run depends on beside the app and its seed: processors, GPUs, versions of libraries.
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
    """Tell whether this interpreter was started with fixed hashes of texts."""
    return not sys.flags.hash_randomization


def check_interpreter() -> None:
    """Check that this process orders sets of texts in the same way each time.

    Raises ConfigError if it does not.
    """
    if not has_fixed_hashes():
        raise ConfigError(
            f"a deterministic run needs {HASH_SEED}={FIXED} from the start of Python: sets of texts have "
            "another order in each process, also in your ServerApp. Start Python, or Jupyter, with "
            f"{HASH_SEED}={FIXED}, or use the command flower-gpu simulate --deterministic"
        )


def check_gpus(on_oom: str, gpus: Sequence[GPU], uuids: Sequence[str]) -> None:
    """Check that each message can only run on one kind of device.

    Raises ConfigError if it may be one or another.
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

    ``count``: their threads, where ``environ`` does not say another number.
    """
    count = threads.openmp_threads(environ) or count
    names = {threads.VARIABLE, *threads.variables(environ)}
    return {
        HASH_SEED: FIXED,
        **{name: str(count) for name in sorted(names)},  # one number, which is recorded
        **frameworks.deterministic_variables(count, environ),
    }


def run_id(seed: int) -> int:
    """Return the id of a run, which apps can see."""
    return random.Random(f"flower-gpu run {seed}").getrandbits(_RUN_ID_BITS)


@contextmanager
def here(env: Mapping[str, str]) -> Iterator[None]:
    """Use deterministic algorithms in this process, which runs the ServerApp, until the block ends.

    ``env``: environment variables of the process meanwhile, see :func:`variables`.
    """
    before: list[tuple[Setting, Any]] = []

    def prepare(framework: Framework, is_new: bool) -> None:
        if not is_new:
            before.extend((setting, setting.get()) for setting in _flags(framework))
        framework.be_deterministic()

    with restored_environment(env):
        os.environ.update(env)
        try:
            with threads.restored(), frameworks.each_loaded(prepare):
                threads.apply(env)
                yield
        finally:
            for setting, value in before:
                with suppress(RuntimeError, AttributeError):
                    if setting.get() != value:
                        setting.set(value)


def _flags(framework: Framework) -> Iterator[Setting]:
    for setting in framework.settings():
        with suppress(RuntimeError, AttributeError, TypeError):
            setting.get()
            yield setting


#: Settings that a deterministic run goes on with.
KEYS: Final = ("cpu", "gpus", "versions")
_LIBRARIES: Final = ("numpy", "torch", "tensorflow", "jax")


def described(gpus: Sequence[GPU]) -> dict[str, Any]:
    """Return the models of processors and GPUs, and versions, as the settings of a run have them."""
    return {"cpu": _cpu_model(), "gpus": [gpu.name for gpu in gpus], "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of this package, of libraries that a model depends on, and of Python."""
    installed = {"flwr": distribution.version(), **{name: _version(name) for name in _LIBRARIES}}
    found = {name: version for name, version in installed.items() if version is not None}
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
