"""Out-of-memory errors are recognised by name and text, also if their class is not imported."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from flower_gpu.errors import WorkerTaskError
from flower_gpu.frameworks.out_of_memory import TEXTS, TEXTS_IF_SHORT, out_of_memory_in, requested_bytes

# Replaces the real PyTorch, which takes seconds to import.
TORCH = """
class version:
    cuda = hip = None

class OutOfMemoryError(RuntimeError):
    pass
"""
# A client that only holds weights does not import torch. It gets the name and the text of the worker's error.
CALLER = """
import sys
from flower_gpu import run_in_worker
from flower_gpu.errors import WorkerTaskError
from flower_gpu.frameworks.out_of_memory import out_of_memory_in

try:
    run_in_worker("builtins:exec", "import torch; raise torch.OutOfMemoryError('CUDA out of memory.')")
except WorkerTaskError as error:
    assert "torch" not in sys.modules
    print("full" if out_of_memory_in(error) else "something else")
"""


def test_a_caller_without_torch_recognises_the_error_of_a_worker(
    run_script: Callable[..., Any], write_script: Callable[..., Any]
) -> None:
    write_script(TORCH, "torch.py")
    assert run_script(CALLER).stdout == "full\n"


@pytest.mark.parametrize(
    ("name", "text", "is_full"),
    [
        ("torch.AcceleratorError", "CUDA error: out of memory", True),
        ("torch.AcceleratorError", "CUDA error: an illegal memory access was encountered", False),
        ("jaxlib._jax.JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.", True),
        ("builtins.ValueError", "a comment on CUDA out of memory", False),
        ("app.Error", "the disk is full", False),
    ],
)
def test_an_error_of_a_worker_is_recognised_by_name_and_text(name: str, text: str, is_full: bool) -> None:
    error = WorkerTaskError(f"fit raised {name}: {text}")
    error.error_type = name
    assert (out_of_memory_in(error) is error) is is_full


def raised_as(name: str, text: str) -> Exception:
    """Return an exception of a class with this name."""
    module, _, kind = name.rpartition(".")
    if module == "builtins":
        return getattr(__import__(module), kind)(text)  # type: ignore[no-any-return]
    bases = {"xgboost.core": ValueError, "cupy.cuda.memory": MemoryError}
    bases |= dict.fromkeys(["torch", "torch.distributed", "jaxlib._jax", "jax.errors"], RuntimeError)
    base = bases.get(module, Exception)
    return type(kind, (base,), {"__module__": module})(text)


TENSORFLOW = "tensorflow.python.framework.errors_impl"
MUL = "{{function_node __wrapped__Mul_device_/job:localhost/replica:0/task:0/device:%s:0}}"
FULL = [
    ("builtins.RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("builtins.RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("builtins.RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("builtins.RuntimeError", "cuFFT error: CUFFT_ALLOC_FAILED"),
    ("pycuda._driver.Error", "curandCreateGenerator failed: CURAND_STATUS_ALLOCATION_FAILED"),
    ("pycuda._driver.MemoryError", "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY"),
    ("builtins.RuntimeError", "CUDA out of memory. Allocation was preemptively rejected"),
    ("torch.AcceleratorError", "CUDA error: out of memory"),
    ("builtins.RuntimeError", "Triton Error [CUDA]: out of memory"),
    (
        "builtins.RuntimeError",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131, please',
    ),
    (
        "builtins.RuntimeError",
        "NCCL error, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    ),
    ("builtins.RuntimeError", "NCCL Error 1: unhandled cuda error\nFailed to CUDA malloc 4194304 bytes"),
    (
        "xgboost.core.XGBoostError",
        "device_vector.cu:22: Memory allocation error on worker 0: cudaErrorMemoryAllocation: out of memory",
    ),
    ("xgboost.core.XGBoostError", "Memory allocation error on worker 0: std::bad_alloc\n- Free memory: 12MB"),
    ("lightgbm.basic.LightGBMError", "[CUDA] out of memory /src/io/cuda/cuda_column_data.cu 57"),
    (
        "builtins.MemoryError",
        "std::bad_alloc: out_of_memory: CUDA error at: /rmm/mr/device/cuda_memory_resource.hpp:69: "
        "cudaErrorMemoryAllocation out of memory",
    ),
    (
        "builtins.MemoryError",
        "std::bad_alloc: RMM failure at:pool_memory_resource.hpp:276: Maximum pool size exceeded",
    ),
    (f"{TENSORFLOW}.ResourceExhaustedError", f"{MUL % 'GPU'} failed to allocate memory [Op:Mul]"),
    (
        f"{TENSORFLOW}.ResourceExhaustedError",
        "OOM when allocating tensor with shape[9] on /device:GPU:0 by allocator GPU_0_bfc",
    ),
    ("torch.distributed.DistBackendError", "NCCL error ...\nCuda failure 2 'out of memory'"),
    ("jaxlib._jax.XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes."),
    ("jax.errors.JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."),
    ("cupy.cuda.memory.OutOfMemoryError", "Out of memory allocating 1,024 bytes"),
    ("numba.cuda.driver.CudaAPIError", "[2] CUDA_ERROR_OUT_OF_MEMORY"),
    (
        f"{TENSORFLOW}.InternalError",
        "Failed copying input tensor from /task:0/device:CPU:0 to /task:0/device:GPU:0 in order to run "
        "_EagerConst: Dst tensor is not initialized.",
    ),
]
NOT_FULL = [
    # These errors are about main memory.
    ("builtins.RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    (f"{TENSORFLOW}.ResourceExhaustedError", f"{MUL % 'CPU'} failed to allocate memory [Op:Mul]"),
    ("builtins.MemoryError", "Unable to allocate 105. MiB for an array with shape (21, 1024, 1280)"),
    ("builtins.MemoryError", "Maximum pool size exceeded"),
    ("builtins.MemoryError", ""),
    ("builtins.MemoryError", "CUDA out of memory"),
    (
        "builtins.RuntimeError",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
    ),
    (f"{TENSORFLOW}.ResourceExhaustedError", "OOM when allocating tensor on /device:CPU:0 by allocator cpu"),
    # These errors have other causes.
    ("lightgbm.basic.LightGBMError", "[CUDA] an illegal memory access was encountered /src/a.cu 57"),
    ("builtins.RuntimeError", "Triton Error [CUDA]: invalid argument"),
    ("builtins.ValueError", "out of memory"),
    ("jaxlib._jax.XlaRuntimeError", "INTERNAL: out of memory bounds"),
    ("app.Error", "my worker: Memory allocation error on worker 3"),
    (f"{TENSORFLOW}.InternalError", "Blas GEMM launch failed"),
]
FULL_IF_SHORT = [
    "FIND was unable to find an engine to execute this computation",
    "GET was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
]


@pytest.mark.parametrize(("name", "text"), FULL)
def test_texts_of_libraries_are_recognised(name: str, text: str) -> None:
    error = raised_as(name, text)
    assert out_of_memory_in(error) is error


@pytest.mark.parametrize(("name", "text"), NOT_FULL)
def test_texts_with_other_causes_are_not_recognised(name: str, text: str) -> None:
    assert out_of_memory_in(raised_as(name, text), lambda: True) is None


@pytest.mark.parametrize("text", FULL_IF_SHORT)
def test_ambiguous_texts_count_only_if_memory_is_short(text: str) -> None:
    error = RuntimeError(text)
    assert out_of_memory_in(error) is None
    assert out_of_memory_in(error, lambda: True) is error


def test_each_text_of_the_table_has_an_example() -> None:
    examples = [text for _, text in FULL] + FULL_IF_SHORT
    assert [
        entry.pattern
        for entry in (*TEXTS, *TEXTS_IF_SHORT)
        if not any(re.search(entry.pattern, text) for text in examples)
    ] == []


@pytest.mark.parametrize(
    "entry",
    [entry for entry in (*TEXTS, *TEXTS_IF_SHORT) if entry.raised_as],
    ids=lambda entry: entry.pattern,
)
def test_an_error_of_another_class_may_quote_such_a_text(entry: Any) -> None:
    """NVIDIA's error names are excluded, because no other error contains them."""
    names = [nvidia.pattern for nvidia in TEXTS if not nvidia.raised_as]
    examples = [text for _, text in FULL if not any(re.search(name, text) for name in names)]
    text = next(text for text in examples + FULL_IF_SHORT if re.search(entry.pattern, text))
    assert out_of_memory_in(raised_as("app.Error", text), lambda: True) is None


