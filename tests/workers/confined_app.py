"""Tasks for confined workers. Most do what ordinary apps do."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from flower_gpu.workers import events

VARIABLES = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def variables() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in VARIABLES:
        Path(os.environ[name], "file").write_text("mine")
        values[name] = os.environ[name]
    values["agent"] = os.environ.get("SSH_AUTH_SOCK")
    values["tempfile"] = tempfile.gettempdir()
    return values


def reads(path: str) -> str:
    return Path(path).read_text()


def writes(path: str) -> str:
    Path(path).write_text("written by an app")
    return "done"


def connects(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), 5):
        return "done"


def opens_udp() -> str:
    with socket.socket(type=socket.SOCK_DGRAM):
        return "done"


def _square(number: int) -> int:
    return number * number


def computes_in_processes() -> list[Any]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.map(_square, [1, 2, 3])
    with multiprocessing.Manager() as manager:
        shared = manager.dict(a=1)
        copied = dict(shared)
    lock = multiprocessing.Lock()
    with lock:
        pass
    line = [sys.executable, "-c", "print('from a program')"]
    return [squares, copied, subprocess.run(line, capture_output=True, text=True, check=True).stdout]


def asks_another_worker(path: str) -> list[str]:
    from flower_gpu import run_in_worker

    try:
        run_in_worker("confined_app:reads", path, start_method="spawn")
    except OSError as error:
        return [str(run_in_worker(complex, 1, 2, start_method="spawn")), type(error).__name__]
    return ["was read"]


def leaves_a_process() -> int:
    """Leave a process in its own session."""
    line = [sys.executable, "-c", "import time; time.sleep(600)"]
    return subprocess.Popen(line, start_new_session=True).pid


def leaves_a_process_that_leaves_the_group() -> int:
    """Leave a process that creates a session after the worker has ended, but before its group is killed."""
    code = (
        "import os, time\n"
        "while os.getppid() == int(os.environ['WORKER']): time.sleep(0.001)\n"
        "time.sleep(0.1); os.setsid(); time.sleep(600)"
    )
    line = [sys.executable, "-c", code]
    return subprocess.Popen(line, env={**os.environ, "WORKER": f"{os.getpid()}"}).pid


def leaves_folders_that_are_hard_to_remove() -> str:
    """Leave deeply nested folders where multiprocessing creates its sockets."""
    folder = multiprocessing.current_process()._config["tempdir"]  # type: ignore[attr-defined]
    parent = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=parent)
        parent = os.open("d", os.O_RDONLY, dir_fd=parent)
    Path(folder, "closed").mkdir(mode=0)
    return os.path.realpath(folder)


def leaves_a_link_for_the_next_try(to: str) -> str:
    """Make the call be retried, with a symlink in place of its cache folder."""
    cache = Path(os.environ["XDG_CACHE_HOME"])
    if cache.is_symlink():
        return "came again"
    shutil.rmtree(cache)
    cache.symlink_to(to)
    events.send("set_too_late")
    os._exit(0)


def is_alone() -> bool:
    """Return True if this worker leads its own session. It cannot reach the groups of other sessions."""
    return os.getsid(0) == os.getpgrp() == os.getpid()


def copies_and_touches() -> str:
    """Copy and touch files with calls that confinement ignores or limits."""
    first, second, new = (Path(os.environ["TMPDIR"], name) for name in ("one", "two", "new"))
    first.write_text("text")
    first.chmod(0o640)
    shutil.copy2(first, second)
    for path in (first, new):
        path.touch()
    os.utime(first, (1, 1))
    subprocess.run(["cp", "-a", first, f"{second}-again"], check=True)
    subprocess.run(["cp", "--reflink=auto", first, f"{second}-more"], check=True)
    shutil.copytree(first.parent, first.parent.with_name("tree"))
    os.sched_setaffinity(threading.get_native_id(), os.sched_getaffinity(0))
    os.nice(1)
    return new.read_text() + second.read_text()


def waits(file: str) -> None:
    """Report that the worker is running, then wait until it is killed."""
    import time

    Path(os.environ["HOME"], "file").write_text(file)
    print("waits", flush=True)
    time.sleep(600)
