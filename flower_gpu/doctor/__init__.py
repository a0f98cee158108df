"""The checks of ``flower-gpu doctor``: functions that yield what they have found, by group in a module each.

A finding is a level, a text, and mostly what to do. ``examine`` runs the checks one after the other,
and the command prints what they yield as it comes. None of them imports torch or flwr, or starts a GPU, but
for the last: a call as a client's, in a worker (``trial``).
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
    """Run checks one after the other; one that fails itself is a finding, too."""
    for name, check in checks.items():
        try:
            for level, text, *todo in check():
                yield Finding(name, level, text, todo[0] if todo else "")
        except Exception as error:
            text = f"this check failed itself, {type(error).__name__}: {error}"
            yield Finding(name, "problem", text, "please report it, with this line")
