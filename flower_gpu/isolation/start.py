"""How a worker process comes to be: one function per start method, and the choice between them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from flower_gpu.errors import ConfigError, WorkerStartError
from flower_gpu.isolation import child, transport
from flower_gpu.isolation.call import Call, task_name
from flower_gpu.isolation.native import initialized_cuda_devices, release_openmp_threads

#: Held while pipes are made and a worker is started: a fork in another thread must not inherit the
#: worker's ends of them before the caller has closed its copies.
start_lock = threading.Lock()

# Write ends of life pipes. A fork that kept one would keep other callers' workers alive.
_life_ends: set[int] = set()

_BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from flower_gpu.isolation.child import spawned; spawned()"


class Process(Protocol):
    """A started worker, leader of its own process group."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    def wait(self) -> int:
        """Wait for the end and return the exit status (``-n`` for signal ``n``)."""
        ...


class Starter(Protocol):
    """Starts a worker for ``call`` with its ends of the lines to the caller."""

    def __call__(self, call: Call, descriptors: child.Descriptors, stdout: int, stderr: int) -> Process:
        """Start it."""
        ...


def choose(start_method: str) -> str:
    """Turn ``"auto"`` into the method for this process, and check a method that was asked for.

    A ``flwr-clientapp`` is new for every message: forking it imports nothing twice and pickles nothing.
    Once it has initialised CUDA a fork of it could not use the GPU; then the call runs in the process
    itself if that can see one GPU only, and in a fresh interpreter otherwise.

    Returns
    -------
    str
        One of the names in :data:`STARTERS`, ``"inline"`` or ``"in-process"``.
    """
    gpus = initialized_cuda_devices()
    if start_method == "fork" and gpus is not None:
        raise ConfigError(
            "start_method='fork' cannot be used: this process has initialised CUDA, and a fork of it "
            "could not. Use 'auto' or 'spawn'"
        )
    if start_method != "auto":
        return start_method
    if Path(sys.argv[0]).name == "flwr-clientapp" and sys.platform == "linux":
        if gpus is None:
            return "fork"
        if gpus == 1:
            return "inline"
    return "spawn"


def spawn(call: Call, descriptors: child.Descriptors, stdout: int, stderr: int) -> Process:
    """Start a fresh interpreter. Works everywhere; pays for every import."""
    # Not multiprocessing's spawn: that imports the caller's __main__ again in every worker, which runs a
    # script without a main guard once more, and leaves a resource tracker process with every caller.
    request = transport.create("flower-gpu-request")
    try:
        try:
            transport.dump((call.task, call.args, dict(call.kwargs)), request)
        except Exception as error:
            raise WorkerStartError(
                f"{task_name(call.task)} or its arguments cannot be passed to a worker "
                f"({type(error).__name__}: {error}). Name the function as 'package.module:function' "
                "and pass plain values"
            ) from error
        descriptors = child.Descriptors(descriptors.life, descriptors.events, descriptors.reply, request)
        record = {"descriptors": vars(descriptors), "env": dict(call.env), "setup": call.setup}
        return _Spawned(
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _BOOTSTRAP.format(path=sys.path),
                    json.dumps(record),
                    f"flower-gpu: {call.label}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **call.env},
                pass_fds=tuple(vars(descriptors).values()),
                process_group=0,
            )
        )
    except OSError as error:
        raise WorkerStartError(f"cannot start a worker: {error}") from error
    finally:
        os.close(request)


def fork(call: Call, descriptors: child.Descriptors, stdout: int, stderr: int) -> Process:
    """Fork this process. Nothing is pickled or imported again; CUDA must be untouched here."""
    release_openmp_threads()
    process = multiprocessing.get_context("fork").Process(
        target=child.forked,
        args=(
            descriptors,
            stdout,
            stderr,
            call.env,
            call.setup,
            (call.task, call.args, dict(call.kwargs)),
        ),
        name=f"flower-gpu: {call.label}",
    )
    try:
        process.start()
    except AssertionError as error:
        raise WorkerStartError(
            "a daemonic multiprocessing process may not fork workers; use start_method='spawn'"
        ) from error
    except OSError as error:
        raise WorkerStartError(f"cannot start a worker: {error}") from error
    with suppress(OSError):  # so that the group exists before anybody tries to end it
        os.setpgid(process.pid or 0, process.pid or 0)
    return _Forked(process)


STARTERS: dict[str, Starter] = {"spawn": spawn, "fork": fork}


def life_pipe() -> tuple[int, int]:
    """Return a pipe (read end, write end) whose write end stays in this very process."""
    read, write = os.pipe()
    _life_ends.add(write)
    return read, write


def close_life_end(write: int) -> None:
    """Close the write end: the kernel then kills what is left of the worker's process group."""
    _life_ends.discard(write)
    os.close(write)


class _Spawned:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def wait(self) -> int:
        return self._process.wait()


class _Forked:
    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    def wait(self) -> int:
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        return -signal.SIGKILL if code is None else code


def _after_fork_in_child() -> None:
    global start_lock
    start_lock = threading.Lock()  # the thread that held it does not exist here
    for write in _life_ends:
        with suppress(OSError):
            os.close(write)
    _life_ends.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
