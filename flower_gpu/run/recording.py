"""One run as a whole, in its trace: that it began, what the GPUs did meanwhile, and how it ended."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flower_gpu
from flower_gpu import config, trace
from flower_gpu.gpu import inventory
from flower_gpu.gpu.settings import reserve_bytes
from flower_gpu.run.registry import registered
from flower_gpu.run.sampler import GPUSampler


@dataclass
class RecordedRun:
    """A run that is being recorded.

    Attributes
    ----------
    outcome : str
        How it has ended: ``"completed"``, ``"failed"`` or ``"interrupted"``.
    """

    outcome: str = "completed"


@contextmanager
def recorded_run(
    folder: Path,
    kind: str,
    name: str,
    *,
    clients: int | None = None,
    num_rounds: int | None = None,
) -> Iterator[RecordedRun]:
    """Record a run, while in the context.

    Parameters
    ----------
    folder : Path
        Where its trace goes.
    kind : str
        What runs, see :class:`flower_gpu.run.registry.RunningRun`.
    name : str
        Of the app.
    clients : int, optional
        How many there are.
    num_rounds : int, optional
        How many rounds there will be, where that is known beforehand.

    Yields
    ------
    RecordedRun
        For how it ends. An exception is a failure; a KeyboardInterrupt is not.
    """
    run = RecordedRun()
    with registered(folder, kind, name) as is_first:
        if not is_first:  # another process of this host does it
            yield run
            return
        began = time.monotonic()
        trace.write_to(
            folder,
            "run_started",
            kind=kind,
            name=name,
            clients=clients,
            num_rounds=num_rounds,
            pid=os.getpid(),
            host=platform.node(),
            cores=config.cores(),
            version=flower_gpu.__version__,
            gpus=_gpus(),
        )
        try:
            with GPUSampler(folder):
                yield run
        except KeyboardInterrupt:
            run.outcome = "interrupted"
            raise
        except BaseException:
            run.outcome = "failed"
            raise
        finally:
            seconds = round(time.monotonic() - began, 3)
            trace.write_to(folder, "run_finished", outcome=run.outcome, seconds=seconds)


def _gpus() -> list[dict[str, Any]]:
    reserve = reserve_bytes(os.environ)
    return [
        {
            "uuid": gpu.uuid,
            "index": gpu.index,
            "name": gpu.name,
            "total_bytes": gpu.total_bytes,
            "capacity_bytes": max(0, (gpu.total_bytes or 0) - (gpu.reserved_bytes or 0) - reserve),
        }
        for gpu in inventory.take(processes=False).usable
    ]
