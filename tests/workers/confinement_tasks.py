"""What an ordinary app does, in a confined worker."""

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
    found: dict[str, Any] = {}
    for name in VARIABLES:
        Path(os.environ[name], "file").write_text("mine")
        found[name] = os.environ[name]
    found["agent"] = os.environ.get("SSH_AUTH_SOCK")
    found["tempfile"] = tempfile.gettempdir()
    return found


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
        found = dict(shared)
    lock = multiprocessing.Lock()
    with lock:
        pass
    line = [sys.executable, "-c", "print('from a program')"]
    return [squares, found, subprocess.run(line, capture_output=True, text=True, check=True).stdout]


def asks_another_worker(path: str) -> list[str]:
    from flower_gpu import run_in_worker

    try:
        run_in_worker("confinement_tasks:reads", path, start_method="spawn")
    except OSError as error:
        return [str(run_in_worker(complex, 1, 2, start_method="spawn")), type(error).__name__]
    return ["was read"]


def leaves_a_process() -> int:
    """Leave one in a session of its own."""
    line = [sys.executable, "-c", "import time; time.sleep(600)"]
    return subprocess.Popen(line, start_new_session=True).pid


def leaves_a_process_that_leaves_the_group() -> int:
    """Leave one that makes a session when the worker has ended, before its group is."""
    code = (
        "import os, time\n"
        "while os.getppid() == int(os.environ['WORKER']): time.sleep(0.001)\n"
        "time.sleep(0.1); os.setsid(); time.sleep(600)"
    )
    line = [sys.executable, "-c", code]
    return subprocess.Popen(line, env={**os.environ, "WORKER": f"{os.getpid()}"}).pid


def leaves_what_is_hard_to_remove() -> str:
    """Leave it where multiprocessing makes sockets."""
    folder = multiprocessing.current_process()._config["tempdir"]  # type: ignore[attr-defined]
    place = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=place)
        place = os.open("d", os.O_RDONLY, dir_fd=place)
    Path(folder, "closed").mkdir(mode=0)
    return os.path.realpath(folder)


def leaves_a_link_for_the_next_try(to: str) -> str:
    """Have the call tried again, with a link in the place of a folder."""
    cache = Path(os.environ["XDG_CACHE_HOME"])
    if cache.is_symlink():
        return "came again"
    shutil.rmtree(cache)
    cache.symlink_to(to)
    events.send("set_too_late")
    os._exit(0)


def is_alone() -> bool:
    """Tell whether other workers' groups are out of reach: they are in other sessions."""
    return os.getsid(0) == os.getpgrp() == os.getpid()


def copies_and_touches() -> str:
    """Do with files what is without effect, or limited, here."""
    one, two, new = (Path(os.environ["TMPDIR"], name) for name in ("one", "two", "new"))
    one.write_text("text")
    one.chmod(0o640)
    shutil.copy2(one, two)
    for path in (one, new):
        path.touch()
    os.utime(one, (1, 1))
    subprocess.run(["cp", "-a", one, f"{two}-again"], check=True)
    subprocess.run(["cp", "--reflink=auto", one, f"{two}-more"], check=True)
    shutil.copytree(one.parent, one.parent.with_name("tree"))
    os.sched_setaffinity(threading.get_native_id(), os.sched_getaffinity(0))
    os.nice(1)
    return new.read_text() + two.read_text()


def waits(file: str) -> None:
    """Say that it is there, and wait for the end."""
    import time

    Path(os.environ["HOME"], "file").write_text(file)
    print("waits", flush=True)
    time.sleep(600)
