"""The clients of ``launch`` by the ids of their nodes, read from the logs of their SuperNodes."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from flower_gpu.apps.folder import RunFolder

# A SuperNode logs this line once, when it has got its id from the SuperLink (flwr.supernode).
_NODE_ID: Final = re.compile(r"SuperNode ID: (\d+)")


def clients_of_nodes(folder: RunFolder) -> dict[int, int]:
    """Return the numbers of clients by the ids of their nodes, including earlier starts of the run."""
    clients = {}
    for path in folder.path.glob("client-*.log"):
        with suppress(OSError, ValueError):
            client = int(path.stem.partition("-")[2])
            clients.update(
                {int(match[1]): client for match in _NODE_ID.finditer(path.read_text(errors="replace"))}
            )
    return clients


def has_connected(log: Path) -> bool:
    """Return True if the SuperLink has accepted the SuperNode that was started last with this log."""
    return _NODE_ID.search(last_output(log)) is not None


def last_output(log: Path) -> str:
    """Return the output of the process that was started last with this log, or an empty text."""
    with suppress(OSError):
        # The launcher begins the output of each start with the command line.
        return log.read_text(errors="replace").rpartition("\n$ ")[2]
    return ""
