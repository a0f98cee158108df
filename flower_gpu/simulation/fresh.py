"""What a virtual client finds in a process that others have used: what it would find in a new one."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

_SEED_WORDS: Final = 8  # of 32 bits

# Of torch.backends, and what is below it. Not everything is there in every version.
_PRECISION: Final = ("fp32_precision",)
_TORCH_FLAGS: Final = (
    ("backends", _PRECISION),
    ("backends.cuda.matmul", ("fp32_precision", "allow_tf32", "allow_fp16_reduced_precision_reduction")),
    ("backends.cuda.matmul", ("allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation")),
    ("backends.cudnn", ("enabled", "benchmark", "benchmark_limit", "deterministic")),
    ("backends.cudnn", ("fp32_precision", "allow_tf32")),
    ("backends.cudnn.conv", _PRECISION),
    ("backends.cudnn.rnn", _PRECISION),
    ("backends.mkldnn", ("enabled", "deterministic", "fp32_precision", "allow_tf32")),
    ("backends.mkldnn.matmul", _PRECISION),
    ("backends.mkldnn.conv", _PRECISION),
    ("backends.mkldnn.rnn", _PRECISION),
    ("utils.deterministic", ("fill_uninitialized_memory",)),
)
_SIGNALS: Final = (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class _Setting:
    """Something that code can set, and that is set back where it differs."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    value: Any

    @classmethod
    def of(cls, get: Callable[[], Any], set_: Callable[[Any], object]) -> Iterator[_Setting]:
        # What torch has two names for cannot be read by one when it was set by the other.
        with suppress(RuntimeError, AttributeError, TypeError):
            yield cls(get, set_, get())

    def restore(self) -> None:
        with suppress(RuntimeError, AttributeError):
            if self.get() == self.value:
                return
        self.set(self.value)


class ProcessState:
    """What is set anew for each call: environment, working directory, flags of Python, numpy and PyTorch.

    Modules and what is in their globals stay as they are.
    """

    def __init__(self) -> None:
        self._settings = [*_of_process(), *_of_torch()]

    def restore(self) -> None:
        """Give it to this process again."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for setting in self._settings:
            setting.restore()


def seed_of(place: str) -> int:
    """Return the seed for one place in a run: another one for each text, and always the same for one."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=4 * _SEED_WORDS).digest(), "little")


def seed_all(seed: int) -> None:
    """Seed the random number generators of Python, numpy and, where it is imported, PyTorch.

    Parameters
    ----------
    seed : int
        As :func:`seed_of` returns it.
    """
    random.seed(seed)
    np.random.seed([seed >> 32 * word & 0xFFFFFFFF for word in range(_SEED_WORDS)])
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "manual_seed"):
        return
    # Not torch.manual_seed: where CUDA has not started that writes down the stack for each kind of device,
    # which takes longer than a small client trains.
    number = seed & (1 << 63) - 1
    torch.default_generator.manual_seed(number)
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        torch.cuda.manual_seed_all(number)


def _of_process() -> Iterator[_Setting]:
    yield from _Setting.of(lambda: dict(os.environ), _set_environ)
    yield from _Setting.of(lambda: str(Path.cwd()), os.chdir)
    yield from _Setting.of(lambda: dict(np.geterr()), lambda value: np.seterr(**value))
    yield from _Setting.of(lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value))
    yield from _Setting.of(lambda: (sys.stdout, sys.stderr), _set_streams)
    filters: Any = warnings.filters
    yield from _Setting.of(lambda: list(filters), lambda value: filters.__setitem__(slice(None), value))
    yield from _Setting.of(gc.isenabled, lambda value: gc.enable() if value else gc.disable())
    yield from _Setting.of(sys.getrecursionlimit, sys.setrecursionlimit)
    yield from _Setting.of(_umask, os.umask)
    yield from _Setting.of(lambda: logging.root.manager.disable, logging.disable)
    yield from _Setting.of(lambda: logging.root.level, logging.root.setLevel)
    if hasattr(os, "sched_getaffinity"):
        yield from _Setting.of(lambda: os.sched_getaffinity(0), lambda value: os.sched_setaffinity(0, value))
    yield from _Setting.of(
        lambda: {number: signal.getsignal(number) for number in _SIGNALS},
        lambda value: [signal.signal(number, handler) for number, handler in value.items()],
    )


def _set_environ(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():
        del os.environ[name]
    os.environ.update(value)


def _set_streams(value: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = value


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


def _of_torch() -> Iterator[_Setting]:
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "manual_seed"):  # not imported, or not to the end
        return
    yield from _Setting.of(torch.get_default_dtype, torch.set_default_dtype)
    yield from _Setting.of(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    for place, names in _TORCH_FLAGS:
        owner = torch
        for part in place.split("."):
            owner = getattr(owner, part, None)
        for name in names:
            if hasattr(owner, name):
                yield from _attribute(owner, name)
    yield from _Setting.of(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    yield from _Setting.of(torch.get_num_threads, torch.set_num_threads)
    yield from _Setting.of(torch.is_grad_enabled, torch.set_grad_enabled)
    yield from _Setting.of(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly)
    if hasattr(torch, "get_default_device"):
        yield from _Setting.of(torch.get_default_device, torch.set_default_device)
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        get = getattr(torch.backends.cuda, f"{kind}_sdp_enabled", None)
        if get is not None:
            yield from _Setting.of(get, getattr(torch.backends.cuda, f"enable_{kind}_sdp"))
    for device in ("cpu", "cuda"):
        yield from _Setting.of(
            partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        )
        yield from _Setting.of(
            partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
        )
    multiprocessing = sys.modules.get("torch.multiprocessing")
    if multiprocessing is not None:
        yield from _Setting.of(multiprocessing.get_sharing_strategy, multiprocessing.set_sharing_strategy)


def _attribute(owner: Any, name: str) -> Iterator[_Setting]:
    return _Setting.of(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))
