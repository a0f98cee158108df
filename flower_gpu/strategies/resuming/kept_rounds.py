"""The finished rounds of a run, for grids without checkpoints of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flower_gpu.strategies.resuming.checkpoint import Checkpoints
from flower_gpu.strategies.rounds import ResumableGrid, RoundState


class KeptRounds:
    """The finished rounds of an app's first strategy start. A later start begins anew, without checkpoints.

    ``checkpoints``: the checkpoints to write; None to write none.
    ``saved``: round after which the first start continues.
    ``recorder``: the :class:`.Recorder` of the run, if any.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None = None,
        saved: RoundState | None = None,
        recorder: Any = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._saved = saved
        self._recorder = recorder
        self._starts = 0
        self._other_grids: list[ResumableGrid] = []

    def on(self, grid: Any) -> None:
        """Make a grid a :class:`.ResumableGrid`. If it is one already, its own methods are called as well."""
        if isinstance(grid, ResumableGrid):
            self._other_grids = [SimpleNamespace(resumed=grid.resumed, finished_round=grid.finished_round)]
        grid.resumed, grid.finished_round = self.resumed, self.finished_round

    def resumed(self) -> RoundState | None:
        """Count a start; return the last round that is known here or to the grid, or None."""
        self._starts += 1
        known = [self._saved if self._starts == 1 else None, *(grid.resumed() for grid in self._other_grids)]
        state = max(filter(None, known), key=lambda state: state.server_round, default=None)
        if state is not None and self._recorder is not None:
            self._recorder.run_resumed(state.server_round)
            self._recorder.model = state.arrays
        return state

    def finished_round(self, state: RoundState) -> None:
        """Write the checkpoint of a round, if the strategy's state can be written and any client trained."""
        for grid in self._other_grids:
            grid.finished_round(state)
        # A round in which every client failed is not written, because the run may be about to end for that
        # reason. A resumed run then repeats the round.
        has_failed = self._recorder is not None and self._recorder.failed_round == state.server_round
        is_kept = self._starts <= 1 and state.strategy_state is not None and not has_failed
        if self._checkpoints is not None and is_kept:
            self._checkpoints.write(state)
