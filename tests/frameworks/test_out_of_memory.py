"""An error for want of GPU memory is told by its name where its class is not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flower_gpu.errors import WorkerTaskError
from flower_gpu.frameworks.out_of_memory import out_of_memory_in

# Instead of the real one, which takes seconds to import.
TORCH = """
class version:
    cuda = hip = None

class OutOfMemoryError(RuntimeError):
    pass
"""
# A client that holds only weights imports no torch, and so gets the name and the text of the worker's error.
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


def test_a_caller_without_torch_knows_a_workers_error(
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
def test_by_its_name(name: str, text: str, is_full: bool) -> None:
    error = WorkerTaskError(f"fit raised {name}: {text}")
    error.error_type = name
    assert (out_of_memory_in(error) is error) is is_full
