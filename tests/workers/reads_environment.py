"""A module that reads a variable when it is imported, as modules that look for a GPU do."""

from __future__ import annotations

import os

AT_IMPORT = os.environ.get("FLOWER_GPU_TEST_VARIABLE")


def at_import() -> tuple[str | None, str | None]:
    return AT_IMPORT, os.environ.get("FLOWER_GPU_TEST_VARIABLE")
