"""Events of a run's rounds as lines of its trace: what writes them there, and what reads them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flower_gpu import trace
from flower_gpu.simulation.events import (
    SERVER_EVALUATE,
    Event,
    PhaseFinished,
    PhaseGrew,
    PhaseStarted,
    Replied,
    RunStarted,
    finite,
)


def trace_event(event: Event) -> None:
    """Write an event into the trace, if it is one of a round: each call of a simulation writes its own."""
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


def trace_event_and_replies(event: Event) -> None:
    """Write an event into the trace, also each reply: no other process of this run may tell of it."""
    match event:
        case PhaseGrew():
            trace.write("round_grew", round=event.server_round, task=event.kind, messages=event.total)
        case Replied():
            trace.write(
                "reply",
                round=event.server_round,
                task=event.kind,
                node=event.partition,
                error=event.text or event.error,
                metrics=finite(event.metrics),
            )
        case _:
            trace_event(event)


def event_of(line: Mapping[str, Any]) -> Event | None:
    """Return what a line of a trace tells of a run's rounds; None where it is of something else."""
    server_round, kind = line.get("round"), str(line.get("task"))
    metrics = line.get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    match line.get("event"):
        case "strategy_started":
            return RunStarted(str(line.get("strategy")), line.get("num_rounds"))
        case "round_started":
            return PhaseStarted(server_round, kind, line.get("messages"))
        case "round_grew":
            return PhaseGrew(server_round, kind, line.get("messages") or 0)
        case "reply":
            return Replied(server_round, kind, line.get("node"), line.get("error"), metrics)
        case "round_finished":
            messages, failed = line.get("messages") or 0, line.get("failed") or 0
            return PhaseFinished(
                server_round, kind, messages - failed, failed, messages, line.get("seconds"), metrics
            )
        case "round" if isinstance(server_round, int):
            return PhaseFinished(server_round, SERVER_EVALUATE, metrics=metrics)
        case _:
            return None
