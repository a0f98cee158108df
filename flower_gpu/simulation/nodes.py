"""The virtual nodes of a simulation: their ids, contexts and availability.

Also reads from the call stack how many nodes Flower waits for, and in which round.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from types import FrameType
from typing import Any, Final

from flwr.app import Context, RecordDict
from flwr.app.user_config import UserConfigValue

from flower_gpu.errors import ConfigError
from flower_gpu.flower import record_bytes
from flower_gpu.flower.message_call import PARTITION_KEY
from flower_gpu.simulation.clients import ClientOverrides, Clients

PARTITIONS_KEY: Final = "num-partitions"

_RESERVED: Final = 2  # id 0 stands for no node, id 1 for the SuperLink
# Functions in which Flower waits for nodes: in strategies, and in the ClientManager of its older API.
_OF_STRATEGIES: Final = ("flwr.serverapp.strategy.strategy_utils", "sample_nodes")
_OF_CLIENT_MANAGER: Final = ("flwr.server.compat.app_utils", "wrapped_method")
# Maximum number of stack frames between these functions and the grid.
_MOST_FRAMES: Final = 16
# Maximum number of draws of the available nodes of a round.
_MOST_DRAWS: Final = 1000
# Ids are sent as unsigned 64-bit integers, but some tools show signed ones.
_ID_BITS: Final = 63


class VirtualNodes:
    """The nodes of a run.

    ``count``: number of nodes.
    ``seed``: seed of the run. The same seed gives the same ids in the same order, and the same availability.
    ``run_id``: id of the run.
    ``run_config``: value of ``run_config`` in each context.
    ``clients``: settings of single clients.
    ``ids``: ids of the nodes. The index of a node is its partition.
    ``come_and_go``: True if some node is not always available.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        run_id: int,
        run_config: Mapping[str, UserConfigValue],
        clients: Clients = Clients(),  # noqa: B008 - it is immutable
    ) -> None:
        self.ids: Sequence[int] = _ids(count, seed)
        self.seed, self.run_id, self.run_config, self.clients = seed, run_id, run_config, clients
        self._partitions = {node_id: number for number, node_id in enumerate(self.ids)}
        self._shares = [clients.of_client(number).get("availability", 1.0) for number in range(count)]
        self.come_and_go = any(share < 1 for share in self._shares)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._partitions

    def partition_of(self, node_id: int) -> int:
        """Return the partition of a node.

        Raises KeyError if there is no such node.
        """
        return self._partitions[node_id]

    def place_of(self, node_id: int | None) -> int:
        """Return the sort key of nodes: the partition; unknown nodes come last."""
        return len(self.ids) if node_id is None else self._partitions.get(node_id, len(self.ids))

    def overrides_of(self, node_id: int, message_type: str = "") -> ClientOverrides:
        """Return the settings of a node's own for calls of a message type."""
        return self.clients.of_client(self._partitions[node_id], message_type)

    def available(self, place: str, wanted: int | None) -> Sequence[int]:
        """Return the available nodes in the order of their partitions.

        ``place``: the round, in words. The same place always has the same nodes.
        ``wanted``: number of nodes that Flower waits for. Waiting brings other clients, so the draw is
        repeated until there are enough. None for a single draw.

        Raises ConfigError if no draw has enough nodes.
        """
        largest = 0
        for number in range(_MOST_DRAWS):
            draw = random.Random(f"flower-gpu availability {self.seed} {place} {number}")
            shares = zip(self.ids, self._shares, strict=True)
            available = [node_id for node_id, share in shares if draw.random() < share]
            if wanted is None or len(available) >= wanted:
                return available
            largest = max(largest, len(available))
        raise ConfigError(
            f"the ServerApp waits for {wanted} clients in {place}, and in {_MOST_DRAWS} draws at most "
            f"{largest} of {len(self.ids)} were available at a time: raise availability in the table of "
            "clients, or lower the strategy's min_available_nodes, min_train_nodes or min_evaluate_nodes"
        )

    def context_of(self, node_id: int, state: bytes) -> Context:
        """Return the context of a node.

        ``state``: encoded state after the last message; empty for a new node.
        """
        return Context(
            run_id=self.run_id,
            node_id=node_id,
            node_config={PARTITION_KEY: self._partitions[node_id], PARTITIONS_KEY: len(self.ids)},
            state=record_bytes.decode(state) if state else RecordDict(),
            run_config=dict(self.run_config),
        )


def wanted_nodes() -> int | None:
    """Return the number of nodes that Flower waits for, or None if it is unknown.

    ``Grid.get_node_ids`` takes no argument. So the number is read from the local variables of the functions
    in which Flower waits for nodes. Another release of Flower may have other functions. Then it is unknown.
    """
    for frame in _frames():
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place == _OF_STRATEGIES:
            return _number(frame.f_locals.get("min_available_nodes"))
        if place == _OF_CLIENT_MANAGER:
            return _sampled(frame.f_locals)
    return None


def asked_round() -> int | None:
    """Return the round for which the caller asks for nodes, or None if it is unknown.

    It is the variable ``server_round`` of a calling function: a method of a strategy, or a loop of the app.
    """
    rounds = (_number(frame.f_locals.get("server_round")) for frame in _frames())
    return next((number for number in rounds if number is not None), None)


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the calling functions, starting with the grid's own."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _sampled(variables: Mapping[str, Any]) -> int | None:
    """Return the number of nodes that ``ClientManager.sample`` waits for. Its other methods do not wait.

    ``variables``: local variables of the wrapper around the method.
    """
    method: Any = variables.get("original_method")
    if getattr(method, "__name__", "") != "sample":
        return None
    try:
        arguments = signature(method).bind(*variables["args"], **variables["kwargs"]).arguments
    # Either the call itself is wrong and will raise its own error, or this is another release of Flower.
    except (TypeError, KeyError):
        return None
    least = arguments.get("min_num_clients")
    return _number(arguments.get("num_clients") if least is None else least)


def _number(value: object) -> int | None:
    return value if type(value) is int else None


def _ids(count: int, seed: int) -> tuple[int, ...]:
    numbers = random.Random(f"flower-gpu nodes {seed}")
    # A dictionary as an ordered set
    ids: dict[int, None] = {}
    while len(ids) < count:
        node_id = numbers.getrandbits(_ID_BITS)
        if node_id >= _RESERVED:
            ids[node_id] = None
    return tuple(ids)
