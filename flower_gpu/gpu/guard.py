"""The GPU guard: a worker can open the device files of the GPUs in its lease, and of no others.

The caller passes the names of these files to the worker (:func:`environment`). The worker gives up all other
device files before it imports code of an app (:func:`apply`). From then on the kernel denies them to the
worker and all its children, even if they change ``CUDA_VISIBLE_DEVICES``.
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

# Value of the variable if the device files of a GPU are unknown
_EVERYTHING: Final = "*"
_MAX_ERROR_LENGTH: Final = 200


def environment(files: Iterable[tuple[str, ...] | None]) -> dict[str, str]:
    """Return the variables with a worker's device files, or no variables if the guard is off.

    ``files``: device files of each GPU of the lease, or None if they are unknown.
    Raises ConfigError if the guard is required and impossible.
    """
    setting = GPU_GUARD.resolve(None, os.environ)
    if setting == "off":
        return {}
    paths: list[str] = []
    for files_of_gpu in files:
        if files_of_gpu is None:
            if setting == "require":
                raise _required("the driver does not report the device files of a GPU")
            return {DEVICES_VARIABLE: _EVERYTHING}
        paths += files_of_gpu
    return {DEVICES_VARIABLE: os.pathsep.join(paths)}


def problem(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this host cannot restrict workers to their GPUs, or None if it can."""
    if GPU_GUARD.resolve(None, environ) == "off":
        return "it is turned off"
    try:
        landlock.version()
    except landlock.LandlockUnavailableError as error:
        return str(error)
    return None


def describe(environ: Mapping[str, str] = os.environ) -> str:
    """Return a line about the guard of this host, or an empty text on a host without a GPU."""
    if not device_files.of_host(environ):
        return ""
    if reason := problem(environ):
        return _no_guard(reason)
    rules = f"to the GPUs of their lease (Landlock {landlock.version()})"
    if reason := _problem_of_new_process():
        is_required = GPU_GUARD.resolve(None, environ) == "require"
        spawned = "are refused" if is_required else "can use any GPU of this host"
        return f"GPU guard: the kernel keeps forked workers {rules}; spawned workers {spawned} ({reason})"
    return f"GPU guard: the kernel keeps workers {rules}"


def outside_of_workers(environ: Mapping[str, str] = os.environ) -> str:
    """Return a line for processes other than workers that import an app, or an empty text without a GPU."""
    if not device_files.of_host(environ):
        return ""
    if reason := problem(environ):
        return _no_guard(reason)
    return (
        "the GPU guard is for workers: code that a plain flwr-clientapp imports, and calls in "
        "process, can use any GPU of this host; flower-gpu supernode and simulate run apps in workers only"
    )


def _no_guard(reason: str) -> str:
    return f"no GPU guard: apps can use any GPU of this host ({reason})"


# Prints why a new process of this Python cannot be restricted, or nothing.
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
    """Return why the guard cannot be set in a new process of this Python, or an empty text.

    Spawned workers are such processes. ``sitecustomize`` and ``.pth`` files may start threads there before
    our code runs, as agents of monitoring services do. A forked worker always starts with one thread.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=_TRIAL_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"the guard cannot be tested: {error}"
    if done.returncode:
        return f"the guard cannot be tested: {done.stderr.strip()[-_MAX_ERROR_LENGTH:]}"
    return done.stdout.strip()


def why_none(variables: Mapping[str, str], *, has_worker: bool) -> str:
    """Return why a call has no guard. The text is empty if it has one, or needs none.

    ``variables``: result of :func:`environment` for the call.
    ``has_worker``: True if the call runs in a worker, and not in its caller's process.
    """
    files = variables.get(DEVICES_VARIABLE)
    if files is None or (has_worker and files != _EVERYTHING) or not device_files.of_host(os.environ):
        return ""
    if not has_worker:
        return "it runs in its caller's own process"
    return "the driver does not report the device files of its GPU"


def check(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the operator requires a guard that this host cannot provide."""
    if GPU_GUARD.resolve(None, environ) == "require" and (reason := problem(environ)):
        raise _required(reason)


def check_without_worker(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the operator requires a guard. For calls that run in their caller's process."""
    if GPU_GUARD.resolve(None, environ) == "require":
        raise _required("this call has no worker of its own")


class _ThisProcess:
    """The guard of this process.

    ``files``: value of the variable when the guard was set, or None without a guard.
    """

    files: str | None = None


_THIS_PROCESS: Final = _ThisProcess()


def apply(environ: Mapping[str, str]) -> str:
    """Give up the device files of all GPUs outside of this worker's lease, for the worker and its children.

    In a worker for several calls, only the first call does so: all calls have the same variables.

    Returns why the guard could not be set, or an empty text if it was set or is off.
    Raises ConfigError if the guard is required and impossible.
    """
    files = environ.get(DEVICES_VARIABLE)
    if files is not None and files == _THIS_PROCESS.files:
        return ""
    try:
        if is_wanted(environ):
            _drop_access(device_files.of_host(environ), granted(environ))
    except landlock.LandlockUnavailableError as error:
        if GPU_GUARD.resolve(None, environ) == "require":
            raise _required(str(error)) from None
        return str(error)
    _THIS_PROCESS.files = files
    return ""


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return True if a worker with this environment must give up device files."""
    has_files = environ.get(DEVICES_VARIABLE, _EVERYTHING) != _EVERYTHING
    return has_files and GPU_GUARD.resolve(None, environ) != "off"


def granted(environ: Mapping[str, str]) -> list[str]:
    """Return the device files that a worker with this environment may open. Without a guard these are all."""
    if not is_wanted(environ):
        return device_files.of_host(environ)
    files = [path for path in environ[DEVICES_VARIABLE].split(os.pathsep) if path]
    return [*files, *device_files.SHARED] if files else []


def _drop_access(all_files: list[str], granted_files: list[str]) -> None:
    """Give up all device files of this host except ``granted_files``.

    Creating the rules takes 2 to 3 ms, because there is one for each entry of ``/`` and of ``/dev``. The fork
    server could create them once for all workers, but then it would have to notice each new file and mount.
    """
    if not all_files:
        return
    if granted_files:
        _create_missing_file()
    with landlock.without(all_files, granted_files) as rules:
        _close_devices(device_files.numbers(all_files) - device_files.numbers(granted_files))
        rules.restrict_self()


def _close_devices(numbers: set[int]) -> None:
    """Close the open files of these devices, such as those opened by a preload function."""
    for descriptor in list(map(int, os.listdir("/proc/self/fd"))):  # noqa: PTH208 - each worker does it
        with suppress(OSError):
            if device_files.number_of(descriptor) in numbers:
                os.close(descriptor)


def _create_missing_file() -> None:
    """Let NVIDIA's helper create the device file that CUDA creates at its start. A guarded CUDA cannot."""
    if device_files.CONTROL.exists() and not device_files.MEMORY.exists():
        with suppress(OSError, subprocess.SubprocessError):
            unkillable.run(["nvidia-modprobe", "-u", "-c", "0"], timeout_s=30)


def _required(reason: str) -> ConfigError:
    return ConfigError(
        f"--gpu-guard require ({GPU_GUARD.variable}): this host cannot limit workers to their own GPUs: "
        f"{reason}. Use another host, or --gpu-guard on, which runs without the guard here"
    )
