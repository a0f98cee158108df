"""Tasks for workers of lines. Several of them may run in the same process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from flower_gpu.workers import events

kept: list[Any] = []


def count() -> tuple[int, int]:
    """Return the pid of this process, and the number of its calls so far."""
    kept.append(None)
    return os.getpid(), len(kept)


def keep(array: Any) -> Any:
    """Keep an argument, and return the sums of all kept arguments."""
    kept.append(array)
    return [float(kept_array.sum()) for kept_array in kept]


def keep_and_change(array: Any, value: float) -> Any:
    """Change an argument in place, keep it, and return it."""
    array += value
    kept.append(array)
    # The caller already has its own copies of these arrays, so it must not see this change.
    for kept_array in kept[:-1]:
        kept_array += 1000.0
    return array


def descriptors() -> list[str]:
    """Return the targets of this process's open descriptors."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # This descriptor listed the folder and is closed now.
            targets.append(str(link.readlink()))
    return targets


def chatter(count: int, size: int) -> int:
    for number in range(count):
        events.send("chatter", number=number, text="x" * size)
    return count


def chatter_everywhere(count: int) -> int:
    """Send events from threads and from a forked child."""
    threads = [threading.Thread(target=chatter, args=(count, 10)) for _ in range(4)]
    for thread in threads:
        thread.start()
    child = multiprocessing.get_context("fork").Process(target=chatter, args=(count, 20))
    child.start()
    for thread in threads:
        thread.join()
    child.join()
    return 5 * count


def chatter_later(count: int) -> None:
    """Leave a thread behind that sends events for a while."""

    def send() -> None:
        for number in range(count):
            time.sleep(0.002)
            events.send("late", number=number)

    threading.Thread(target=send, daemon=True).start()


def send_a_path() -> None:
    events.send("saved", path=Path("/somewhere"))


def close_stdout_object() -> int:
    sys.stdout.close()
    return 42


def say_pid_and_hang(file: str) -> NoReturn:
    temporary = Path(f"{file}.new")
    temporary.write_text(str(os.getpid()))
    temporary.rename(file)
    while True:
        time.sleep(600)


def leave_semaphore(file: str) -> None:
    """Create a semaphore that has a file, like those of a DataLoader that spawns its workers."""
    kept.append(multiprocessing.get_context("spawn").Semaphore())
    Path(file).write_text(kept[-1]._semlock.name)
    time.sleep(600)


def wait_for(file: str) -> bool:
    while not Path(file).exists():
        time.sleep(0.01)
    return True
