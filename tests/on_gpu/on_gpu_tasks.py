"""Tasks of workers on a real GPU. Importing this imports no torch."""

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
    """Take memory in one piece, and return what then is known of this process."""
    import torch

    held = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    figures = {"reserved": torch.cuda.memory_reserved(), "driver": _of_driver(), "pid": os.getpid()}
    del held
    return figures


def take_from_cuda(nbytes: int) -> int:
    """Ask CUDA itself for memory, as an extension does; returns its answer."""
    import torch

    torch.zeros(1, device="cuda")
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    return int(runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(nbytes)))


def take_with_settings_of_its_own(nbytes: int) -> dict[str, Any]:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return take(nbytes)


def convolve(workspace: int) -> int:
    """Fail as PyTorch does where cuDNN gets no workspace, or has no algorithm for a dtype."""
    import torch

    try:
        return len(torch.zeros(workspace, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass  # it tries the next algorithm
    raise RuntimeError("GET was unable to find an engine to execute this computation")


def convolve_odd_dtype() -> None:
    import torch

    torch.zeros(1, device="cuda")
    raise RuntimeError("GET was unable to find an engine to execute this computation")


def take_all(piece: int) -> int:
    """Take pieces until there are no more."""
    import torch

    held = []
    try:
        while True:
            held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        return len(held) * piece


def take_when(begun: str, then: str, nbytes: int) -> bool:
    """Start CUDA, say so, and take memory when somebody says so; the second time at once."""
    import torch

    held = [torch.zeros(1, device="cuda")]
    Path(begun).touch()
    wait_for(Path(then))
    held.append(torch.zeros(nbytes, dtype=torch.uint8, device="cuda"))
    return True


def take_nearly_all_of_the_lease(folder: str, count: int) -> int:
    """Take all but 64 MiB of the cap; keep it until as many workers as there should be have done so."""
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
    """Take more than the GPU has, where there is one."""
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
    """Wait until a file is there, or so many files in a folder."""
    deadline = time.monotonic() + _WAIT_S
    while len(list(path.glob("*.there"))) < files if files else not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has not come within {_WAIT_S:g} s")
        time.sleep(0.02)


def _of_driver() -> int | None:
    """Return what the driver says that this process uses, its CUDA context included."""
    from flower_gpu.gpu import inventory

    for gpu in inventory.take().gpus:
        for process in gpu.processes or ():
            if process.pid == os.getpid():
                return process.used_bytes
    return None


# What a worker uses, and what is left of it


def used_bytes() -> int:
    """Return the used memory of the first GPU, as `nvidia-smi --query-gpu=memory.used` does."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        pynvml.nvmlShutdown()


def train(weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
    """Hold a gibibyte, take a few steps of a small network, report the card's use meanwhile."""
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
    """Die with memory held on the card."""
    train(weights, config)
    os.kill(os.getpid(), signal.SIGKILL)
    return weights, 64, {}


# Device files


def opened() -> list[str]:
    """Return which device files of NVIDIA's can be opened here."""
    found = []
    for path in sorted(Path("/dev").glob("nvidia*")):
        try:
            if path.is_char_device():
                os.close(os.open(path, os.O_RDWR))
                found.append(path.name)
        except OSError:
            continue
    return found


def summed_on_the_gpu() -> tuple[list[str], float]:
    """Return the same after a sum on the GPU, and that sum."""
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
