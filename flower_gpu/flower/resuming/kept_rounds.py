"""The finished rounds of a run, for grids that know nothing of checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flower_gpu.flower.resuming.checkpoint import Checkpoints
from flower_gpu.flower.rounds import ResumableGrid, RoundState


class KeptRounds:
    """The finished rounds of the first start of a strategy in an app; a later one begins anew, and has none.

    ``checkpoints``: None keeps none.
    ``found``: where the first start goes on.
    ``recorder``: of the run, a :class:`.Recorder`, if it has one.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None = None,
        found: RoundState | None = None,
        recorder: Any = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._found = found
        self._recorder = recorder
        self._starts = 0
        self._beside: list[ResumableGrid] = []

    def on(self, grid: Any) -> None:
        """Make a grid a :class:`.ResumableGrid`; one that keeps rounds already does that as well."""
        if isinstance(grid, ResumableGrid):
            self._beside = [SimpleNamespace(resumed=grid.resumed, finished_round=grid.finished_round)]
        grid.resumed, grid.finished_round = self.resumed, self.finished_round

    def resumed(self) -> RoundState | None:
        """Note a start; return the last round that is known here, or to the grid."""
        self._starts += 1
        known = [self._found if self._starts == 1 else None, *(each.resumed() for each in self._beside)]
        state = max(filter(None, known), key=lambda state: state.server_round, default=None)
        if state is not None and self._recorder is not None:
            self._recorder.run_resumed(state.server_round)
            self._recorder.model = state.arrays
        return state

    def finished_round(self, state: RoundState) -> None:
        """Write the checkpoint of a round, if the strategy's state can be written, and any client trained."""
        for each in self._beside:
            each.finished_round(state)
        # Else a run that goes on does the round again: it may be about to be ended for that.
        has_failed = self._recorder is not None and self._recorder.failed_round == state.server_round
        is_kept = self._starts <= 1 and state.strategy_state is not None and not has_failed
        if self._checkpoints is not None and is_kept:
            self._checkpoints.write(state)
