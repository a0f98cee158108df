"""`flower-gpu slurm` as a user types it, on a cluster of the test's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_cluster import Cluster
from waiting import until

#: Its clients stop in the second round, until there is a file `goes-on` in the folder that they are given.
STOPPING = Path(__file__).with_name("stopping_app")
TIMEOUT_S = 120


@dataclass(frozen=True)
class Following:
    """A command that has submitted a job, and shows its log."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def shown(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def told(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def job(self) -> str:
        found = until(lambda: re.search(r"job (\d+) is submitted", self.told), "the job is submitted", 60)
        return found[1]

    @property
    def run(self) -> Path:
        """The folder of the only run of the job."""
        (found,) = (self.folder / "runs" / f"slurm-{self.job}").glob("[0-9]*")
        return found

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run / "summary.json").read_text())

    def status(self) -> int:
        """Wait for its end."""
        return self.process.wait(TIMEOUT_S)

    def __str__(self) -> str:
        return f"{self.shown}\n{self.told}"


@contextmanager
def following(
    slurm: Cluster, folder: Path, app: Path, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[Following]:
    """Start the command in a new folder; it is over with the block."""
    folder.mkdir()
    command = [sys.executable, "-m", "flower_gpu.cli", "slurm", str(app), *options]
    with (
        (folder / "out").open("w") as out,
        (folder / "err").open("w") as err,
        subprocess.Popen(
            command, cwd=folder, env={**os.environ, **slurm.env, **(env or {})}, stdout=out, stderr=err
        ) as process,
    ):
        try:
            yield Following(process, folder)
        finally:
            process.kill()
