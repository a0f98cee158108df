"""A daemon of NVIDIA's MPS for one run, by which its workers compute on a card at the same time.

Without MPS they take turns. With it each computes on its part of the card's processors (SMs). A client finds
the daemon by a folder. Where it does not, it has no limits, and there is no error: so each worker looks at
what it has got (:func:`check`).

This is the daemon's interface of version 2. All drivers have it, and clients of version 3 have the same
variables.

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
from pathlib import Path
from typing import Final

from flower_gpu import files, unkillable
from flower_gpu.errors import ConfigError, GPUUnavailableError
from flower_gpu.gpu.gpus import mps_pipes
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
_TRIAL_S: Final = 120.0  # for a process that starts CUDA
_END_S: Final = 20.0  # for the keeper, which gives the daemon 10 s of them
_NOT_READY: Final = 807  # CUDA_ERROR_MPS_SERVER_NOT_READY: after a fault, until all are gone that were there
_TRIED_PERCENTAGE: Final = 50

# Ends the daemon, and what that has started, when the run says so, or is gone: it has the other end of stdin.
_KEEPER: Final = f"""
{_PROGRAM} -f & daemon=$!
read -r _
{{ echo quit -t 1 | timeout 10 {_PROGRAM}; kill -KILL $daemon; }} 2>/dev/null
rm -rf "${_PIPES}"
kill -KILL 0
"""


@contextmanager
def daemon(uuids: Sequence[str], parent: Path, logs: Path | None) -> Iterator[dict[str, str]]:
    """Run a daemon for these GPUs in the block; yields the variables by which processes are its clients.

    ``parent``: a folder that no other account can enter; ``logs``: one for logs, if they are kept.
    Raises ConfigError where there can be none, or where it does not limit its clients.
    """
    if any(uuid.startswith("MIG-") for uuid in uuids):
        raise ConfigError("--mps: MIG devices have parts of the processors already. Leave it out")
    if not uuids:
        raise ConfigError("--mps: this run may use no GPU (see flower-gpu gpus). Leave it out")
    if shutil.which(_PROGRAM) is None:
        raise ConfigError(
            f"--mps: there is no {_PROGRAM}. It comes with NVIDIA's driver (Ubuntu: nvidia-compute-utils-*); "
            "a container needs the capability utility (NVIDIA_DRIVER_CAPABILITIES). Or leave --mps out"
        )
    with files.temporary_folder("mps", parent) as pipes:
        logs = logs or pipes
        logs.mkdir(exist_ok=True)
        client = {_PIPES: str(pipes), _LOGS: str(logs)}
        own = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(uuids)}
        env = {**os.environ, **client, **own}
        for name in (_PERCENTAGE, _MEMORY):
            env.pop(name, None)
        whole = _sms_of_process(env)  # there is no daemon yet
        with _kept(env, logs):
            _wait_for_daemon(client, logs)
            _check_limits(whole, _sms_of_process({**env, _PERCENTAGE: str(_TRIED_PERCENTAGE)}), logs)
            yield {**client, MPS_VARIABLE: json.dumps(dict(zip(uuids, whole, strict=True)))}


@contextmanager
def _kept(env: Mapping[str, str], logs: Path) -> Iterator[None]:
    """Run the daemon, and what ends it."""
    with (logs / "daemon.log").open("wb") as log:
        keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER], env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0
        )
    assert keeper.stdin is not None
    try:
        yield
    finally:
        with suppress(OSError):  # a fork of this process may have that end, too
            keeper.stdin.write(b"\n")
            keeper.stdin.close()
        if not unkillable.end_group(keeper, _END_S):
            _log.warning(
                "the MPS daemon of this run cannot be killed: its keeper (pid %d) is in %s. The GPUs may "
                "need a reset (see dmesg)",
                *(keeper.pid, unkillable.sleeping_in(keeper.pid)),
            )


def is_of_run(environ: Mapping[str, str]) -> bool:
    """Tell whether workers with these variables are clients of a daemon of their run."""
    return bool(environ.get(MPS_VARIABLE))


def limits(share: float, memory_bytes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit a worker to a share of the processors, and to memory, of its GPUs.

    None of them where the run has no daemon.
    """
    if not is_of_run(environ):
        return {}
    # By its number a GPU may be meant as the daemon sees it, or as the client does.
    numbers = range(len(json.loads(environ[MPS_VARIABLE])))
    memory = ",".join(f"{number}={memory_bytes >> 20}M" for number in numbers)
    return {_PERCENTAGE: str(percentage(share)), _MEMORY: memory}


