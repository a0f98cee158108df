"""What a virtual client finds in a process that others have used: what it would find in a new one."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SEED_WORDS = 8  # of 32 bits


@dataclass(frozen=True)
class ProcessState:
    """What is set anew for each call: environment, working directory, flags of numpy and PyTorch.

    Modules and what is in their globals stay as they are.
    """

    environ: dict[str, str]
    folder: str
    numpy_errors: dict[str, Any]
    torch: tuple[Callable[[], None], ...]

    @classmethod
    def now(cls) -> ProcessState:
        """Return what this process has."""
        return cls(dict(os.environ), str(Path.cwd()), dict(np.geterr()), _torch_flags())

    def restore(self) -> None:
        """Give it to this process again."""
        if os.environ != self.environ:
            for name in os.environ.keys() - self.environ.keys():
                del os.environ[name]
            os.environ.update(self.environ)
        os.chdir(self.folder)
        np.seterr(**self.numpy_errors)
        for set_again in self.torch:
            set_again()


def seed_all(seed: str) -> None:
    """Seed the random number generators of Python, numpy and, where it is imported, PyTorch.

    Parameters
    ----------
    seed : str
        Any text; another one gives other numbers.
    """
    digest = hashlib.blake2b(seed.encode(), digest_size=4 * _SEED_WORDS).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, np.uint32))
    torch = sys.modules.get("torch")
    if hasattr(torch, "manual_seed"):
        torch.manual_seed(int.from_bytes(digest[:8], "little"))  # type: ignore[union-attr]


def _torch_flags() -> tuple[Callable[[], None], ...]:
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "manual_seed"):  # not imported, or not to the end
        return ()
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    anomaly = torch.is_anomaly_enabled()
    device = torch.get_default_device() if hasattr(torch, "get_default_device") else None
    flags = [
        _attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic") if hasattr(cudnn, name)
    ]
    reduced = [
        _attribute(matmul, name)
        for name in (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
        )
        if hasattr(matmul, name)
    ]
    return (
        *flags,
        *reduced,
        lambda: torch.use_deterministic_algorithms(deterministic, warn_only=warn_only),
        lambda: torch.set_float32_matmul_precision(precision),
        lambda: torch.set_default_dtype(dtype),
        lambda: torch.set_num_threads(threads) if torch.get_num_threads() != threads else None,
        lambda: torch.set_grad_enabled(grad) and None,
        lambda: torch.autograd.set_detect_anomaly(anomaly) and None,
        # To set it where it has never been another one would start a mode that slows every call.
        lambda: (
            torch.set_default_device(device)
            if device is not None and torch.get_default_device() != device
            else None
        ),
    )


def _attribute(owner: Any, name: str) -> Callable[[], None]:
    value = getattr(owner, name)

    def set_again() -> None:
        if getattr(owner, name) != value:
            setattr(owner, name, value)

    return set_again
