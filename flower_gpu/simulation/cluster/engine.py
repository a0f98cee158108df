"""The hosts of a Ray cluster as what handles the messages of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.supercore.run import Run

from flower_gpu.simulation.cluster.grid import ClusterGrid
from flower_gpu.simulation.cluster.hosts import Hosts
from flower_gpu.simulation.durations import Durations
from flower_gpu.simulation.engine import Rounds
from flower_gpu.simulation.grid import SimulationGrid
from flower_gpu.simulation.host import Work


class ClusterEngine:
    """The hosts of a Ray cluster. To be used in :func:`flower_gpu.simulation.cluster.hosts.connected`."""

    def __init__(self, work: Work, run_id: int, run_config: Mapping[str, Any]) -> None:
        self._work = work
        self._hosts = Hosts(work, run_id, run_config)
        self.durations = Durations()

    @property
    def concurrency(self) -> int:
        """How many messages are handled at a time, at most."""
        return self._hosts.concurrency

    @property
    def threads(self) -> int:
        """Of each worker's libraries."""
        return self._hosts.threads

    def described(self) -> dict[str, Any]:
        """Return the models of processors and GPUs, and versions."""
        return self._hosts.described()

    def open(self, rounds: Rounds, close_later: Callable[[Callable[[], Any]], Any]) -> SimulationGrid:
        """Get ready for messages."""
        import ray

        grid = ClusterGrid(
            Run.create_empty(rounds.run_id),
            rounds.nodes,
            self._hosts,
            rounds.states,
            self._work.seed,
            ray.put,
            checkpoints=rounds.checkpoints,
            resumed=rounds.resumed,
            durations=self.durations if rounds.has_longest_first else None,
            learned=self.durations,
            sums_in_order=self._work.is_deterministic,
            is_strict=self._work.is_strict,
        )
        close_later(grid.wait)  # last: without its threads Ray can be left
        close_later(self._hosts.close)
        close_later(grid.close)
        self._hosts.begin(grid.listener())
        return grid

    def where(self) -> str:
        """Say where messages are handled."""
        return f"calls run on the hosts of a Ray cluster: up to {self.concurrency} at a time"

    def has_begun(self) -> None:
        """Write into the trace what hosts tell, from now on."""
        self._hosts.write()

    def load_data(self) -> None:
        """Do nothing: each agent has loaded its data when it began."""

    def facts(self) -> dict[str, Any]:
        """Return what the result is to hold of the hosts."""
        return self._hosts.facts()
