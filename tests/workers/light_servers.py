"""Fork servers without torch, for this process and its forks. Importing torch takes seconds of CPU time."""

from __future__ import annotations

from flower_gpu.workers.forkserver import client


class Memory(client._Memory):
    """The state of a process that wants no torch in its fork servers."""

    def begin(self) -> None:
        super().begin()
        self.kind.without.add("torch")


def begin() -> None:
    """Use fork servers without torch for all later calls."""
    client._memory = Memory()
