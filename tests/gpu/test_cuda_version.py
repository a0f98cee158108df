"""If PyTorch and the driver do not fit, a message says which of them to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from nvml_stub import Host

from flower_gpu.doctor import cuda
from flower_gpu.gpu.cuda_version import explained

FITS = "that is not the reason, `flower-gpu doctor` looks for others"


@pytest.mark.parametrize(
    ("built_for", "driver_has", "texts"),
    [
        (
            "13.2",
            (12, 4),
            ["CUDA 12.4 at most", "driver to 580.65.06 or later", "build for CUDA 12", "whl/cu126"],
        ),
        ("12.8", (11, 4), ["driver to 525.60.13 or later", "build for CUDA 11", "whl/cu118"]),
        ("14.0", (13, 0), ["driver to one with CUDA 14", "build for CUDA 13", "whl/cu130"]),
        ("12.8", (12, 2), ["has CUDA 12.2 at most", FITS]),  # minor versions work with each other
        ("12.6", (13, 0), [FITS]),
        ("13.2", None, ["CUDA of unknown version", FITS]),
        # An app may report any text as the CUDA version of its PyTorch.
        *[(odd, (12, 4), [FITS]) for odd in ("x", "?[2J", "9" * 300, "-13", "\N{ARABIC-INDIC DIGIT NINE}")],
        (None, (12, 4), ["is built for the CPU only", "change PyTorch, `pip install", "whl/cu126"]),
        (None, (14, 1), ["change PyTorch, see https://pytorch.org/get-started"]),
        (None, None, ["change PyTorch, see https://pytorch.org/get-started"]),
    ],
)
def test_the_message_says_which_versions_to_install(
    built_for: str | None, driver_has: tuple[int, int] | None, texts: list[str]
) -> None:
    message = explained("2.15.0", built_for, "550.54.14", driver_has)
    for text in ["PyTorch 2.15.0 is built for", "driver 550.54.14", *texts]:
        assert text in message
    assert (FITS in message) == (FITS in texts)


def test_the_inventory_contains_the_cuda_version_of_the_driver(host: Host, take: Callable[..., Any]) -> None:
    assert take()["cuda_version"] == [12, 4]
    take("close")
    host.set_cuda(13010)
    assert take()["cuda_version"] == [13, 1]


def test_a_call_without_cuda_explains_the_mismatch_once(host: Host, run_script: Callable[..., Any]) -> None:
    """The explanation names both versions, while PyTorch's own error names only one."""
    torch = cuda.build()
    assert torch is not None
    completed = run_script(
        """
        import torch
        from flower_gpu import run_in_worker
        def use():
            return str(torch.device("cpu"))
        for _ in range(2):
            print(run_in_worker(use, gpu_memory="4GiB", start_method="fork"))
        """,
        env=host.env,
        timeout_s=100,
    )
    assert completed.stdout == "cpu\ncpu\n"
    assert completed.stderr.count("was leased, but PyTorch") == 1
    assert explained(torch.version, torch.cuda, "550.54.14", (12, 4)) in completed.stderr
