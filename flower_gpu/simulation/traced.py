"""What of a simulated run's progress goes into its trace: the rest is written there by each call."""

from __future__ import annotations

from flower_gpu import trace
from flower_gpu.simulation.events import Event, PhaseFinished, PhaseStarted, RunStarted
from flower_gpu.simulation.results import finite


def trace_event(event: Event) -> None:
    """Write an event into the trace, if it is one of a round."""
    match event:
        case RunStarted():
            trace.write("strategy_started", strategy=event.strategy, num_rounds=event.num_rounds)
        case PhaseStarted():
            trace.write("round_started", round=event.server_round, task=event.kind, messages=event.total)
        case PhaseFinished():
            trace.write(
                "round_finished",
                round=event.server_round,
                task=event.kind,
                messages=event.messages,
                failed=event.failed,
                seconds=event.seconds,
                metrics=finite(event.metrics),
            )
        case _:
            pass
