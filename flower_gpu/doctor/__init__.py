"""The checks of ``flower-gpu doctor``. Checks are functions that yield findings; each module has one group.

``examine`` runs the checks in order, and the command prints each finding immediately. This process never
imports torch or flwr, and starts nothing on a GPU. The last check lets a worker do that (``cuda``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of a check, shown as one line."""

    check: str
    level: str  # "ok", "note" (fine, but good to know) or "problem" (needs action)
    text: str
    todo: str = ""  # advice; empty if no action is needed


#: Level and text of a finding, with optional advice.
FindingParts = tuple[str, str] | tuple[str, str, str]
Check = Callable[[], Iterable[FindingParts]]


def examine(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Run the checks in order and yield their findings. An exception in a check becomes a finding."""
    for name, check in checks.items():
        try:
            for level, text, *todo in check():
                yield Finding(name, level, text, todo[0] if todo else "")
        except Exception as error:
            text = f"the check itself failed, {type(error).__name__}: {error}"
            yield Finding(name, "problem", text, "please report it, with this line")
