"""The tests for a real GPU also run on the stand-in, so their own mistakes show up without a real GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

import cuda_stub

ON_GPU = Path(__file__).parents[1] / "on_gpu"

SAME = "not on a stand-in: what is to be seen is the same as with the other start methods"
# Reasons for skipping a test. All other tests run on the stand-in.
SKIP_REASONS = {
    SAME,
    "needs tensorflow with CUDA",
    "needs jax with CUDA",
    "not on a stand-in: there are no device files",
    "not on a stand-in: NCCL has a runtime of its own",
}

pytestmark = pytest.mark.timeout(960)


def test_the_gpu_tests_pass_on_the_stand_in(cuda_host: Callable[..., cuda_stub.Host], tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-n", "0", f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(ON_GPU)],
        env={**os.environ, **cuda_host(gpus=1, driver="615.20.01").env},
        cwd=ON_GPU.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = ElementTree.parse(report).getroot().findall(".//testcase")
    skipped = {
        (case.get("classname"), skip.get("message")) for case in cases for skip in case.findall("skipped")
    }
    # Without permission to create control groups, there is no cap by the driver.
    reasons = {str(message) for _, message in skipped if not str(message).startswith("no cap by the driver")}
    assert reasons <= SKIP_REASONS
    assert {message for name, message in skipped if "memory" in str(name) or "leases" in str(name)} <= {SAME}
