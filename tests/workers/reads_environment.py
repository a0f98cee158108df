"""A module that decides at its import, as many do that look for a GPU."""

from __future__ import annotations

import os

AT_IMPORT = os.environ.get("FLOWER_GPU_TEST_VARIABLE")


def at_import() -> tuple[str | None, str | None]:
    return AT_IMPORT, os.environ.get("FLOWER_GPU_TEST_VARIABLE")
