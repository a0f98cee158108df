"""What each client's calls have come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from flower_gpu.monitor.report.calls import PHASES, CallTry
from flower_gpu.monitor.report.names import client_key


@dataclass(frozen=True)
class ClientRow:
    """The calls of one client.

    Parameters
    ----------
    client : str
        Its name.
    calls, tries : int
        How many; a call that runs out of memory may be tried again.
    median_s, max_s : dict of str to float or None
        Seconds of a call by phase; None where no call had this phase.
    peak_bytes : int or None
        The most memory that a worker of it was seen to use on one GPU.
    failures : int
        Tries that have ended without a result.
    """

    client: str
    calls: int
    tries: int
    median_s: Mapping[str, float | None]
    max_s: Mapping[str, float | None]
    peak_bytes: int | None
    failures: int


def client_rows(tries: Sequence[CallTry]) -> list[ClientRow]:
    """Return a row for each client, in the order of their names."""
    by_client: dict[str, list[CallTry]] = {}
    for one in tries:
        by_client.setdefault(one.client, []).append(one)
    return [_row(client, by_client[client]) for client in sorted(by_client, key=client_key)]


def _row(client: str, tries: Sequence[CallTry]) -> ClientRow:
    seconds = {
        phase: [part.seconds for one in tries for part in one.parts if part.phase == phase]
        for phase in PHASES
    }
    return ClientRow(
        client,
        len({one.call for one in tries}),
        len(tries),
        {phase: median(values) if values else None for phase, values in seconds.items()},
        {phase: max(values, default=None) for phase, values in seconds.items()},
        max((one.peak_bytes for one in tries if one.peak_bytes is not None), default=None),
        sum(one.has_failed for one in tries),
    )
