"""Who takes leases for the apps of a SuperNode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "FLOWER_GPU_SUPERNODE"
_WORDS = {"lease": True, "start": False}


@dataclass(frozen=True)
class Rule:
    """What our ``flwr-clientapp`` does beyond starting fast.

    Parameters
    ----------
    with_lease : bool
        Take a lease for each message, before any code of the app is imported. Else apps do that themselves,
        by ``gpu_mod`` or ``GPUClient``, or not at all.
    """

    with_lease: bool = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Rule:
        """Return the rule of this process's SuperNode; an unknown word is the strict one."""
        return cls(_WORDS.get(environ.get(VARIABLE, ""), True))

    def environment(self) -> dict[str, str]:
        """Return the variables that tell the rule to a SuperNode's processes."""
        return {VARIABLE: next(word for word, with_lease in _WORDS.items() if with_lease == self.with_lease)}
