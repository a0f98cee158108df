"""What an option's text may be: functions for argparse's ``type``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from flower_gpu.config import MAX_SECONDS, is_duration


def positive_int(text: str) -> int:
    """Read a whole number of 1 or more."""
    return _int(text, 1)


def non_negative_int(text: str) -> int:
    """Read a whole number of 0 or more."""
    return _int(text, 0)


def positive_float(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def seconds(text: str) -> float:
    """Read how long something may take."""
    value = positive_float(text)
    if not is_duration(value):
        raise argparse.ArgumentTypeError(f"must be {MAX_SECONDS:g} seconds at most, not {text}")
    return value


def port_number(text: str) -> int:
    """Read a TCP port."""
    value = _int(text, 1)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"must be at most 65535, not {text}")
    return value


def text_value(text: str) -> str:
    """Read a text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def absolute_path(text: str) -> str:
    """Make a path absolute: the processes that read it may run elsewhere."""
    return str(Path(text_value(text)).expanduser().resolve())


def folder(text: str) -> Path:
    """Read a path."""
    return Path(text_value(text)).expanduser()


def true_or_false(text: str) -> bool:
    """Read a truth value as TOML writes it."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
    return text == "true"


def _int(text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < minimum:
        raise argparse.ArgumentTypeError(f"must be {minimum} or more, not {text}")
    return value
