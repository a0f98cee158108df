"""Shares of a GPU's processors, through an MPS daemon that serves one run.

Without MPS, the processes on a card take turns. With it, each computes on its part of the card's processors
(SMs). CUDA finds the daemon through a folder. If it does not find the daemon, it runs without limits and
without an error, so each worker checks its number of SMs.

The module uses version 2 of the daemon's interface. All drivers have it, and clients of version 3 use the
same variables.

Sources: "Multi-Process Service" (https://docs.nvidia.com/deploy/mps/), environment variables; the manual page
nvidia-cuda-mps-control(1).
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flower_gpu import files, unkillable
from flower_gpu.calls.grants.grant import Grant, Terms
from flower_gpu.errors import ConfigError, GPUUnavailableError
from flower_gpu.gpu.nvidia import mps_pipes
from flower_gpu.leases.lease import Lease
from flower_gpu.options import MPS_VARIABLE
from flower_gpu.printable import path_text

_log = logging.getLogger("flwr.flower_gpu")

_PROGRAM: Final = "nvidia-cuda-mps-control"
_PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
_LOGS: Final = "CUDA_MPS_LOG_DIRECTORY"
_PERCENTAGE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_SM_COUNT: Final = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_START_S: Final = 30.0
_TRIAL_S: Final = 120.0  # limit of a process that starts CUDA
_END_S: Final = 20.0  # limit for the keeper's exit, including 10 s for the daemon
# CUDA_ERROR_MPS_SERVER_NOT_READY: returned after a fault, until all clients of the failed server have exited
_NOT_READY: Final = 807
_TRIED_PERCENTAGE: Final = 50

# The keeper is a shell that ends the daemon and its children when the run exits, or writes a line to the
# keeper's stdin.
_KEEPER: Final = f"""
{_PROGRAM} -f & daemon=$!
read -r _
{{ echo quit -t 1 | timeout 10 {_PROGRAM}; kill -KILL $daemon; }} 2>/dev/null
rm -rf "${_PIPES}"
kill -KILL 0
"""


@contextmanager
def daemon(uuids: Sequence[str], parent: Path, logs: Path | None) -> Iterator[dict[str, str]]:
    """Run a daemon for these GPUs. Yields the environment variables of its clients.

    ``parent``: folder for temporary files that no other account can enter.
    ``logs``: folder for logs, or None if they are not kept.
    Raises ConfigError if the daemon cannot run, or does not limit its clients.
    """
    if any(uuid.startswith("MIG-") for uuid in uuids):
        raise ConfigError("--mps: MIG devices have parts of the processors already. Leave it out")
    if not uuids:
        raise ConfigError("--mps: this run may not use any GPU (see flower-gpu gpus). Leave it out")
    if shutil.which(_PROGRAM) is None:
        raise ConfigError(
            f"--mps: there is no {_PROGRAM}. It comes with NVIDIA's driver (Ubuntu: nvidia-compute-utils-*); "
            "a container needs the capability utility (NVIDIA_DRIVER_CAPABILITIES). Or leave --mps out"
        )
    with files.temporary_folder("mps", parent) as pipes:
        logs = logs or pipes
        logs.mkdir(exist_ok=True)
        client = {_PIPES: str(pipes), _LOGS: str(logs)}
        devices = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(uuids)}
        env = {**os.environ, **client, **devices}
        for name in (_PERCENTAGE, _MEMORY):
            env.pop(name, None)
        whole = _sms_of_process(env)  # before the daemon runs
        with _running(env, logs):
            _wait_for_daemon(client, logs)
            _check_limits(whole, _sms_of_process({**env, _PERCENTAGE: str(_TRIED_PERCENTAGE)}), logs)
            yield {**client, MPS_VARIABLE: json.dumps(dict(zip(uuids, whole, strict=True)))}


@contextmanager
def _running(env: Mapping[str, str], logs: Path) -> Iterator[None]:
    """Run the daemon and its keeper."""
    with (logs / "daemon.log").open("wb") as log:
        keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER], env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0
        )
    assert keeper.stdin is not None
    try:
        yield
    finally:
        # A fork of this process may also have this end of the pipe, so closing it is not enough.
        with suppress(OSError):
            keeper.stdin.write(b"\n")
            keeper.stdin.close()
        if not unkillable.end_group(keeper, _END_S):
            _log.warning(
                "the MPS daemon of this run cannot be killed: its keeper (pid %d) is in %s. The GPUs may "
                "need a reset (see dmesg)",
                *(keeper.pid, unkillable.sleeping_in(keeper.pid)),
            )


class MPSShare(Grant):
    """Limits a worker to a share of its GPUs' processors and memory, as a client of the run's daemon."""

    def adjust(self, lease: Lease, terms: Terms) -> Lease:
        """Give the worker the share that the call requests."""
        return replace(lease, compute=terms.settings.gpu.compute)

    def of_lease(self, lease: Lease | None, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that limit the worker, or none if its run has no daemon."""
        if lease is None or not _is_of_run(environ):
            return {}
        # The number of a GPU may be the daemon's or the client's number, so all numbers get the limit.
        numbers = range(len(json.loads(environ[MPS_VARIABLE])))
        memory_bytes = max(share.memory_bytes for share in lease.shares)
        memory = ",".join(f"{number}={memory_bytes >> 20}M" for number in numbers)
        return {_PERCENTAGE: str(_percentage(lease)), _MEMORY: memory}

    def describe(self, terms: Terms, env: Mapping[str, str]) -> dict[str, Any]:
        """Return the percentage of the processors."""
        if terms.own_gpu_lease is None or not _is_of_run(os.environ):
            return {}
        return {"mps_percentage": _percentage(terms.own_gpu_lease)}

    def fault(self, error: BaseException, lease: Lease, environ: Mapping[str, str]) -> str:
        """Explain an error that a fault of any client of the MPS server may have caused."""
        from flower_gpu.frameworks.out_of_memory import says_fault

        if not (_is_of_run(environ) and says_fault(error)):
            return ""
        return (
            f"a fault on GPU {lease.shares[0].index} has ended all calls that this run had there, as they "
            "share it by one MPS server (--mps). Another call may have caused it: without --mps, only that "
            "call would fail"
        )

    def in_worker(self, lease: Lease | None) -> None:
        """Check that this worker's share limits its use of the GPU's processors. Starts CUDA.

        Has no effect without a daemon. In a call with ranks, each rank checks its own GPU.
        Raises GPUUnavailableError if the worker has more than its share, or CUDA does not start.
        """
        if lease is not None and len(lease.shares) == 1 and _is_of_run(os.environ):
            uuid = lease.shares[0].uuid
            percent = int(os.environ[_PERCENTAGE])
            whole = json.loads(os.environ[MPS_VARIABLE])[uuid]
            [usable] = sms()
            if not _is_limited(usable, whole, percent):
                raise GPUUnavailableError(
                    f"--mps: this worker's share is {percent} % of the processors of {uuid}, and CUDA shows "
                    f"it {usable} of {whole}: it is not a client of the run's daemon, so the call was not "
                    f"run. See the logs in {os.environ.get(_LOGS)}"
                )


