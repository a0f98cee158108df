"""The GPU guard: a worker can open the device files of its lease's GPUs, and of no other.

The caller tells a worker which files these are (:func:`environment`). The worker gives up all others before
any code of an app is imported (:func:`apply`), and the kernel holds it to that, with all that it starts,
whatever they set ``CUDA_VISIBLE_DEVICES`` to.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Final

from flower_gpu import landlock, unkillable
from flower_gpu.errors import ConfigError
from flower_gpu.gpu import device_files
from flower_gpu.options import DEVICES_VARIABLE, GPU_GUARD

# The value of the variable where nobody knows a GPU's files.
_EVERYTHING: Final = "*"
_MOST_TOLD: Final = 200  # characters of an error that nobody expects


def environment(files: Iterable[tuple[str, ...] | None]) -> dict[str, str]:
    """Return the variables that name a worker's device files, if this process's environment has a guard.

    ``files``: the files of each GPU of its lease; None where they are not known.
    Raises ConfigError if a guard is required and there can be none.
    """
    wanted = GPU_GUARD.resolve(None, os.environ)
    if wanted == "off":
        return {}
    found: list[str] = []
    for each in files:
        if each is None:
            if wanted == "require":
                raise _required("the driver does not tell the device files of a GPU")
            return {DEVICES_VARIABLE: _EVERYTHING}
        found += each
    return {DEVICES_VARIABLE: os.pathsep.join(found)}


def problem(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why workers of this host cannot be kept from GPUs; None where they can."""
    if GPU_GUARD.resolve(None, environ) == "off":
        return "it is turned off"
    try:
        landlock.version()
    except landlock.LandlockUnavailableError as error:
        return str(error)
    return None


def describe(environ: Mapping[str, str] = os.environ) -> str:
    """Return a line about the guard of this host; empty where there is no GPU to be kept from."""
    if not device_files.of_host(environ):
        return ""
    if reason := problem(environ):
        return _none(reason)
    rules = f"to the GPUs of their lease (Landlock {landlock.version()})"
    if reason := _problem_of_new_process():
        is_required = GPU_GUARD.resolve(None, environ) == "require"
        spawned = "are refused" if is_required else "can use any GPU of this host"
        return f"GPU guard: the kernel keeps forked workers {rules}; spawned workers {spawned} ({reason})"
    return f"GPU guard: the kernel keeps workers {rules}"


def outside_of_workers(environ: Mapping[str, str] = os.environ) -> str:
    """Return a line for where processes other than workers import an app; empty where there is no GPU."""
    if not device_files.of_host(environ):
        return ""
    if reason := problem(environ):
        return _none(reason)
    return (
        "the GPU guard is for workers: code that a plain flwr-clientapp imports, and calls in "
        "process, can use any GPU of this host; flower-gpu supernode and simulate run apps in workers only"
    )


def _none(reason: str) -> str:
    return f"no GPU guard: apps can use any GPU of this host ({reason})"


# Says why a new process of this Python could not be restricted; nothing if it could.
_TRIAL: Final = """
from flower_gpu import landlock
try:
    with landlock.without(()) as rules:
        rules.restrict_self()
except landlock.LandlockUnavailableError as error:
    print(error)
"""
_TRIAL_S: Final = 60.0


