"""Part ``failures``: one run in which clients raise, one kills itself, and one hangs."""

from __future__ import annotations

from typing import Any

from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Run, perform

#: Clients and rounds, and the seconds after which one hangs.
SIZE, QUICK_SIZE = (9, 2, 10.0), (5, 1, 3.0)

_SHOWN = 60  # of an error's characters
# Which partitions fail in each way, and what their error is to tell.
_FAILURES = {
    "raise": (range(0, 1000, 3), "no data for partition"),
    "kill": ([1], "SIGKILL"),
    "hang": ([2], "no result within timeout_s="),
}


def measure(clients: int, rounds: int, timeout_s: float) -> list[dict[str, Any]]:
    """Return a row per way to fail: who did, and who was named.

    Raises
    ------
    BenchmarkError
        If the run did not end well, or somebody else was named.
    """
    config = {"num-server-rounds": rounds}
    done = perform(Run("ours", "failures", clients, config, options=("--timeout-s", str(timeout_s))))
    named = [message for found in done.summary["failures"] for message in found["messages"]]
    rows = []
    for failure, (partitions, text) in _FAILURES.items():
        found = [message for message in named if text in message["error"]]
        row = {
            "failure": failure,
            "clients": clients,
            "rounds": rounds,
            "outcome": done.summary["outcome"],
            "failed": [number for number in partitions if number < clients],
            "named": [
                sorted(message["client"] for message in found if message["round"] == number)
                for number in range(1, rounds + 1)
            ],
            "error": found[0]["error"] if found else "",
        }
        rows.append(row)
    table.show(
        f"{clients} clients, some of which fail, {rounds} rounds, {done.total_s:.1f} s",
        ("failure", "outcome", "failed", "named", "error"),
        [
            (
                row["failure"],
                row["outcome"],
                _listed(row["failed"]),
                "; ".join(_listed(found) for found in row["named"]),
                f"{row['error'][:_SHOWN]}...",
            )
            for row in rows
        ],
    )
    for row in rows:
        if not row["outcome"].startswith("completed") or row["named"] != [row["failed"]] * rounds:
            raise BenchmarkError(f"failures: {row['failure']}: {row}")
    return rows


def _listed(partitions: list[int]) -> str:
    return ", ".join(map(str, partitions))
