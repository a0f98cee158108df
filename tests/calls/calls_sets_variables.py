"""A task in a module that sets variables before any heavy import, as scripts for one GPU do."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = "0"
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

import calls_tasks


def seen() -> dict[str, Any]:
    """Change the variables in several ways, and return the values that remain."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0", "OWN": "1"}, clear=True):
        patched = dict(os.environ)
    unchanged = dict(os.environ)
    os.environ.clear()
    cleared = dict(os.environ)
    os.environ.update(unchanged)
    return {**calls_tasks.seen(), "patched": patched, "cleared": cleared}
