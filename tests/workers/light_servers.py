"""Fork servers without torch, for this process and its forks: importing it takes seconds of CPU."""

from __future__ import annotations

from flower_gpu.workers.forkserver import client


class Memory(client._Memory):
    """What a process remembers that wants no torch in its fork servers."""

    def begin(self) -> None:
        super().begin()
        self.kind.without.add("torch")


def begin() -> None:
    """Use such servers from now on."""
    client._memory = Memory()