@cache
def _problem_of_new_process() -> str:
    """Return why the guard cannot be set in a new process of this Python; empty if it can.

    Spawned workers are such processes. ``sitecustomize`` and ``.pth`` files may start threads there before
    any code of ours runs, as agents of monitoring services do. A fork has one thread.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=_TRIAL_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"the guard cannot be tried: {error}"
    if done.returncode:
        return f"the guard cannot be tried: {done.stderr.strip()[-_MOST_TOLD:]}"
    return done.stdout.strip()


def why_none(told: Mapping[str, str], *, has_worker: bool) -> str:
    """Return why a call has no guard; empty where it has one, or none is wanted or there is nothing to guard.

    ``told``: what :func:`environment` returned for the call.
    ``has_worker``: whether it runs in a worker of its own.
    """
    files = told.get(DEVICES_VARIABLE)
    if files is None or (has_worker and files != _EVERYTHING) or not device_files.of_host(os.environ):
        return ""
    if not has_worker:
        return "it runs in its caller's own process"
    return "the driver does not tell the device files of its GPU"


def check(environ: Mapping[str, str]) -> None:
    """Look whether there is a guard where the operator requires one.

    Raises ConfigError if there can be none.
    """
    if GPU_GUARD.resolve(None, environ) == "require" and (reason := problem(environ)):
        raise _required(reason)


def check_without_worker(environ: Mapping[str, str]) -> None:
    """Refuse a call in a process that must not give anything up, where the operator requires a guard.

    Raises ConfigError if so.
    """
    if GPU_GUARD.resolve(None, environ) == "require":
        raise _required("this call has no worker of its own")


class _ThisProcess:
    """The guard of this process.

    ``files``: the variable with which the guard was set; None before.
    """

    files: str | None = None


_THIS_PROCESS: Final = _ThisProcess()


def apply(environ: Mapping[str, str]) -> str:
    """Give up, in this worker and all that it starts, every GPU's files but those of its lease.

    A worker that runs several calls does so for the first one, because all of them have the same variables.

    Returns why this worker could not be guarded; empty if it is, or if no guard is wanted.
    Raises ConfigError if a guard is required and there can be none.
    """
    files = environ.get(DEVICES_VARIABLE)
    if files is not None and files == _THIS_PROCESS.files:
        return ""
    try:
        if is_wanted(environ):
            _give_up(device_files.of_host(environ), granted(environ))
    except landlock.LandlockUnavailableError as error:
        if GPU_GUARD.resolve(None, environ) == "require":
            raise _required(str(error)) from None
        return str(error)
    _THIS_PROCESS.files = files
    return ""


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Tell whether a worker with this environment is to be kept from GPUs."""
    is_told = environ.get(DEVICES_VARIABLE, _EVERYTHING) != _EVERYTHING
    return is_told and GPU_GUARD.resolve(None, environ) != "off"


def granted(environ: Mapping[str, str]) -> list[str]:
    """Return the device files that a worker with this environment may open; all where none are refused."""
    if not is_wanted(environ):
        return device_files.of_host(environ)
    files = [path for path in environ[DEVICES_VARIABLE].split(os.pathsep) if path]
    return [*files, *device_files.SHARED] if files else []


def _give_up(all_files: list[str], own: list[str]) -> None:
    """Give up the device files of this host but its own; nothing where there are none.

    The rules take 2 to 3 ms, one for each entry of ``/`` and of ``/dev``. Where workers are forked from they
    could be made once for all, but then somebody would have to notice each new file and mount.
    """
    if not all_files:
        return
    if own:
        _make_missing()
    with landlock.without(all_files, own) as rules:
        _close_devices(device_files.numbers(all_files) - device_files.numbers(own))
        rules.restrict_self()


def _close_devices(numbers: set[int]) -> None:
    """Close open files of these devices, such as those of a preload function."""
    for descriptor in list(map(int, os.listdir("/proc/self/fd"))):  # noqa: PTH208 - each worker does it
        with suppress(OSError):
            if device_files.number_of(descriptor) in numbers:
                os.close(descriptor)


def _make_missing() -> None:
    """Have NVIDIA's own helper make the file that CUDA makes when it starts: guarded, it could not."""
    if device_files.CONTROL.exists() and not device_files.MEMORY.exists():
        with suppress(OSError, subprocess.SubprocessError):
            unkillable.run(["nvidia-modprobe", "-u", "-c", "0"], timeout_s=30)


def _required(reason: str) -> ConfigError:
    return ConfigError(
        f"--gpu-guard require ({GPU_GUARD.variable}): this host cannot keep workers to their own GPUs: "
        f"{reason}. Use another host, or --gpu-guard on, which runs without the guard here"
    )
