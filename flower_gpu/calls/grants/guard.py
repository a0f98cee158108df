"""The GPU guard: a worker can open the device files of the GPUs in its lease, and of no others.

The caller passes the names of these files to the worker in an environment variable. The worker gives up all
other device files before it imports code of an app. From then on the kernel denies them to the worker and all
its children, even if they change ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Final

from flower_gpu import landlock
from flower_gpu.calls.grants.grant import Grant, Terms
from flower_gpu.errors import ConfigError
from flower_gpu.gpu import device_files, drivers
from flower_gpu.gpu.device_files import EVERYTHING
from flower_gpu.leases.lease import Lease
from flower_gpu.options import DEVICES_VARIABLE, GPU_GUARD
from flower_gpu.workers import events, own_process

_MAX_ERROR_LENGTH: Final = 200


class GPUGuard(Grant):
    """The device files that a worker may open."""

    def of_lease(self, lease: Lease | None, environ: Mapping[str, str]) -> dict[str, str]:
        """Pass the device files of the lease to the worker, unless the guard is off.

        Raises ConfigError if the guard is required and impossible.
        """
        setting = GPU_GUARD.resolve(None, os.environ)
        if setting == "off":
            return {}
        files = [share.device_files for share in lease.shares] if lease is not None else []
        if None in files:
            if setting == "require":
                raise _required("the driver does not report the device files of a GPU")
            return {DEVICES_VARIABLE: EVERYTHING}
        return {DEVICES_VARIABLE: os.pathsep.join(path for paths in files for path in paths or ())}

    def describe(self, terms: Terms, env: Mapping[str, str]) -> dict[str, Any]:
        """Return why the call has no guard."""
        files, has_worker = env.get(DEVICES_VARIABLE), terms.method.is_own_process
        if files is None or (has_worker and files != EVERYTHING) or not device_files.of_host(os.environ):
            return {}
        reason = "the driver does not report the device files of its GPU"
        if not has_worker:
            reason = "it runs in its caller's own process"
        return _unguarded(reason, is_expected=not has_worker)

    def in_worker(self, lease: Lease | None) -> None:
        """Give up the device files of all GPUs outside of this worker's lease, for ever.

        In a worker for several calls, only the first call does so: all calls have the same variables.

        Raises ConfigError if the guard is required and impossible.
        """
        is_required = GPU_GUARD.resolve(None, os.environ) == "require"
        if own_process.is_inside():
            if is_required:
                raise _required("this call has no worker of its own")
            return
        files = os.environ.get(DEVICES_VARIABLE)
        if files is None or files != _THIS_PROCESS.files:
            try:
                if device_files.are_limited(os.environ):
                    _drop_access(device_files.of_host(os.environ), device_files.granted(os.environ))
                _THIS_PROCESS.files = files
            except landlock.LandlockUnavailableError as error:
                if is_required:
                    raise _required(str(error)) from None
                events.send("no_guard", reason=str(error))

    def on_event(self, event: Mapping[str, Any], lease: Lease | None, record: dict[str, Any]) -> bool:
        """Record why the worker has no guard."""
        if event.get("event") != "no_guard":
            return False
        record |= _unguarded(event["reason"], is_expected=problem() is not None)
        return True


def _unguarded(reason: str, *, is_expected: bool) -> dict[str, str]:
    """Log once that the kernel does not keep calls from GPUs of other leases. Return the field of the trace.

    ``is_expected``: True if this host has no guard at all, or the user runs calls in a way without a guard.
    Then the line is not a warning.
    """
    from flower_gpu.calls import notices

    text = f"no GPU guard: calls can use any GPU of this host ({reason})"
    if is_expected:
        notices.say_once(text, logging.INFO)
    else:
        notices.say_once(f"{text}. --gpu-guard require ({GPU_GUARD.variable}) refuses such calls")
    return {"no_guard": reason}


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


# Prints why a new process of this Python cannot be restricted, or an empty text.
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


def check(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the operator requires a guard that this host cannot provide."""
    if GPU_GUARD.resolve(None, environ) == "require" and (reason := problem(environ)):
        raise _required(reason)


class _ThisProcess:
    """The guard of this process.

    ``files``: value of the variable when the guard was set, or None without a guard.
    """

    files: str | None = None


_THIS_PROCESS: Final = _ThisProcess()


def _drop_access(all_files: list[str], granted_files: list[str]) -> None:
    """Give up all device files of this host except ``granted_files``.

    Creating the rules takes 2 to 3 ms, because there is one for each entry of ``/`` and of ``/dev``. The fork
    server could create them once for all workers, but then it would have to notice each new file and mount.
    """
    if not all_files:
        return
    if granted_files:
        drivers.of_host().create_files()  # a guarded process could not
    with landlock.without(all_files, granted_files) as rules:
        _close_devices(device_files.numbers(all_files) - device_files.numbers(granted_files))
        rules.restrict_self()


def _close_devices(numbers: set[int]) -> None:
    """Close the open files of these devices, such as those opened by a preload function."""
    for descriptor in list(map(int, os.listdir("/proc/self/fd"))):  # noqa: PTH208 - each worker does it
        with suppress(OSError):
            if device_files.number_of(descriptor) in numbers:
                os.close(descriptor)


def _required(reason: str) -> ConfigError:
    return ConfigError(
        f"--gpu-guard require ({GPU_GUARD.variable}): this host cannot limit workers to their own GPUs: "
        f"{reason}. Use another host, or --gpu-guard on, which runs without the guard here"
    )
