"""What handles the messages of a run: this machine, or the hosts of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flwr.supercore.run import Run

from flower_gpu.flower.rounds import RoundState
from flower_gpu.simulation import machine
from flower_gpu.simulation.durations import Durations
from flower_gpu.simulation.grid import SimulationGrid
from flower_gpu.simulation.host import Host, Work
from flower_gpu.simulation.local_grid import LocalGrid
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.states import StateStore

if TYPE_CHECKING:
    from flower_gpu.simulation.checkpoint import Checkpoints


@dataclass(frozen=True)
class Rounds:
    """What a grid must know of a run's rounds.

    ``run_id``: the run's.
    ``nodes``, ``states``: who is sent messages, and what they keep.
    ``checkpoints``, ``resumed``: where finished rounds are kept, and where the run goes on.
    ``has_longest_first``: whether the longest message of a round is handled first.
    """

    run_id: int
    nodes: VirtualNodes
    states: StateStore
    checkpoints: Checkpoints | None
    resumed: RoundState | None
    has_longest_first: bool


class Engine(Protocol):
    """Handles messages of a run."""

    @property
    def concurrency(self) -> int:
        """How many messages are handled at a time, at most."""

    @property
    def threads(self) -> int:
        """Of each worker's libraries."""

    @property
    def durations(self) -> Durations:
        """What messages take; from :meth:`open` on."""

    def described(self) -> dict[str, Any]:
        """Return the models of processors and GPUs, and versions, as the settings of a run have them."""

    def open(self, rounds: Rounds, close_later: Callable[[Callable[[], Any]], Any]) -> SimulationGrid:
        """Get ready for messages; ``close_later`` takes what is called at the end, the last one first."""

    def where(self) -> str:
        """Say where messages are handled."""

    def has_begun(self) -> None:
        """Take note that the trace says that the run has begun."""

    def load_data(self) -> None:
        """Load what calls find loaded, where there is something to load."""

    def facts(self) -> dict[str, Any]:
        """Return what the result is to hold of this."""


class LocalEngine:
    """The machine that the run is on."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._host = Host(work)
        self.concurrency, self.threads = self._host.concurrency, self._host.threads

    @property
    def durations(self) -> Durations:
        """What messages take; from :meth:`open` on."""
        return self._host.durations

    def described(self) -> dict[str, Any]:
        """Return the models of processors and GPUs, and versions."""
        return machine.described(self._host.gpus)

    def open(self, rounds: Rounds, close_later: Callable[[Callable[[], Any]], Any]) -> SimulationGrid:
        """Get ready for messages."""
        host = self._host
        close_later(host.close)
        self._handler = host.open(rounds.nodes)
        grid = LocalGrid(
            Run.create_empty(rounds.run_id),
            rounds.nodes,
            self._handler,
            host.concurrency,
            checkpoints=rounds.checkpoints,
            resumed=rounds.resumed,
            has_spare=host.has_spare,
            durations=host.durations if rounds.has_longest_first else None,
            sums_in_order=self._work.is_deterministic,
            is_strict=self._work.is_strict,
        )
        # Workers end at once, then the threads that wait for them.
        close_later(grid.close)
        close_later(host.end_workers)
        return grid

    def where(self) -> str:
        """Say where messages are handled."""
        return self._host.where()

    def has_begun(self) -> None:
        """Do nothing: workers write into the trace themselves."""

    def load_data(self) -> None:
        """Load what calls find loaded."""
        self._host.load_data()

    def facts(self) -> dict[str, Any]:
        """Return what the result is to hold of the workers."""
        return self._handler.facts()
