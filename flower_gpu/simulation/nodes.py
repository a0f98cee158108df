"""The virtual nodes of a simulation: their ids, their contexts, and what they keep between rounds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

from flwr.app import Context
from flwr.app.user_config import UserConfigValue

from flower_gpu.errors import ConfigError
from flower_gpu.simulation.states import StateStore

PARTITION_KEY: Final = "partition-id"
PARTITIONS_KEY: Final = "num-partitions"

_RESERVED: Final = 2  # 0 is nobody, 1 the SuperLink
_ID_BITS: Final = 63  # they travel as unsigned 64 bits, and are shown by tools that have signed ones


class VirtualNodes:
    """Nodes that exist as long as a run.

    Parameters
    ----------
    count : int
        How many.
    seed : int
        Of their ids: the same seed gives the same ids in the same order.
    run_id : int
        The run's.
    run_config : mapping
        What each context has as ``run_config``.
    node_config : mapping
        What each context has in its ``node_config``, next to ``partition-id`` and ``num-partitions``.
    states : StateStore, optional
        Has what nodes keep between messages; by default all of it in memory.

    Attributes
    ----------
    ids : tuple of int
        The ids; a node's place in it is its partition.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        run_id: int,
        run_config: Mapping[str, UserConfigValue],
        node_config: Mapping[str, UserConfigValue] | None = None,
        states: StateStore | None = None,
    ) -> None:
        if count < 1:
            raise ConfigError(f"a simulation needs one node or more, not {count}")
        self.ids = _ids(count, seed)
        self._partitions = {node_id: number for number, node_id in enumerate(self.ids)}
        self._run_id = run_id
        self._run_config = dict(run_config)
        self._node_config = dict(node_config or {})
        self._states = StateStore() if states is None else states

    def partition_of(self, node_id: int) -> int:
        """Return a node's partition.

        Raises
        ------
        KeyError
            If there is no such node.
        """
        return self._partitions[node_id]

    def context_of(self, node_id: int) -> Context:
        """Return a node's context, with the state as the last message left it.

        What is changed there counts with :meth:`keep` only: after a call that failed the state is as before.
        """
        partition = self._partitions[node_id]
        config = {
            PARTITION_KEY: partition,
            PARTITIONS_KEY: len(self.ids),
            **self._node_config,
        }
        return Context(
            run_id=self._run_id,
            node_id=node_id,
            node_config=config,
            state=self._states.get(partition),
            run_config=dict(self._run_config),
        )

    def keep(self, context: Context) -> None:
        """Keep what a message has left in a context's state."""
        self._states.put(self._partitions[context.node_id], context.state)


def _ids(count: int, seed: int) -> tuple[int, ...]:
    numbers = random.Random(f"flower-gpu nodes {seed}")
    found: dict[int, None] = {}
    while len(found) < count:
        node_id = numbers.getrandbits(_ID_BITS)
        if node_id >= _RESERVED:
            found[node_id] = None
    return tuple(found)
