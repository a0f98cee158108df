"""What a call needs of the host's cores and main memory, beside its GPU."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from typing import Final

from flower_gpu.calls.settings import HostSettings
from flower_gpu.leases import host
from flower_gpu.leases.admission import MEMORY, HostNeed, of_task
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import (
    BESIDE_GPU,
    ON_CPU,
    Key,
    cautious_bytes,
    needed_bytes,
)

_MUCH: Final = 1.25  # a call that took so many times less than is known is a reason to write that down


@dataclass(frozen=True)
class HostNeeds:
    """The needs of one call, which may change as long as it waits: its footprint is learned meanwhile."""

    settings: HostSettings
    key: Key  # of the footprint
    on_gpu: bool
    footprints: Footprints

    def now(self) -> tuple[HostNeed, ...]:
        """Return what the call asks for."""
        if not self.settings.is_leased:
            return ()
        found = [self.settings.cores(on_gpu=self.on_gpu), self._memory()]
        return tuple(need for need in found if need is not None)

    def learn(self, taken_bytes: int) -> None:
        """Keep what the call has taken of main memory.

        Not what is nearly known: each writing takes as long as a short call.
        """
        if not taken_bytes:  # its worker stays: nobody knows
            return
        known = self.footprints.get(self._key)
        if known is None or not known / _MUCH <= taken_bytes <= known:
            self.footprints.learn(self._key, taken_bytes)

    @property
    def _key(self) -> Key:
        return self.key.on(BESIDE_GPU if self.on_gpu else ON_CPU)

    def _memory(self) -> HostNeed | None:
        total = host.total_memory_bytes()
        known = self.footprints.get(self._key)
        if known is not None:
            return HostNeed(MEMORY, needed_bytes(known), least=needed_bytes(known))
        # The first call of a task on a GPU is alone there, or its user has said how many run at a time.
        if self.on_gpu:
            return None
        # Only calls of this task wait for each other, however much memory others have.
        task = of_task(os.getuid(), zlib.crc32(repr(self._key).encode()))
        reserve = self.settings.reserve_bytes
        most = total - (int(host.RESERVED_PART * total) if reserve is None else reserve)
        guess = cautious_bytes(total)
        return HostNeed(task, guess, least=guess, capacity=max(1, most))
