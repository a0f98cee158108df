"""The cap on PyTorch's allocator, checked by reading its settings back, and errors about GPU memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torch_version import needs_told_settings

from flower_gpu import frameworks
from flower_gpu.frameworks import pytorch_memory
from flower_gpu.frameworks.out_of_memory import classify, device_index, out_of_memory_in, requested_bytes

GIB = 2**30
SETTINGS = "per_process_memory_fraction:0.250000000000"

# PyTorch reads the environment once per process, when its settings are first used, so each case needs a fork.
SCRIPT = """
import json, os, sys
import torch
from flower_gpu.frameworks import Cap, pytorch_memory

def settings_during_and_after(parsed_before, version, environ):
    os.environ.update(environ)
    if parsed_before is not None:
        torch._C._accelerator_setAllocatorSettings(parsed_before)
    if version is not None:
        torch.__version__ = version
    hold = pytorch_memory.AllocatorHold([Cap(4 << 30, 16 << 30)])
    hold.apply()
    try:
        hold.follow_settings()
    except Exception as error:
        return [repr(error), None]
    held = {
        "settings": torch._C._accelerator_getAllocatorSettings(),
        "in_force": hold.in_force_bytes(),
        "waits": hold in pytorch_memory._pending,
        "started": torch.cuda.is_initialized(),
    }
    hold.release()
    waits = hold in pytorch_memory._pending
    return [held, {"settings": torch._C._accelerator_getAllocatorSettings(), "waits": waits}]

for case in json.loads(sys.argv[1]):
    if os.fork() == 0:
        print(json.dumps(settings_during_and_after(*case)), flush=True)
        os._exit(0)
    os.wait()
