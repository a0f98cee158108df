"""The clients of ``launch`` by the ids of their nodes, read from the logs of their SuperNodes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from flower_gpu.apps.folder import RunFolder

# A SuperNode logs this line once, when it has got its id from the SuperLink (flwr.supernode).
_NODE_ID: Final = re.compile(r"SuperNode ID: (\d+)")
# Longest wait for the ids in the logs. A SuperNode is connected a moment before it logs its id.
_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.02
_MOST_CLIENTS: Final = 1 << 32  # more than the clients of any launch


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


class InOrder(list[Any]):
    """Replies in the order of the clients, which is more stable than the order of node ids."""


class ClientOrder:
    """The order of nodes by their clients. Node ids do not give an order, because each start has new ids."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._clients: dict[int, int] = {}

    def nodes(self, nodes: Iterable[Any]) -> list[Any]:
        """Return Flower's nodes in order. Waits a limited time until the client of each node is known."""
        known = list(nodes)
        deadline = time.monotonic() + _PATIENCE_S
        while new := {node.node_id for node in known} - self._clients.keys():
            self._clients |= clients_of_nodes(self._folder)
            # Nodes that this run has not started have no log. They come last.
            if time.monotonic() > deadline:
                self._clients = {**{id_: id_ + _MOST_CLIENTS for id_ in new}, **self._clients}
            time.sleep(_PAUSE_S)
        return sorted(known, key=lambda node: self._clients[node.node_id])

    def replies(self, replies: Iterable[Any]) -> InOrder:
        """Return replies in the order of the clients that sent them."""
        return InOrder(sorted(replies, key=lambda reply: self._clients.get(reply.metadata.src_node_id, -1)))
