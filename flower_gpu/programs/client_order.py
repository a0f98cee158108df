"""The order of the clients of ``launch``, which is the same in each start of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

from flower_gpu.apps.folder import RunFolder
from flower_gpu.programs.node_logs import clients_of_nodes
from flower_gpu.strategies.streaming import InOrder

# Longest wait for the ids in the logs. A SuperNode is connected a moment before it logs its id.
_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.02
_MOST_CLIENTS: Final = 1 << 32  # more than the clients of any launch


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
