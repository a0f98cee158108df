"""Text that others have written, as a terminal may be given it."""

from __future__ import annotations

import pwd


def printable(text: str) -> str:
    """Return a text with ``?`` in the place of what a terminal would obey and not show.

    A client's name is in labels, traces and tickets, and may be anything: escape sequences, line breaks,
    marks that turn the direction of writing.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def account_name(user: int) -> str:
    """Return the name of an account; its number where the system knows no name."""
    try:
        return printable(pwd.getpwuid(user).pw_name)
    except (KeyError, OverflowError):
        return str(user)
