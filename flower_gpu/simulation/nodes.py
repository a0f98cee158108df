"""The virtual nodes of a simulation: ids and contexts, who is there; and how many Flower waits for."""

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
from flower_gpu.simulation.clients import Clients, Own

PARTITION_KEY: Final = "partition-id"
PARTITIONS_KEY: Final = "num-partitions"

_RESERVED: Final = 2  # 0 is nobody, 1 the SuperLink
# Where Flower waits for nodes: strategies, and the ClientManager of those for Flower's older API.
_OF_STRATEGIES: Final = ("flwr.serverapp.strategy.strategy_utils", "sample_nodes")
_OF_CLIENT_MANAGER: Final = ("flwr.server.compat.app_utils", "wrapped_method")
_MOST_FRAMES: Final = 16  # between there and the grid
_MOST_DRAWS: Final = 1000  # of a round: which nodes are there
_ID_BITS: Final = 63  # they travel as unsigned 64 bits, and are shown by tools that have signed ones


class VirtualNodes:
    """Nodes that exist as long as a run.

    ``count``: how many.
    ``seed``: the run's: the same seed gives the same ids in the same order, of which the same are there.
    ``run_id``: the run's.
    ``run_config``: what each context has as ``run_config``.
    ``clients``: what they have of their own.
    ``ids``: the ids; a node's place in it is its partition.
    ``come_and_go``: whether any of them is away at times.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        run_id: int,
        run_config: Mapping[str, UserConfigValue],
        clients: Clients = Clients(),  # noqa: B008 - it does not change
    ) -> None:
        self.ids = _ids(count, seed)
        self.seed, self.run_id, self.run_config, self.clients = seed, run_id, run_config, clients
        self._partitions = {node_id: number for number, node_id in enumerate(self.ids)}
        self._shares = [clients.of_client(number).get("availability", 1.0) for number in range(count)]
        self.come_and_go = any(share < 1 for share in self._shares)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._partitions

    def partition_of(self, node_id: int) -> int:
        """Return a node's partition.

        Raises KeyError if there is no such node.
        """
        return self._partitions[node_id]

    def place_of(self, node_id: int | None) -> int:
        """Return the sort key of nodes: the partition; unknown nodes come last."""
        return len(self.ids) if node_id is None else self._partitions.get(node_id, len(self.ids))

    def own(self, node_id: int, message_type: str = "") -> Own:
        """Return what a node has of its own, in calls of a type."""
        return self.clients.of_client(self._partitions[node_id], message_type)

    def there(self, place: str, wanted: int | None) -> Sequence[int]:
        """Return the nodes that are there, in the order of their partitions.

        ``place``: the round, in words; the nodes of one place are always the same.
        ``wanted``: for how many Flower waits. Time brings other clients, so it is drawn again until there are
        as many; None: one draw.

        Raises ConfigError if so many are never there.
        """
        most = 0
        for number in range(_MOST_DRAWS):
            draw = random.Random(f"flower-gpu availability {self.seed} {place} {number}")
            shares = zip(self.ids, self._shares, strict=True)
            found = [node_id for node_id, share in shares if draw.random() < share]
            if wanted is None or len(found) >= wanted:
                return found
            most = max(most, len(found))
        raise ConfigError(
            f"the ServerApp waits for {wanted} clients in {place}, and in {_MOST_DRAWS} draws at most "
            f"{most} of {len(self.ids)} were available at a time: raise availability in the table of "
            "clients, or lower the strategy's min_available_nodes, min_train_nodes or min_evaluate_nodes"
        )

    def context_of(self, node_id: int, state: bytes) -> Context:
        """Return a node's context, with a state as the last message left it."""
        return Context(
            run_id=self.run_id,
            node_id=node_id,
            node_config={PARTITION_KEY: self._partitions[node_id], PARTITIONS_KEY: len(self.ids)},
            state=record_bytes.decode(state) if state else RecordDict(),
            run_config=dict(self.run_config),
        )


def wanted_nodes() -> int | None:
    """Return how many nodes Flower waits for, if it is Flower that calls; None where nobody says.

    ``Grid.get_node_ids`` takes no argument, so the number is read where Flower has it: in the functions that
    ask until there are enough nodes. Where these are others, in another release of Flower, nothing is found.
    """
    for frame in _frames():
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place == _OF_STRATEGIES:
            return _number(frame.f_locals.get("min_available_nodes"))
        if place == _OF_CLIENT_MANAGER:
            return _sampled(frame.f_locals)
    return None


def asked_round() -> int | None:
    """Return the round for which nodes are asked; None where nobody says.

    It is ``server_round`` in the function that is being called: a method of a strategy, or a loop of the app.
    """
    found = (_number(frame.f_locals.get("server_round")) for frame in _frames())
    return next((number for number in found if number is not None), None)


def _frames() -> Iterator[FrameType]:
    """Yield the functions that are being called, from the grid's own on."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _sampled(found: Mapping[str, Any]) -> int | None:
    """Return what ``ClientManager.sample`` waits for; its other methods do not wait."""
    method: Any = found.get("original_method")
    if getattr(method, "__name__", "") != "sample":
        return None
    try:
        given = signature(method).bind(*found["args"], **found["kwargs"]).arguments
    except (TypeError, KeyError):  # an error of its own follows, or this is another release
        return None
    least = given.get("min_num_clients")
    return _number(given.get("num_clients") if least is None else least)


def _number(value: object) -> int | None:
    return value if type(value) is int else None


def _ids(count: int, seed: int) -> tuple[int, ...]:
    numbers = random.Random(f"flower-gpu nodes {seed}")
    found: dict[int, None] = {}
    while len(found) < count:
        node_id = numbers.getrandbits(_ID_BITS)
        if node_id >= _RESERVED:
            found[node_id] = None
    return tuple(found)