def _is_of_run(environ: Mapping[str, str]) -> bool:
    """Return True if workers with these variables are clients of a daemon of their run."""
    return bool(environ.get(MPS_VARIABLE))


def _percentage(lease: Lease) -> int:
    """Return the percentage of each GPU's processors for a worker.

    By default, it equals the worker's share of the memory.
    """
    share = lease.compute
    if share is None:
        share = 1.0 if lease.alone else max(part.memory_bytes / part.total_bytes for part in lease.shares)
    # A lease of a whole GPU lacks the reserve and the memory of other programs, but gets all processors.
    return 100 if share > 0.95 else max(1, math.ceil(100 * share))


def sms() -> list[int]:
    """Return the number of processors (SMs) of each GPU that this process may use. Starts CUDA.

    Waits while the MPS server recovers from a fault. Raises GPUUnavailableError if CUDA does not start.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GPUUnavailableError(f"NVIDIA's driver has no CUDA here: {error}") from None

    def call(function: str, *arguments: object) -> int:
        value = ctypes.c_int()
        code = cuda[function](*([ctypes.byref(value)] if function != "cuInit" else []), *arguments)
        if code:
            raise GPUUnavailableError(f"{function} of CUDA's driver failed with error {code}")
        return value.value

    deadline = time.monotonic() + _START_S
    while cuda.cuInit(0) == _NOT_READY and time.monotonic() < deadline:
        time.sleep(0.05)
    call("cuInit", 0)
    devices = [call("cuDeviceGet", number) for number in range(call("cuDeviceGetCount"))]
    return [call("cuDeviceGetAttribute", _SM_COUNT, device) for device in devices]


def _is_limited(usable: int, whole: int, percent: int) -> bool:
    """Return True if the number of usable processors is within the percentage.

    The driver rounds to groups of processors, so up to an eighth more is accepted.
    """
    allowed = whole * percent / 100
    return usable <= allowed + whole / 8 and not (usable == whole and allowed < whole - 2)


def _sms_of_process(env: Mapping[str, str]) -> list[int]:
    """Return the SMs of each GPU in a new process, because CUDA reads the variables at its start only."""
    code = "import json; from flower_gpu.calls.grants import mps; print(json.dumps(mps.sms()))"
    command = [sys.executable, "-c", code]
    with suppress(subprocess.TimeoutExpired):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        done = unkillable.run(command, timeout_s=_TRIAL_S, env=env, **streams)
        if done.returncode == 0:
            return list(json.loads(done.stdout))
        raise ConfigError(f"--mps: CUDA does not start: {done.stderr.strip().splitlines()[-1:]}")
    raise ConfigError("--mps: CUDA does not start within 2 minutes: does another MPS daemon have the GPU?")


def _wait_for_daemon(client: Mapping[str, str], logs: Path) -> None:
    deadline = time.monotonic() + _START_S
    while mps_pipes(client) is None:
        if time.monotonic() > deadline:
            raise _failed(f"{_PROGRAM} does not start", logs)
        time.sleep(0.01)


def _check_limits(whole: Sequence[int], usable: Sequence[int], logs: Path) -> None:
    if not all(map(_is_limited, usable, whole, [_TRIED_PERCENTAGE] * len(whole))):
        text = f"MPS does not limit its clients here: one with {_TRIED_PERCENTAGE} % of {whole} has {usable}"
        raise _failed(f"{text} processors", logs)


def _failed(reason: str, logs: Path) -> ConfigError:
    text = "\n".join(log.read_text("utf-8", "replace").strip() for log in sorted(logs.glob("*.log")))
    tail = "".join(f"\n  {line}" for line in text.splitlines()[-5:])
    return ConfigError(f"--mps: {reason}. Leave it out, or see {path_text(logs)}{tail}")