def test_an_error_raised_in_a_finally_block_does_not_hide_the_first() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        finally:
            raise KeyError("optimizer state")
    assert out_of_memory_in(caught.value) is caught.value.__context__
    assert requested_bytes(caught.value) == 2 << 30


def test_a_circle_of_causes_does_not_loop_forever() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not out_of_memory_in(first)


def test_an_error_raised_from_none_hides_the_first() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        except RuntimeError:
            raise KeyError("optimizer state") from None
    assert out_of_memory_in(caught.value) is None


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("Failed to CUDA malloc 4194304 bytes", 4 << 20),
        ("- Free memory: 12MB\n- Requested memory: 400MB", 400 << 20),
        ("- Requested memory: 1000", None),
        ("CUDA out of memory. Tried to allocate 2.50 GiB", 5 << 29),
        ("Tried to allocate 20.00 MiB (GPU 0", 20 << 20),
        ("Tried to allocate 512 bytes. GPU", 512),
        ("Out of memory while trying to allocate 8589934592 bytes.", 8 << 30),
        ("Out of memory while trying to allocate 8.00GiB.", 8 << 30),
        ("Out of memory allocating 1,024 bytes (allocated so far", 1024),
        ("CUDA error: out of memory", None),
        ("would exceed the limit. Requested size: 1,024.00 MiB.", 1 << 30),
    ],
)
def test_the_requested_size_is_read_from_the_text(text: str, nbytes: int | None) -> None:
    outer = ValueError("training failed")
    outer.__cause__ = RuntimeError(text)
    assert requested_bytes(outer) == requested_bytes(outer.__cause__) == nbytes
