"""Which virtual nodes can be asked in a round, where a table says that some of them are away at times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from flower_gpu.errors import ConfigError
from flower_gpu.simulation.clients import Clients
from flower_gpu.simulation.nodes import VirtualNodes

_MOST_DRAWS: Final = 1000  # of a round


class Availability:
    """Draws for each round which nodes are there, by the run's seed: a run that is repeated has the same.

    ``nodes``: all of them.
    ``clients``: says in which part of the rounds each of them is there.
    ``seed``: the run's.
    """

    def __init__(self, nodes: VirtualNodes, clients: Clients, seed: int) -> None:
        self._ids = nodes.ids
        self._shares = [
            clients.of_client(partition).get("availability", 1.0) for partition in range(len(nodes.ids))
        ]
        self._seed = seed
        #: Whether any of them is ever away.
        self.has_effect = any(share < 1 for share in self._shares)

    def ids(self, place: str, wanted: int | None) -> Sequence[int]:
        """Return the nodes that are there, in the order of their partitions.

        ``place``: the round, in words; the nodes of one place are always the same.
        ``wanted``: for how many Flower waits. Time brings other clients, so it is drawn again until there are
        as many; None: one draw.

        Raises ConfigError if so many are never there.
        """
        counts = []
        for number in range(_MOST_DRAWS):
            draw = random.Random(f"flower-gpu availability {self._seed} {place} {number}")
            found = [
                node for node, share in zip(self._ids, self._shares, strict=True) if draw.random() < share
            ]
            if wanted is None or len(found) >= wanted:
                return found
            counts.append(len(found))
        raise ConfigError(
            f"the ServerApp waits for {wanted} clients in {place}, and in {_MOST_DRAWS} draws at most "
            f"{max(counts)} of {len(self._ids)} were available at a time: raise availability in the table of "
            "clients, or lower the strategy's min_available_nodes, min_train_nodes or min_evaluate_nodes"
        )
