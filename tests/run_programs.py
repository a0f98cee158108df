"""Runs programs until they exit, and returns their output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

#: Generous limit in seconds, because the machine may be busy.
TIMEOUT_S = 150

Ended = subprocess.CompletedProcess[str]


def run(command: Sequence[object], timeout_s: float = TIMEOUT_S, **options: Any) -> Ended:
    """Run a command. `options` are passed to `subprocess.run`."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout_s, **options)


def run_python(code: str, *arguments: object, **options: Any) -> Ended:
    """Run code in a new Python process."""
    return run([sys.executable, "-c", code, *arguments], **options)


def run_cli(*arguments: object, **options: Any) -> Ended:
    """Run `flower-gpu` with these arguments."""
    return run([sys.executable, "-m", "flower_gpu.cli", *arguments], **options)
