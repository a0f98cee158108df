"""The checks of ``flower-gpu doctor``: functions that yield findings, by group in a module each.

``examine`` runs the checks one after the other, and the command prints their findings as they come. No check
imports torch or flwr in this process, or starts a GPU here: the last one has a worker do that (``cuda``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's; ``todo`` is empty where nothing is to be done."""

    check: str
    level: str  # "ok"; "note": fine, and good to know; "problem": something must be done
    text: str
    todo: str = ""


#: Level, text, and what to do.
Found = tuple[str, str] | tuple[str, str, str]
Check = Callable[[], Iterable[Found]]


def examine(checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Run checks one after the other; a check that fails itself is a finding, too."""
    for name, check in checks.items():
        try:
            for level, text, *todo in check():
                yield Finding(name, level, text, todo[0] if todo else "")
        except Exception as error:
            text = f"this check failed itself, {type(error).__name__}: {error}"
            yield Finding(name, "problem", text, "please report it, with this line")
