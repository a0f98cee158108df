"""Text that others have written, as a terminal may be given it."""

from __future__ import annotations

import os
import pwd
import shlex


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


def account_name(user: int) -> str:
    """Return the name of an account; its number where the system knows no name."""
    try:
        return printable(pwd.getpwuid(user).pw_name)
    except (KeyError, OverflowError):
        return str(user)
