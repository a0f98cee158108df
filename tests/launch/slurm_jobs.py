"""`flower-gpu slurm` as a user types it, on a cluster of the test's own."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_programs import run
from slurm_cluster import Cluster
from waiting import until

#: Its clients stop in the second round, until there is a file `goes-on` in the folder that they are given.
STOPPING = Path(__file__).with_name("stopping_app")
TIMEOUT_S = 120
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

# The fork servers of a job have its variables: what looks for what it has left finds them.
_ENDS_SOON = {"FLOWER_GPU_SERVER_IDLE_S": "5"}


@dataclass(frozen=True)
class Job:
    """A job that the command has submitted."""

    slurm: Cluster
    folder: Path
    job: str

    @property
    def log(self) -> str:
        path = self.folder / "runs" / f"slurm-{self.job}.log"
        return path.read_text() if path.exists() else ""

    @property
    def run(self) -> Path:
        """The folder of the only run of the job."""
        (found,) = (self.folder / "runs" / f"slurm-{self.job}").glob("[0-9]*")
        return found

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run / "result.json").read_text())  # type: ignore[no-any-return]

    def shown(self, pattern: str) -> str:
        """Return what Slurm says of it."""
        found = re.search(pattern, self.slurm("scontrol", "show", "job", self.job))
        assert found is not None, self
        return found[1]

    def status(self) -> int:
        """Wait for its end; return its exit status."""
        until(lambda: self.shown(r"JobState=(\S+)") in ENDED, f"job {self.job} ends", TIMEOUT_S)
        return int(self.shown(r" ExitCode=(\d+):"))

    def __str__(self) -> str:
        return self.log


def submitted(
    slurm: Cluster, folder: Path, app: Path, *options: str, env: Mapping[str, str] | None = None
) -> Job:
    """Run the command in a new folder."""
    folder.mkdir()
    command = [sys.executable, "-m", "flower_gpu.cli", "slurm", str(app), *options]
    done = run(command, cwd=folder, env={**os.environ, **slurm.env, **_ENDS_SOON, **(env or {})})
    assert done.returncode == 0, done.stderr
    return Job(slurm, folder, done.stdout.strip())
