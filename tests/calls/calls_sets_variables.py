"""A task whose module sets variables as scripts for one GPU do, before anything heavy is imported."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = "0"
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

import calls_tasks


def seen() -> dict[str, Any]:
    """Return what is seen, after the function has tried it, too."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0", "OWN": "1"}, clear=True):
        patched = dict(os.environ)
    before = dict(os.environ)
    os.environ.clear()
    cleared = dict(os.environ)
    os.environ.update(before)
    return {**calls_tasks.seen(), "patched": patched, "cleared": cleared}
