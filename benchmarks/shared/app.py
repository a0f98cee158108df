"""The Flower app of the benchmarks, with the client that a benchmark needs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.processes import ROOT

APP = ROOT / "benchmarks" / "app"
_DEFAULT = "bench_app.no_op:app"


def copy_app(client: str, folder: Path) -> Path:
    """Copy the app into a folder, with a module of ``bench_app`` as its ClientApp; return its path.

    A run config cannot select the client: a fork server imports all libraries in the source of a ClientApp,
    so a client that imports no torch must have a ClientApp of its own.
    """
    copy = folder / "app"
    shutil.copytree(APP, copy, ignore=shutil.ignore_patterns("__pycache__"))
    project = copy / "pyproject.toml"
    text = project.read_text()
    assert _DEFAULT in text
    project.write_text(text.replace(_DEFAULT, f"bench_app.{client}:app").replace('"no_op"', f'"{client}"'))
    return copy


def config_pairs(config: Mapping[str, Any]) -> str:
    """Return a run config in the format of ``--run-config``."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
