"""Which node is which client of ``launch``: by what SuperNodes say in their logs at their start."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from flower_gpu.apps.folder import RunFolder

# flwr.supernode: said once, when the SuperLink has given it its id.
_NODE_ID: Final = re.compile(r"SuperNode ID: (\d+)")
_PATIENCE_S: Final = 5.0  # a SuperNode is there a moment before it says so
_PAUSE_S: Final = 0.02
_MOST_CLIENTS: Final = 1 << 32  # of one launch


def clients_of_nodes(folder: RunFolder) -> dict[int, int]:
    """Return the numbers of clients by the ids of their nodes, also of earlier starts of the run."""
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
            if time.monotonic() > deadline:  # nodes that this run has not started come last
                self._clients = {**{id_: id_ + _MOST_CLIENTS for id_ in new}, **self._clients}
            time.sleep(_PAUSE_S)
        return sorted(known, key=lambda node: self._clients[node.node_id])

    def replies(self, replies: Iterable[Any]) -> InOrder:
        """Return replies in order."""
        return InOrder(sorted(replies, key=lambda reply: self._clients.get(reply.metadata.src_node_id, -1)))
