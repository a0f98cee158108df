"""Text that others have written, as a terminal may be given it."""

from __future__ import annotations

import os
import pwd
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_SLOW_S: Final = 1.0


def printable(text: str) -> str:
    """Return a text with ``?`` in the place of what a terminal would obey and not show.

    A client's name is in labels, traces and tickets, and may be anything: escape sequences, line breaks,
    marks that turn the direction of writing.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as it can be pasted into a shell: quoted where it has to be.

    A byte that cannot be printed, such as one that is not UTF-8, is written in octal within ``$'...'``, which
    bash and zsh take.
    """
    text = os.fspath(path)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))


def duration_text(seconds: float) -> str:
    """Write how long something took: ``"0.12 s"``, ``"41.3 s"``, ``"3 min 20 s"``, ``"2 h 5 min"``."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def account_name(user: int) -> str:
    """Return the name of an account; its number where the system knows no name."""
    try:
        return printable(pwd.getpwuid(user).pw_name)
    except (KeyError, OverflowError):
        return str(user)


@contextmanager
def told_if_slow(say: Callable[[str], Any], text: str) -> Iterator[None]:
    """Say what goes on in the block, if it takes longer than a second."""
    timer = threading.Timer(_SLOW_S, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
