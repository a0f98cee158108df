"""Several SuperNodes of one command: how they are started, watched and restarted.

A SuperNode that exits is started again, because its SuperLink may have been unreachable, or a user may have
killed the process. Some faults are permanent: an unknown option, an invalid address, or TLS with a SuperLink
that has no certificates. A permanent fault ends the command at once. Other faults may be temporary, so the
command ends after three failed starts in a row.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from flower_gpu import options, trace
from flower_gpu.apps.app import ConfigValue, format_pairs
from flower_gpu.apps.folder import RunFolder
from flower_gpu.launch import ports
from flower_gpu.launch.options import node_config_of
from flower_gpu.launch.supervisor import Service, Supervisor, new_lines, without_colours
from flower_gpu.options import CLIENT_VARIABLE, CallOptions
from flower_gpu.printable import first_line, path_text, printable
from flower_gpu.programs.node_logs import has_connected, last_output

#: Flower's command, and its options for a node's config and for the key by which a SuperLink knows the node.
COMMAND: Final = "flower-supernode"
NODE_CONFIG: Final = "--node-config"
KEY: Final = "--auth-supernode-private-key"

_PAUSE_S: Final = 5.0  # pause before a SuperNode is started again
# A SuperNode that exits sooner counts as a failed start, even if the SuperLink had let it in.
_EARLY_S: Final = 20.0
_MOST_FAILED_STARTS: Final = 3
# A SuperNode that the SuperLink refuses keeps asking. Its key may be registered later, or the SuperLink may
# forget the last connection.
_TURNED_AWAY_PAUSE_S: Final = 15.0
# Answer of the SuperLink (flwr.supercore.error.catalog), which the SuperNode logs
_TURNED_AWAY: Final = "Failed to activate SuperNode."
_WHY_TURNED_AWAY: Final = (
    f", and asks every {_TURNED_AWAY_PAUSE_S:g} s: the SuperLink does not know its key, or still counts it "
    "as connected, as for up to two minutes after a SuperNode was killed. If the key is new, the SuperLink's "
    "operator runs: flwr supernode register FILE.pub"
)

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


class NeverStartsError(Exception):
    """A SuperNode cannot be started. The message gives the reason."""


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

    def starts_again(self, ending: str) -> None:
        """Show that a SuperNode has exited and will be started again.

        ``ending``: clause with the name of the SuperNode and the way it has exited.
        """
        self._say(f"{ending}; it is started again in {_PAUSE_S:g} s")

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


class SuperNode:
    """One SuperNode, which is started again when it exits. The first lines of this file give the rules."""

    def __init__(
        self,
        number: int,
        count: int,
        flower_options: Sequence[str],
        pairs: Mapping[str, ConfigValue],
        calls: CallOptions,
        env: Mapping[str, str],
        logs: RunFolder,
        *,
        has_key: bool = False,
    ) -> None:
        config = {"partition-id": number, "num-partitions": count, **pairs, **node_config_of(calls, number)}
        self.options = [*flower_options, NODE_CONFIG, format_pairs(config)]
        self._has_key = has_key
        self.env = {**options.node_environment(env, config), CLIENT_VARIABLE: str(config["partition-id"])}
        self._name = f"SuperNode {number}"
        self._log = logs.log(f"supernode-{number}")
        self._new_lines = trace.Follower(self._log)
        self._service: Service | None = None
        self._began = 0.0
        self._again_at = 0.0
        self._failed_starts = 0

    def look(self, supervisor: Supervisor, notices: Notices) -> None:
        """Show new messages of its log. Start it if it is not running and its pause is over.

        Raises NeverStartsError if another start would fail, too.
        """
        is_running = self._service is not None and self._service.runs
        notices.look(self._name, self._new_lines, self._log)
        if is_running:
            return
        now = time.monotonic()
        if self._service is not None:
            self._note_end(self._service, now, notices)
        if now >= self._again_at:
            port = ports.free_ports(1)[0]
            command = [COMMAND, "--port", str(port), *self.options]
            self._service = Service(self._name, command, self.env, self._log)
            self._began = now
            supervisor.start(self._service)

    def _note_end(self, service: Service, now: float, notices: Notices) -> None:
        self._service = None
        output = without_colours(last_output(self._log))
        if self._has_key and _TURNED_AWAY in output:
            self._again_at = now + _TURNED_AWAY_PAUSE_S
            notices.turned_away(self._name, _WHY_TURNED_AWAY)
            return
        ending = ": ".join(filter(None, (service.describe_end(), printable(reason_in(output)).rstrip("."))))
        if stays(service.returncode, output):
            raise NeverStartsError(f"{ending}. The whole log is {path_text(self._log)}")
        has_failed = now - self._began < _EARLY_S or not self._has_begun(output)
        self._failed_starts = self._failed_starts + 1 if has_failed else 0
        if self._failed_starts >= _MOST_FAILED_STARTS:
            raise NeverStartsError(
                f"{ending}, {self._failed_starts} times in a row. The end of {path_text(self._log)}:\n"
                f"{service.tail()}"
            )
        notices.starts_again(ending)
        self._again_at = now + _PAUSE_S

    def _has_begun(self, output: str) -> bool:
        """Return True if the last start has reached its SuperLink, or has tried to connect to it."""
        exit_text = _EXIT.search(output)
        return has_connected(self._log) or (exit_text is not None and exit_text["code"] == _CANNOT_CONNECT)