"""


@needs_told_settings
def test_the_cap_follows_the_environment_and_is_removed_after_the_call(
    run_script: Callable[..., Any],
) -> None:
    cases: list[tuple[str | None, str | None, dict[str, str]]] = [
        (None, None, {"PYTORCH_ALLOC_CONF": SETTINGS}),
        (None, None, {"PYTORCH_ALLOC_CONF": SETTINGS, "PYTORCH_CUDA_ALLOC_CONF": SETTINGS}),
        # A fork of a process that has used the settings, and a process that outlives the call.
        ("max_split_size_mb:32", None, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        # This version has no such setting, so the cap is applied when CUDA starts.
        (None, "2.9.1", {}),
        (None, None, {"PYTORCH_ALLOC_CONF": "nonsense:1"}),
    ]
    done = run_script(SCRIPT, json.dumps(cases), env={"CUDA_VISIBLE_DEVICES": ""})
    read, twice, replaced, old, refused = map(json.loads, done.stdout.splitlines())
    held = {"settings": SETTINGS, "in_force": [4 * GIB], "waits": True, "started": False}
    assert read[0] == held and twice[0]["in_force"] == [4 * GIB]
    assert replaced == [
        {**held, "settings": f"max_split_size_mb:64,{SETTINGS}"},
        {"settings": "max_split_size_mb:32,per_process_memory_fraction:1.0", "waits": False},
    ]
    assert old == [{**held, "settings": "", "in_force": [None]}, {"settings": "", "waits": False}]
    assert f"PyTorch does not take PYTORCH_ALLOC_CONF='nonsense:1,{SETTINGS}' (Unrecognized" in refused[0]


@given(total=st.integers(1, 2**40), part=st.floats(0, 1.5))
def test_the_fraction_for_cuda_never_allows_more_than_the_cap(total: int, part: float) -> None:
    cap_bytes = int(total * part)
    fraction = pytorch_memory.largest_fraction(cap_bytes, total)
    assert 0 <= fraction <= 1
    assert int(fraction * total) <= cap_bytes
    assert fraction * total >= min(cap_bytes, total) - 2


def test_there_are_no_figures_before_cuda_starts() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("an earlier test has initialised CUDA in this process")
    assert frameworks.figures() is None
    assert frameworks.reserved_bytes() is None
    assert not torch.cuda.is_initialized()


TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 15.77 GiB of which "
    "1.2 GiB is free. 3.90 GiB allowed; Of the allocated memory 3.1 GiB is allocated by PyTorch"
)


def make_error(module: str, name: str, text: str, base: type[Exception] = RuntimeError) -> Exception:
    """Return an error like that of a library that may not be installed."""
    error: Exception = type(name, (base,), {"__module__": module})(text)
    return error


def raised_from(cause: BaseException) -> BaseException:
    try:
        raise ValueError("training failed") from cause
    except ValueError as error:
        return error


#: PyTorch has this class from 2.8 on.
AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)

OUT_OF_MEMORY = [
    torch.OutOfMemoryError(TEXT),
    AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("Caught OutOfMemoryError in DataLoader worker process 0.\nOriginal ...\n" + TEXT),
    make_error("torch.distributed", "DistBackendError", "NCCL error ...\nCuda failure 2 'out of memory'"),
    make_error("jaxlib._jax", "XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes."),
    make_error(
        "jax.errors", "JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."
    ),
    make_error(
        "tensorflow.python.framework.errors_impl",
        "ResourceExhaustedError",
        "OOM when allocating tensor with shape[9] on /device:GPU:0 by allocator GPU_0_bfc",
        Exception,
    ),
    make_error("cupy.cuda.memory", "OutOfMemoryError", "Out of memory allocating 1,024 bytes", MemoryError),
    make_error("numba.cuda.driver", "CudaAPIError", "[2] CUDA_ERROR_OUT_OF_MEMORY", Exception),
    raised_from(torch.OutOfMemoryError(TEXT)),
    raised_from(raised_from(torch.OutOfMemoryError(TEXT))),
    ExceptionGroup("two", [ValueError("one"), torch.OutOfMemoryError(TEXT)]),
]
OTHERS = [
    MemoryError(),
    MemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("out of memory"),
    make_error("jaxlib._jax", "XlaRuntimeError", "INTERNAL: out of memory bounds"),
    make_error(
        "tensorflow.python.framework.errors_impl",
        "ResourceExhaustedError",
        "OOM when allocating tensor on /device:CPU:0 by allocator cpu",
        Exception,
    ),
    SystemExit("CUDA out of memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_errors_due_to_a_lack_of_gpu_memory_are_recognised(error: BaseException) -> None:
    assert out_of_memory_in(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_other_errors_are_not_taken_for_a_lack_of_gpu_memory(error: BaseException) -> None:
    assert not out_of_memory_in(error)


def test_an_unrelated_error_after_one_about_memory_is_not_recognised() -> None:
    try:
        try:
            raise torch.OutOfMemoryError(TEXT)
        except torch.OutOfMemoryError:
            raise KeyError("the fallback has a mistake") from None
    except KeyError as error:
        assert not out_of_memory_in(error)


def test_a_circle_of_causes_does_not_loop_forever() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not out_of_memory_in(first)


class Greedy(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise torch.OutOfMemoryError(TEXT)


def test_an_error_that_a_dataloader_raises_again_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(Greedy(), num_workers=1)))
    assert out_of_memory_in(caught.value)
    assert requested_bytes(caught.value) == int(2.5 * GIB)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT, int(2.5 * GIB)),
        ("Tried to allocate 20.00 MiB (GPU 0", 20 * 2**20),
        ("Tried to allocate 512 bytes. GPU", 512),
        ("Out of memory while trying to allocate 8589934592 bytes.", 8 * GIB),
        ("Out of memory while trying to allocate 8.00GiB.", 8 * GIB),
        ("Out of memory allocating 1,024 bytes (allocated so far", 1024),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_requested_size_is_read_from_the_text(text: str, expected: int | None) -> None:
    assert requested_bytes(raised_from(RuntimeError(text))) == expected


def test_the_gpu_is_read_from_the_text() -> None:
    assert device_index(torch.OutOfMemoryError(TEXT)) == 1
    assert device_index(RuntimeError("CUDA error: out of memory")) is None


def test_a_kind_is_certain_only_if_exactly_one_limit_was_exceeded() -> None:
    draw = random.Random(4)
    for _ in range(2000):
        reserved, requested, cap, free = (draw.randrange(8) for _ in range(4))
        kind = classify(reserved, requested, cap, free)
        assert (kind == "over_cap") == (reserved + requested > cap and requested <= free)
        assert (kind == "card_full") == (reserved + requested <= cap and requested > free)
    assert classify(3, None, 4, 1) == classify(3, 2, 4, None) == classify(None, 2, 4, 1) == "unclear"
