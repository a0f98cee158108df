"""A module that changes a variable which the caller has set for the worker."""

from __future__ import annotations

import os

os.environ["FLOWER_GPU_TEST_VARIABLE"] = "changed"


def task() -> str:
    return "not reached"
