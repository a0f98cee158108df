"""Looks at ledger, driver and runs, as often as it is asked; changes nothing."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Final

from flower_gpu.errors import ConfigError
from flower_gpu.gpu import inventory
from flower_gpu.printable import account_name, path_text
from flower_gpu.watch.followed_run import FollowedRun, FollowedRuns
from flower_gpu.watch.host_look import HostLook
from flower_gpu.watch.top import snapshot
from flower_gpu.watch.top.snapshot import Snapshot

_MUTEX_WAIT_S: Final = 1.0
#: A run that has ended is shown so long, with how it ended.
_ENDED_SHOWN_S: Final = 10.0


class Watcher:
    """What runs on this host, seen again and again: the run of a folder, or all runs of this account.

    Raises ConfigError if there is no such folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigError(
                f"{path_text(folder)} is not the folder of a run, which has a trace.jsonl in it"
            )
        self._one = None if folder is None else FollowedRun(folder.absolute())
        self._runs = FollowedRuns(_ENDED_SHOWN_S)
        self._shown = [] if self._one is None else [self._one]
        self._host = HostLook(_MUTEX_WAIT_S)

    def look_for_runs(self) -> None:
        """See which runs have begun, and which have ended."""
        if self._one is None:
            self._shown = self._runs.look()

    def read_on(self, seconds: float) -> bool:
        """Read what is new in the traces, no longer than so many seconds; tell whether that was all."""
        return (self._one or self._runs).read_on(time.monotonic() + seconds)

    def take(self) -> Snapshot:
        """Look at the GPUs and the ledger, and return them with the runs as they were read last."""
        seen = self._host.look()
        runs = self._labelled_runs()
        workers = snapshot.worker_rows(seen, runs, others=self._one is None)
        pids = {row.lease: row.pid for row in workers if row.run and row.lease and row.pid}
        return Snapshot(
            time=seen.now,
            host=platform.node(),
            account=account_name(os.getuid()),
            gpu_problem=seen.inventory.problem,
            ledger_problem=seen.ledger_problem,
            gpus=snapshot.gpu_rows(seen, pids),
            runs=tuple(snapshot.run_row(seen, run) for run in runs),
            workers=workers,
            waiting=snapshot.waiting_rows(seen, runs),
            resources=snapshot.host_row(seen),
        )

    def close(self) -> None:
        """Give the driver back."""
        inventory.close()

    def _labelled_runs(self) -> list[FollowedRun]:
        """Return the runs, the oldest first, each with a label that no other has."""
        runs = sorted(self._shown, key=lambda one: one.run.since if one.run else 0.0)
        names = Counter(run.name for run in runs)
        for run in runs:
            run.label = run.name if names[run.name] == 1 else f"{run.name}:{run.pid}"
        return runs
