"""What a SuperNode's log says: connections, warnings, and the reason for its exit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from flower_gpu import trace
from flower_gpu.launch.supervisor import new_lines
from flower_gpu.printable import first_line, path_text, printable

#: Flower's command for a SuperNode.
COMMAND: Final = "flower-supernode"

# A line of Flower's log, and the levels that are shown.
_LINE: Final = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR)\s*:\s+(?P<text>\S.*)")
_SHOWN: Final = ("WARNING", "ERROR")
_IS_IN: Final = "SuperNode ID:"  # logged after the SuperLink has let the SuperNode in
_TRACEBACK: Final = "Traceback (most recent call last):"
_NUMBERS: Final = re.compile(r"\d+")

# Last output of Flower: a code with a help page (flwr.supercore.exit), the reason, and a link.
_EXIT_CODE: Final = "Exit Code:"
_EXIT: Final = re.compile(
    r"Exit Code: (?P<code>\d+)\n(?P<reason>.*?)\n(?:For more information|INFO)", re.DOTALL
)
_USAGE_ERROR: Final = re.compile(rf"^{COMMAND}: error: (?P<reason>.+)", re.MULTILINE)
_USAGE_STATUS: Final = 2  # exit status of argparse
_CANNOT_CONNECT: Final = "305"
# Exit codes for keys, trusted entities, addresses and certificates that cannot be used
_STAYS: Final = ("302", "303", "304", "600", "602", "603", "604", "605")
_NO_TLS: Final = "WRONG_VERSION_NUMBER"
_NO_TLS_HINT: Final = (
    "The SuperLink answers without TLS: add --insecure, or start the SuperLink with certificates"
)


class Notices:
    """Messages to the user about the connections and errors of several SuperNodes. Shows each text once.

    ``count``: number of SuperNodes.
    ``say``: shows a line.
    ``with_warnings``: whether warnings are shown as well.
    """

    def __init__(self, count: int, say: Callable[[str], object], with_warnings: bool = True) -> None:
        self._count = count
        self._say = say
        self._with_warnings = with_warnings
        self._said: set[str] = set()
        self._in: set[str] = set()
        self._turned_away: set[str] = set()

    def turned_away(self, node: str, text: str) -> None:
        """Show that the SuperLink refuses a SuperNode. Repeated only after the SuperLink has let it in."""
        if node not in self._turned_away:
            self._turned_away.add(node)
            self._say(f"{node} is not admitted{text}")

    def starts_again(self, ending: str, pause_s: float) -> None:
        """Show that a SuperNode has exited and will be started again.

        ``ending``: clause with the name of the SuperNode and the way it has exited.
        ``pause_s``: seconds until the start.
        """
        self._say(f"{ending}; it is started again in {pause_s:g} s")

    def look(self, node: str, log: trace.Follower, path: Path) -> None:
        """Read the new lines in the log of a SuperNode, and show connections and errors."""
        lines = new_lines(log)
        for number, line in enumerate(lines):
            if _IS_IN in line:
                self._let_in(node)
            elif (entry := _LINE.match(line)) and entry["level"] in _SHOWN:
                exception = _exception_in(_rest_of_entry(lines[number + 1 :]))
                self._note(node, entry["level"], ": ".join(filter(None, (entry["text"], exception))), path)

    def _let_in(self, node: str) -> None:
        if node in self._turned_away:
            self._turned_away.remove(node)
            self._say(f"{node} is admitted")
        if len(self._in) < self._count:
            self._in.add(node)
            if len(self._in) == self._count:
                self._say(f"connected: {self._count} of {self._count} SuperNodes")

    def _note(self, node: str, level: str, text: str, path: Path) -> None:
        kind = _NUMBERS.sub("#", text)
        # The exit of a SuperNode is shown elsewhere, with its reason.
        is_wanted = (level == "ERROR" or self._with_warnings) and not text.startswith(_EXIT_CODE)
        if is_wanted and kind not in self._said:
            self._said.add(kind)
            self._say(f"{node}: {printable(text)} (in {path_text(path)})")


def _rest_of_entry(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines up to the next log entry, such as a traceback."""
    return lines[: next((number for number, line in enumerate(lines) if _LINE.match(line)), len(lines))]


def _exception_in(lines: Sequence[str]) -> str:
    """Return the text of the exception below the last traceback in ``lines``, or an empty text."""
    if _TRACEBACK not in lines:
        return ""
    last = max(number for number, line in enumerate(lines) if line == _TRACEBACK)
    below = [line for line in lines[last + 1 :] if line.strip()]
    begins = next((number for number, line in enumerate(below) if not line.startswith(" ")), len(below))
    return first_line("\n".join(below[begins:]))


def reason_in(output: str) -> str:
    """Return the reason for the exit of a SuperNode, from the output of its last start, or an empty text."""
    if (usage_error := _USAGE_ERROR.search(output)) is not None:
        return usage_error["reason"].strip()
    if (exit_text := _EXIT.search(output)) is not None:
        reason = " ".join(exit_text["reason"].split())
        return f"{reason} {_NO_TLS_HINT}" if _NO_TLS in reason else reason
    return _exception_in(output.splitlines())


def stays(status: int | None, output: str) -> bool:
    """Return True if the fault of a SuperNode is permanent, so that its next start would fail, too.

    ``status``: exit status of the SuperNode.
    ``output``: output of its last start.
    """
    exit_text = _EXIT.search(output)
    code = "" if exit_text is None else exit_text["code"]
    return status == _USAGE_STATUS or code in _STAYS or (code == _CANNOT_CONNECT and _NO_TLS in output)


def has_tried_to_connect(output: str) -> bool:
    """Return True if a SuperNode exited because it could not connect to its SuperLink."""
    exit_text = _EXIT.search(output)
    return exit_text is not None and exit_text["code"] == _CANNOT_CONNECT
