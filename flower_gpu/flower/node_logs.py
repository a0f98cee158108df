"""Which node is which client of ``launch``: by what SuperNodes say in their logs at their start."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from flwr.app import Message

from flower_gpu.apps.folder import RunFolder
from flower_gpu.flower.averaging import InOrder

# flwr.supernode: said once, when the SuperLink has given it its id.
_NODE_ID: Final = re.compile(r"SuperNode ID: (\d+)")
_PATIENCE_S: Final = 5.0  # a SuperNode is there a moment before it says so
_PAUSE_S: Final = 0.02


def clients_of_nodes(folder: RunFolder) -> dict[int, int]:
    """Return the numbers of clients by the ids of their nodes, also of earlier starts of the run."""
    found = {}
    for path in folder.path.glob("client-*.log"):
        with suppress(OSError, ValueError):
            client = int(path.stem.partition("-")[2])
            found.update(
                {int(each[1]): client for each in _NODE_ID.finditer(path.read_text(errors="replace"))}
            )
    return found


class ClientOrder:
    """Gives nodes the order of their clients. Their ids are others each time that the run is started."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._clients: dict[int, int] = {}
        self._unknown: set[int] = set()

    def _place(self, node_id: int) -> tuple[bool, int]:
        """Return the sort key of a node; one that is no client's comes last."""
        return node_id not in self._clients, self._clients.get(node_id, node_id)

    def nodes(self, nodes: Iterable[Any]) -> list[Any]:
        """Return Flower's nodes in order, once it is known whose they are."""
        found = list(nodes)
        ids = {node.node_id for node in found} - self._unknown
        deadline = time.monotonic() + _PATIENCE_S
        while not ids <= self._clients.keys():
            self._clients = clients_of_nodes(self._folder)
            if time.monotonic() > deadline:  # somebody else's
                self._unknown |= ids - self._clients.keys()
                break
            time.sleep(_PAUSE_S)
        return sorted(found, key=lambda node: self._place(node.node_id))

    def replies(self, replies: Iterable[Message], message_ids: Iterable[str]) -> InOrder:
        """Return replies in order; those of one client in the order in which its messages were sent."""
        numbers = {id_: number for number, id_ in enumerate(message_ids)}

        def place(reply: Message) -> tuple[bool, int, int]:
            asked = numbers.get(reply.metadata.reply_to_message_id, len(numbers))
            return *self._place(reply.metadata.src_node_id), asked

        return InOrder(sorted(replies, key=place))
