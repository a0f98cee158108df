"""Tasks of workers on a real GPU. Importing this module imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

GIB = 1024**3
_WAIT_S = 100.0


def take(nbytes: int) -> dict[str, Any]:
    """Allocate memory in one piece, and return the figures of PyTorch and the driver for this process."""
    import torch

    held = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    figures = {"reserved": torch.cuda.memory_reserved(), "driver": _of_driver(), "pid": os.getpid()}
    del held
    return figures


def take_from_cuda(nbytes: int) -> int:
    """Allocate memory directly with CUDA, as an extension does, and return CUDA's status."""
    import torch

    torch.zeros(1, device="cuda")
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    return int(runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(nbytes)))


def take_with_settings_of_its_own(nbytes: int) -> dict[str, Any]:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return take(nbytes)


def convolve(workspace: int) -> int:
    """Raise PyTorch's error for a cuDNN that gets no memory for its workspace.

    The error is the same if cuDNN has no algorithm for a dtype.
    """
    import torch

    try:
        return len(torch.zeros(workspace, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        # cuDNN would try the next algorithm here.
        pass
    raise RuntimeError("GET was unable to find an engine to execute this computation")


def convolve_odd_dtype() -> None:
    import torch

    torch.zeros(1, device="cuda")
    raise RuntimeError("GET was unable to find an engine to execute this computation")


def take_all(piece: int) -> int:
    """Allocate pieces until memory runs out, and return their total size."""
    import torch

    held = []
    try:
        while True:
            held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        return len(held) * piece


def take_when(begun: str, then: str, nbytes: int) -> bool:
    """Start CUDA, create the file `begun`, wait for the file `then`, and allocate memory.

    A second call does not wait, because the file `then` already exists.
    """
    import torch

    held = [torch.zeros(1, device="cuda")]
    Path(begun).touch()
    wait_for(Path(then))
    held.append(torch.zeros(nbytes, dtype=torch.uint8, device="cuda"))
    return True


def take_nearly_all_of_the_lease(folder: str, count: int) -> int:
    """Allocate all but 64 MiB of the cap, and hold it until `count` workers have done so."""
    import torch

    from flower_gpu.leases.lease import Lease

    lease = Lease.from_environment(os.environ)
    assert lease is not None
    nbytes = lease.shares[0].cap_bytes - (64 << 20)
    held = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    (Path(folder) / f"{os.getpid()}.there").touch()
    wait_for(Path(folder), count)
    return held.numel()


def more_than_there_is(nbytes: int) -> str:
    """Allocate more than the GPU has if the call has a GPU, and return the device."""
    import torch

    import flower_gpu

    device = flower_gpu.device()
    if device.type == "cuda":
        torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return str(device)


def device() -> str:
    import flower_gpu

    return str(flower_gpu.device())


def wait_for(path: Path, files: int = 0) -> None:
    """Wait until the file `path` exists, or until the folder `path` has a number of files."""
    deadline = time.monotonic() + _WAIT_S
    while len(list(path.glob("*.there"))) < files if files else not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has not come within {_WAIT_S:g} s")
        time.sleep(0.02)


def _of_driver() -> int | None:
    """Return the memory of this process according to the driver, including the CUDA context, or None."""
    from flower_gpu.gpu import inventory

    for gpu in inventory.take().gpus:
        for process in gpu.processes or ():
            if process.pid == os.getpid():
                return process.used_bytes
    return None


# Memory use during and after a call


def used_bytes() -> int:
    """Return the used memory of the first GPU, as `nvidia-smi --query-gpu=memory.used` does."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        pynvml.nvmlShutdown()


def train(weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
    """Hold a gibibyte, train a small network for a few steps, and report the GPU's used memory."""
    import torch
    from gpu_hosts import layer

    import flower_gpu

    device = flower_gpu.device()
    assert device.type == "cuda", "the GPU is hidden from the worker"
    held = torch.zeros(GIB // 4, device=device)
    model = layer(256, 256).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = model(torch.randn(64, 256, device=device)).square().mean() + held[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return weights, 64, {"used_bytes": used_bytes()}


def train_and_die(weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
    """Die while holding memory on the GPU."""
    train(weights, config)
    os.kill(os.getpid(), signal.SIGKILL)
    return weights, 64, {}


# Device files


def opened() -> list[str]:
    """Return the names of NVIDIA's device files that this process can open."""
    names = []
    for path in sorted(Path("/dev").glob("nvidia*")):
        try:
            if path.is_char_device():
                os.close(os.open(path, os.O_RDWR))
                names.append(path.name)
        except OSError:
            continue
    return names


def summed_on_the_gpu() -> tuple[list[str], float]:
    """Return the names of the device files that can be opened, and a sum computed on the GPU."""
    import torch

    return opened(), float(torch.ones(1000, device="cuda").sum())


def cuda_after_the_variable_was_changed(uuid: str) -> str:
    """Try to use a GPU that was refused, and return the error."""
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    import torch

    try:
        torch.ones(1, device=torch.device("cuda"))
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return ""
