"""How long a process waits before it asks a SuperLink again: longer, the longer nothing has come.

What a question costs the SuperLink is in docs/explanation/supernodes.md.
"""

from __future__ import annotations

from typing import Final

#: The longest wait while there may be work: Flower's own.
LONGEST_S: Final = 3.0
#: When nothing came for so long, there is no work.
IDLE_AFTER_S: Final = 60.0
#: What a process has waited at least that was told of work.
TOLD_S: Final = 10.0

_PART: Final = 0.05  # of the time it has waited already: so much later something may be noticed


def wait_s(waited_s: float, least_s: float, idle_s: float = LONGEST_S) -> float:
    """Return how long to wait now.

    ``waited_s`` is how long nothing came, ``least_s`` the shortest wait, ``idle_s`` the wait without work.
    """
    if waited_s >= IDLE_AFTER_S:
        return max(least_s, idle_s)
    return max(least_s, min(LONGEST_S, _PART * waited_s))
