"""A program that reports its arguments, environment and process, and a server that forks it."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from flower_gpu.programs import server
from flower_gpu.programs.server import NoEntryError, ProgramEntry

handler = logging.StreamHandler()  # like Flower's handler, it keeps the stream of the time of the import


def tell() -> int:
    """Write a report of this process to a file. The last argument says how to end."""
    _, target, ending = sys.argv
    handler.emit(logging.makeLogRecord({"msg": "logged"}))
    print("printed")
    main: Any = sys.modules["__main__"]
    report = {
        "argv": sys.argv,
        "title": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "main": [main.__name__, main.__file__],
        "environ": dict(os.environ),
        "folder": str(Path.cwd()),
        "input": sys.stdin.read(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "threads": threading.active_count(),
        "random": [random.random(), float(np.random.random())],
        "signals": signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and all(signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGCHLD)),
        "blas": _blas_threads(),
        "opened": sorted(
            str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
        ),
        "marked": b"PROBE_MARK=1" in Path("/proc/self/environ").read_bytes().split(b"\0"),
    }
    written = Path(f"{target}.{os.getpid()}")
    written.write_text(json.dumps(report))
    written.rename(target)
    match ending:
        case "wait":
            time.sleep(600)
        case "raise":
            raise ValueError("as it was told")
        case "text":
            sys.exit("a text")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt":
            raise KeyboardInterrupt
        case "start":
            starter: Any = sys.modules[server._STARTERS[0]]
            child = starter.subprocess.Popen(["tell", f"{target}.child", "7"], start_new_session=True)
            assert child.wait(60) == 7
            assert child.poll() == 7
        case number:
            return int(number)
    return 0


def _blas_threads() -> list[int]:
    from flower_gpu.workers import threads

    return [pool.get() for pool in threads._pools() if pool.starts_threads]


def find(name: str, environ: dict[str, str]) -> ProgramEntry:
    """Replace the search on the PATH, because these programs are not commands of Flower."""
    if name not in ("tell", "flwr-serverapp"):
        raise NoEntryError(f"{name} is another program")
    return ProgramEntry(f"/usr/bin/{name}", "programs_probe", "tell")


if __name__ == "__main__":
    import programs_probe  # forks import the module under this name

    assert shutil.which("env")
    server.find = programs_probe.find  # type: ignore[attr-defined]
    server._MODULES = (server._STARTERS[0],)  # type: ignore[misc]
    server.main()
