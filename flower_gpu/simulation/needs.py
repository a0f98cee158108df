"""What the processes of a run import, so that the host's fork server has it before they are forked."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from flower_gpu import frameworks
from flower_gpu.calls.settings import CallSettings
from flower_gpu.errors import FlowerGPUError
from flower_gpu.workers import methods as start
from flower_gpu.workers.forkserver import client

# What every worker needs, whatever the app imports.
_OURS: Final = ("flower_gpu.simulation.in_worker", "flower_gpu.calls.leased_worker", "numpy.random")
_WITHOUT_TORCH: Final = {
    "flwr",
    "numpy",
    "flower_gpu",
    "scipy",
    "sklearn",
    "pandas",
} | sys.stdlib_module_names


@dataclass(frozen=True)
class Needs:
    """What the workers of an app are forked with.

    ``modules``: libraries that they have use for.
    ``without``: those they have none for, which makes forks cheaper; as of a
    :class:`flower_gpu.workers.call.Call`.
    """

    modules: tuple[str, ...]
    without: frozenset[str] = frozenset()

    @classmethod
    def of(cls, libraries: Sequence[str]) -> Needs:
        """Find out what workers need whose app imports these libraries."""
        if not _may_use_torch(libraries):
            return cls((*_OURS, *libraries), frozenset({"torch"}))
        return cls((*_OURS, *libraries, "torch", *frameworks.imported_in_use("torch")))

    def learn_beside(self, settings: CallSettings) -> None:
        """Have the host's fork server import that, in a thread, before the first worker is forked.

        So this goes on while this process imports the ServerApp.
        """
        if not start.choose(settings.worker.start_method).from_server:
            return

        def learn() -> None:
            with suppress(FlowerGPUError, OSError):  # who needs a worker tries again, and tells
                client.learn(self.modules, self.without, client.LEARN_FOR_LIMITED_S)

        threading.Thread(target=learn, daemon=True).start()


def _may_use_torch(libraries: Sequence[str]) -> bool:
    # Of a library that is not known to do without, whoever wrote it may have used torch.
    tops = {name.partition(".")[0] for name in libraries}
    return "flower_gpu.pytorch" in libraries or bool(tops - _WITHOUT_TORCH)
