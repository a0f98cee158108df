"""Texts for people: without control characters and secrets, with units of bytes and durations."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import MappingProxyType
from typing import Any, Final

#: Bytes of each unit of memory (IEC 80000-13). Units with an ``i`` are powers of 1024, the others of 1000.
UNITS: Final = MappingProxyType(
    {
        "B": 1,
        "KiB": 1 << 10,
        "MiB": 1 << 20,
        "GiB": 1 << 30,
        "TiB": 1 << 40,
        "kB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
    }
)

_MOST_JOINED: Final = 3  # lines of an error
_SLOW_S: Final = 1.0
_STUCK_S: Final = 10.0
_AGAIN_S: Final = 60.0


def printable(text: str) -> str:
    """Return a text with ``?`` instead of each character that cannot be printed.

    Names of clients appear in labels, traces and tickets, and may contain anything: escape sequences, line
    breaks, or marks that change the direction of writing.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def first_line(text: str) -> str:
    """Return the first line of an error that has any text; of one that ends with a colon, with the next line.

    Some exceptions begin with an empty line, and some only say below their first line what is wrong:
    ``RuntimeError: Error(s) in loading state_dict for Net:``.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[: min(count, _MOST_JOINED)])


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path that can be pasted into a shell, quoted if necessary.

    Bytes that cannot be printed, such as invalid UTF-8, are written in octal within ``$'...'``, which bash
    and zsh understand.
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


# Quotes and brackets of the surrounding message do not belong to the URL.
_URL: Final = re.compile(
    r"(?P<scheme>[a-zA-Z][\w+.-]*)://(?P<authority>[^\s/?#'\"`<>]+)(?P<rest>[^\s'\"`<>)\]]*)"
)


def without_secrets(text: str) -> str:
    """Return a text with each URL shortened to scheme, host and port.

    A URL may contain credentials before the host, a token in the path, or secrets in the query. A URL without
    a host, such as that of a local file, is not changed.
    """

    def shown(url: re.Match[str]) -> str:
        _, _, host = url["authority"].rpartition("@")
        return f"{url['scheme']}://{host}{'/...' if url['rest'] else ''}"

    return _URL.sub(shown, text)


def duration_text(seconds: float) -> str:
    """Return a duration for people: ``"0.12 s"``, ``"41.3 s"``, ``"3 min 20 s"``, ``"2 h 5 min"``."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def format_bytes(number: int) -> str:
    """Return a number of bytes for people, such as ``"2.0 GiB"``, ``"512 MiB"`` or ``"3 B"``.

    The unit is the largest binary unit for which the number is at least 1. Sizes from GiB on have one
    decimal.

    ``number``: bytes; a difference may be negative.
    """
    sign, size = ("-", -number) if number < 0 else ("", number)
    for unit, digits in (("B", 0), ("KiB", 0), ("MiB", 0), ("GiB", 1)):
        text = f"{size / UNITS[unit]:.{digits}f}"
        if float(text) < 1024:  # compares the rounded number, so that 1023.7 MiB becomes 1.0 GiB
            return f"{sign}{text} {unit}"
    return f"{sign}{size / UNITS['TiB']:.1f} TiB"


@cache  # the live view calls it for each row of each refresh
def account_name(user: int) -> str:
    """Return the name of an account, or its number if it has no name."""
    try:
        return printable(pwd.getpwuid(user).pw_name)
    except (KeyError, OverflowError):
        return str(user)


def and_others(count: int) -> str:
    """Return the end of a list without its last ``count`` names: ``" and 1 other"``, or "" for 0 or less."""
    return f" and {count} other{'s' if count > 1 else ''}" if count > 0 else ""


@contextmanager
def told_if_slow(
    say: Callable[[str], Any], text: str, missing: Callable[[], str] | None = None
) -> Iterator[None]:
    """Say what the block does if it takes longer than a second, and later what it waits for.

    ``missing``: returns a line about what the block waits for. It is called in a separate thread after ten
    seconds, and then once a minute.
    """
    ended = threading.Event()

    def tell() -> None:
        if ended.wait(_SLOW_S):
            return
        say(text)
        pause_s = _STUCK_S - _SLOW_S
        while missing is not None and not ended.wait(pause_s):
            say(missing())
            pause_s = _AGAIN_S

    with suppress(RuntimeError):  # the limit of threads is reached, so nothing is said
        threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
