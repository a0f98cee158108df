"""Our ``flower-superlink``, for ``flower-gpu launch``: Flower's, which wakes its SuperExec for each run."""

from __future__ import annotations

import sys
from typing import Final

from flower_gpu.flower import objects
from flower_gpu.flower.private_names import LINK_STATES
from flower_gpu.flower.waits import ticks
from flower_gpu.flower.waits.wakeup import Waker, call_after

# What makes a task in Flower's states.
_TASK_MAKERS: Final = ("create_run", "create_task")


def main() -> None:
    """Run Flower's SuperLink."""
    from flwr.superlink.cli import flower_superlink

    objects.answer_for_many(objects.SUPERLINK)
    ticks.look_seldom()
    waker = Waker()
    if all(call_after(state, maker, waker.wake) for state in LINK_STATES for maker in _TASK_MAKERS):
        waker.announce()  # else it is another Flower, whose SuperExec goes on asking
    sys.argv[0] = "flower-superlink"
    flower_superlink()
