"""A host with stub GPUs, a ledger, footprints and a trace of its own, for programs with clients."""

from __future__ import annotations

import os
from pathlib import Path

from launched import StubHost

FOLDER = Path(__file__).parent


class ModHost(StubHost):
    """A host with GPUs of 16 GiB."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, gpus=2)
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        self.footprints = self.state_dir / f"flower-gpu-{os.getuid()}" / "footprints.json"
        for made in (self.run_dir, self.state_dir):
            made.mkdir(mode=0o700)
        self.env |= {
            "FLOWER_GPU_STATE_DIR": str(self.state_dir),
            "FLOWER_GPU_RUN_DIR": str(self.run_dir),
            "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parents[1])]),
        }
