"""Part ``failures``: clients that raise, that kill themselves, and that hang."""

from __future__ import annotations

from typing import Any

from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Run, perform

#: Clients and rounds.
SIZE, QUICK_SIZE = (9, 2), (4, 1)

_TIMEOUT_S = 10.0
_SHOWN = 60  # of an error's characters
# Which partitions fail, and what their error is to tell.
_FAILURES = {
    "raise": (range(0, 1000, 3), "no data for partition"),
    "kill": ([1], "SIGKILL"),
    "hang": ([2], "timeout_s=10"),
}


def measure(clients: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row per way to fail: who did, and who was named.

    Raises
    ------
    BenchmarkError
        If a run did not end well, or somebody else was named.
    """
    rows = []
    for failure, (partitions, _) in _FAILURES.items():
        config = {"failure": failure, "num-server-rounds": rounds}
        done = perform(Run("ours", "failures", clients, config, options=("--timeout-s", str(_TIMEOUT_S))))
        named = [message for found in done.summary["failures"] for message in found["messages"]]
        row = {
            "failure": failure,
            "clients": clients,
            "rounds": rounds,
            "rounds_with_a_model": done.figures["rounds_with_a_model"],
            "model_is_right": done.figures["model_is_right"],
            "outcome": done.summary["outcome"],
            "failed": [number for number in partitions if number < clients],
            "named": [
                sorted(message["client"] for message in named if message["round"] == number)
                for number in range(1, rounds + 1)
            ],
            "error": named[0]["error"] if named else "",
            "total_s": round(done.total_s, 1),
        }
        rows.append(row)
    table.show(
        f"{clients} clients, some of which fail, {rounds} rounds",
        ("failure", "outcome", "rounds with a model", "failed", "named", "total", "error"),
        [
            (
                row["failure"],
                row["outcome"],
                row["rounds_with_a_model"],
                _listed(row["failed"]),
                "; ".join(_listed(found) for found in row["named"]),
                f"{row['total_s']:.1f} s",
                f"{row['error'][:_SHOWN]}...",
            )
            for row in rows
        ],
    )
    for row in rows:
        _check(row)
    return rows


def _check(row: dict[str, Any]) -> None:
    is_right = (
        row["outcome"].startswith("completed")
        and row["rounds_with_a_model"] == row["rounds"]
        and row["model_is_right"]
        and row["named"] == [row["failed"]] * row["rounds"]
        and _FAILURES[row["failure"]][1] in row["error"]
    )
    if not is_right:
        raise BenchmarkError(f"failures: {row['failure']}: {row}")


def _listed(partitions: list[int]) -> str:
    return ", ".join(map(str, partitions))