def percentage(share: float) -> int:
    """Return the part of the processors for a share of a GPU, in percent; a whole GPU has all of them."""
    # What others keep of the memory is no reason for less.
    return 100 if share > 0.95 else max(1, math.ceil(100 * share))


def check(uuids: Sequence[str], environ: Mapping[str, str]) -> None:
    """Check that this worker has no more of its GPU than its share, where the run has a daemon; starts CUDA.

    Ranks check theirs, each for its GPU.
    Raises GPUUnavailableError if it has, or CUDA does not start.
    """
    if not is_of_run(environ) or len(uuids) > 1:
        return
    part = int(environ[_PERCENTAGE])
    whole = json.loads(environ[MPS_VARIABLE])[uuids[0]]
    [found] = sms()
    if not _is_limited(found, whole, part):
        raise GPUUnavailableError(
            f"--mps: this worker's share is {part} % of the processors of {uuids[0]}, and CUDA shows it "
            f"{found} of {whole}: it is no client of the run's daemon, so nothing was run. See the logs in "
            f"{environ.get(_LOGS)}"
        )


def sms() -> list[int]:
    """Return how many processors (SMs) of each GPU this process may use, in CUDA's order; starts CUDA.

    Waits where the server recovers from a fault. Raises GPUUnavailableError if that fails.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GPUUnavailableError(f"NVIDIA's driver has no CUDA here: {error}") from None

    def ask(function: str, *arguments: object) -> int:
        found = ctypes.c_int()
        code = cuda[function](*([ctypes.byref(found)] if function != "cuInit" else []), *arguments)
        if code:
            raise GPUUnavailableError(f"{function} of CUDA's driver failed with error {code}")
        return found.value

    end = time.monotonic() + _START_S
    while cuda.cuInit(0) == _NOT_READY and time.monotonic() < end:
        time.sleep(0.05)
    ask("cuInit", 0)
    devices = [ask("cuDeviceGet", number) for number in range(ask("cuDeviceGetCount"))]
    return [ask("cuDeviceGetAttribute", _SM_COUNT, device) for device in devices]


def _is_limited(found: int, whole: int, part: int) -> bool:
    """Tell whether so many processors are no more than this part (percent): the driver rounds to groups."""
    wanted = whole * part / 100
    return found <= wanted + whole / 8 and not (found == whole and wanted < whole - 2)


def _sms_of_process(env: Mapping[str, str]) -> list[int]:
    """Return what a process with these variables may use: no other one can start CUDA with them."""
    code = "import json; from flower_gpu.gpu import mps; print(json.dumps(mps.sms()))"
    command = [sys.executable, "-c", code]
    with suppress(subprocess.TimeoutExpired):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        done = unkillable.run(command, timeout_s=_TRIAL_S, env=env, **streams)
        if done.returncode == 0:
            return list(json.loads(done.stdout))
        raise ConfigError(f"--mps: CUDA does not start: {done.stderr.strip().splitlines()[-1:]}")
    raise ConfigError("--mps: CUDA does not start within 2 minutes: does another MPS daemon have the GPU?")


def _wait_for_daemon(client: Mapping[str, str], logs: Path) -> None:
    end = time.monotonic() + _START_S
    while mps_pipes(client) is None:
        if time.monotonic() > end:
            raise _failed(f"{_PROGRAM} does not start", logs)
        time.sleep(0.01)


def _check_limits(whole: Sequence[int], found: Sequence[int], logs: Path) -> None:
    if not all(map(_is_limited, found, whole, [_TRIED_PERCENTAGE] * len(whole))):
        text = f"MPS does not limit its clients here: one with {_TRIED_PERCENTAGE} % of {whole} has {found}"
        raise _failed(f"{text} processors", logs)


def _failed(what: str, logs: Path) -> ConfigError:
    text = "\n".join(log.read_text("utf-8", "replace").strip() for log in sorted(logs.glob("*.log")))
    tail = "".join(f"\n  {line}" for line in text.splitlines()[-5:])
    return ConfigError(f"--mps: {what}. Leave it out, or see {path_text(logs)}{tail}")
