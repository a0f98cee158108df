"""Tasks that go wrong, each in its own way."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn


class OwnError(Exception):
    """An error that can be passed between processes."""


class UnpicklableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class NotRebuiltError(Exception):
    """An error that can be pickled, but not rebuilt from its args."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class CannotBePickled:
    def __reduce__(self) -> NoReturn:
        raise TypeError("this object stays where it is")


class CannotBeRebuilt:
    """An object that can be pickled, but rebuilt only in the process that made it."""

    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def _only_in(pid: int) -> str:
    if os.getpid() != pid:
        raise RuntimeError(f"built in {os.getpid()}, made in {pid}")
    return "rebuilt"


def value_error() -> NoReturn:
    print("about to fail")
    raise ValueError("the number is odd")


def own_error() -> NoReturn:
    raise OwnError("own", 7)


def with_note_and_cause() -> NoReturn:
    try:
        value_error()
    except ValueError as error:
        other = KeyError("table")
        other.add_note("a note")
        raise other from error


def unpicklable_error() -> NoReturn:
    raise UnpicklableError("holds a lock")


def not_rebuilt_error() -> NoReturn:
    raise NotRebuiltError("left", "right")


def silent_error() -> NoReturn:
    raise SilentError


def library_error() -> NoReturn:
    import worker_library

    raise worker_library.LibraryError("from far away")


def library_error_inside() -> NoReturn:
    import worker_library

    raise ValueError("holds an object", worker_library.Thing())


def keyboard_interrupt() -> NoReturn:
    raise KeyboardInterrupt


def system_exit(code: Any) -> NoReturn:
    print("leaving")
    sys.exit(code)


def os_exit(code: int) -> NoReturn:
    print("leaving at once", flush=True)
    os._exit(code)


def kill_itself(number: int) -> None:
    print("the last words")
    os.kill(os.getpid(), number)
    time.sleep(600)


def segfault() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def killed_with_the_gil() -> None:
    """Hold the GIL in a C call while another process kills this one."""
    subprocess.Popen([sys.executable, "-S", "-c", f"import os; os.kill({os.getpid()}, 15)"])
    ctypes.PyDLL(None).sleep(600)


def killed_while_writing_the_reply() -> Any:
    import numpy as np

    class Big:
        """Kills the worker when it is pickled, after the array before it."""

        def __reduce__(self) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)
            return int, ()

    return [np.zeros(4_000_000), Big()]


def killed_by_the_clock_while_writing() -> Any:
    """End in the middle of writing 400 MB."""
    import numpy as np

    big = np.zeros(25_000_000)
    signal.setitimer(signal.ITIMER_REAL, 0.02)  # SIGALRM ends this process
    return [big, big + 1]


def unpicklable_result() -> Any:
    return {"weights": CannotBePickled()}


def result_for_itself() -> Any:
    return {"weights": CannotBeRebuilt()}


def endless_result() -> Any:
    nested: list[Any] = []
    for _ in range(200_000):
        nested = [nested]
    return nested


def hang_in_sleep(reached: str) -> None:
    Path(reached).touch()
    print("going to sleep")
    time.sleep(600)


def hang_with_the_gil(reached: str) -> None:
    Path(reached).touch()
    # A signal ends a single sleep.
    while True:
        ctypes.PyDLL(None).sleep(600)


def hang_stopped(reached: str) -> None:
    Path(reached).touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_deaf(reached: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    Path(reached).touch()
    while True:
        time.sleep(600)


def hang_with_many_threads(reached: str) -> None:
    for _ in range(40):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    hang_in_sleep(reached)


def hang_chattering(reached: str) -> None:
    Path(reached).touch()
    while True:
        print("still here")


def hang_with_children(reached: str) -> None:
    start_children()
    hang_in_sleep(reached)


def start_children() -> None:
    """Start a child that ignores signals, and a grandchild. Both stay in the worker's process group."""
    ignore = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)]"
    subprocess.Popen([sys.executable, "-S", "-c", f"{ignore}; time.sleep(600)"])
    subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], stdout=subprocess.DEVNULL)


def die_with_children() -> None:
    start_children()
    os.kill(os.getpid(), signal.SIGKILL)


def leave_children() -> int:
    start_children()
    return 42


def leak_shared_memory(crash: bool) -> str:
    from multiprocessing import shared_memory

    block = shared_memory.SharedMemory(create=True, size=1 << 20)
    if crash:
        os.kill(os.getpid(), signal.SIGKILL)
    return block.name


def leak_to_a_slow_tracker(folder: Path) -> None:
    """Leak shared memory to a resource tracker that ends late, because the test keeps its pipe open."""
    from multiprocessing import resource_tracker, shared_memory

    block = shared_memory.SharedMemory(create=True, size=1 << 20)
    tracker = resource_tracker._resource_tracker
    report = {"pid": os.getpid(), "fd": tracker._fd, "tracker": tracker._pid, "name": block.name}
    (folder / "new").write_text(json.dumps(report))
    (folder / "new").rename(folder / "report")
    while not (folder / "go").exists():
        time.sleep(0.01)


def write_a_lot_and_die(newline: bool) -> None:
    line = "x" * 999 + ("\n" if newline else ".")
    for _ in range(10_000):
        sys.stdout.write(line)
    sys.stdout.flush()
    print("written")
    os._exit(7)


def close_stdout() -> int:
    sys.stdout.close()
    os.close(1)
    return 42


def close_stdout_and_die() -> None:
    sys.stdout.close()
    os.close(1)
    print("the last words", file=sys.stderr)
    os._exit(7)


def close_everything() -> int:
    os.closerange(0, 1000)
    return 42


def write_invalid_text() -> None:
    os.write(1, b"caf\xc3\xa9 \xff\xfe broken \xc3")
    print("a lone surrogate: \udc80", file=sys.stderr)
    os._exit(7)


def draw_a_bar_and_die() -> None:
    for n in range(1000):
        sys.stderr.write(f"\r{n} of 1000")
    sys.stderr.flush()
    os._exit(7)
