"""A host with stub GPUs, a ledger and footprints of its own, for programs and whole federations."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ledger_observer import observed
from nvml_stub import Host

from flower_gpu import trace
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder

FOLDER = Path(__file__).parent


class ModHost(Host):
    """A host with GPUs of 16 GiB."""

    def __init__(self, folder: Path, gpus: int = 2) -> None:
        super().__init__(folder, gpus=gpus)
        self.run_dir, self.ledger_dir = folder / "run", folder / "ledger"
        self.state_dir = folder / "state"
        self.footprints = self.state_dir / f"flower-gpu-{os.getuid()}" / "footprints.json"
        for made in (self.run_dir, self.ledger_dir, self.state_dir):
            made.mkdir(mode=0o700)
        self.env |= {
            "FLOWER_GPU_LEDGER_DIR": str(self.ledger_dir),
            "FLOWER_GPU_STATE_DIR": str(self.state_dir),
            "FLOWER_GPU_RUN_DIR": str(self.run_dir),
            "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parents[1])]),
            # PyTorch must not be told of a GPU that only NVML has.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
        }

    def holders(self) -> list[Any]:
        """Who holds a lease now, to somebody who takes the ledger's mutex."""
        return list(Ledger(LedgerFolder(self.ledger_dir)).status().holders)

    def observed(self) -> AbstractContextManager[list[dict[str, dict[str, int]]]]:
        """Look all the time at who holds how much of which GPU, by lease."""
        return observed(
            self.ledger_dir,
            lambda holders: {one.id: {part.uuid: part.memory_bytes for part in one.parts} for one in holders},
        )


def events_of(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Return these events of a trace."""
    path = folder / trace.FILE_NAME
    return [one for one in trace.read(path) if one["event"] in names] if path.exists() else []
