"""What the server and the clients of engine ``start-client`` have in common."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

#: Messages may be as large as gRPC allows.
MAX_MESSAGE_BYTES = 2**31 - 1


def load_settings(path: str) -> dict[str, Any]:
    """Read what the launcher wrote down, and make the app importable."""
    settings: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    sys.path.insert(0, settings["app"])
    return settings


def load_function(component: str, name: str) -> Callable[..., Any]:
    """Import a function from the module of a component ``"package.module:attribute"``."""
    module = component.partition(":")[0]
    function = getattr(import_module(module), name, None)
    if not callable(function):
        sys.exit(f"module {module} has no function {name}")
    return function  # type: ignore[no-any-return]


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process through its ``finally`` blocks."""

    def leave(signum: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)
