"""Looks at the GPUs while a run goes on, and writes down what it sees."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from flower_gpu import trace
from flower_gpu.gpu import inventory

#: Seconds between two looks. One takes a millisecond or two for a GPU.
INTERVAL_S: Final = 0.5


class GPUSampler:
    """Writes ``gpu_sample`` lines into a run's trace, from a thread of its own.

    The first is what was there before the run, the last what is there after it. On a host without GPUs
    there are none.
    """

    def __init__(self, folder: Path, interval_s: float = INTERVAL_S) -> None:
        self._folder = folder
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look for the first time, and again and again if there is a GPU."""
        if self._look():
            self._thread = threading.Thread(target=self._run, name="flower-gpu-samples", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Look for the last time."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._look()
            inventory.close()

    def _run(self) -> None:
        while not self._end.wait(self._interval_s):
            self._look()

    def _look(self) -> bool:
        """Write down what is to be seen; tell whether there is a GPU."""
        found = [gpu for gpu in inventory.take(processes=False).gpus if gpu.uuid]
        celsius = inventory.temperatures()
        gpus = [
            {
                "uuid": gpu.uuid,
                "used_bytes": gpu.used_bytes,
                "utilization_percent": gpu.utilization_percent,
                "temperature_c": celsius.get(gpu.uuid),
            }
            for gpu in found
        ]
        if gpus:
            trace.write_to(self._folder, "gpu_sample", gpus=gpus)
        return bool(gpus)
