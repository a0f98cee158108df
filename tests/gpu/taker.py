"""A process that runs commands about GPUs. It reads a command per line, and replies with a line of JSON."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import nvml_stub
from forked import serve

from flower_gpu.gpu import inventory, query_thread


def taken() -> dict[str, object]:
    result = inventory.take()
    return {**asdict(result), "usable": [gpu.uuid for gpu in result.usable]}


def nvml_users_and_threads() -> object:
    """Return how often NVML is initialised here, by the stub's own count, and the number of threads."""
    import pynvml

    users = ctypes.c_int.in_dll(pynvml.nvmlLib, "users").value if pynvml.nvmlLib is not None else 0
    return {"users": users, "threads": len(list(Path("/proc/self/task").iterdir()))}


def in_a_fork(function: Callable[[], object] = taken) -> object:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # ends a fork that hangs
        os.write(writer, json.dumps(function()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise ChildProcessError(f"the fork ended with {os.waitstatus_to_exitcode(status)}")
    return json.loads(text)


def patience(seconds: str) -> None:
    inventory._START_S = inventory._ANSWER_S = query_thread._CLOSE_S = float(seconds)


def fork_meanwhile() -> object:
    taken()
    with inventory._host().thread._lock:  # as if another thread were taking an inventory
        return in_a_fork()


def idle_after(seconds: str) -> None:
    query_thread.IDLE_S = float(seconds)


def allocate(gpu: str, nbytes: str) -> int:
    index = int(gpu) if gpu.isdigit() else gpu
    nvml_stub.allocate(index, int(nbytes))
    return nvml_stub.used(index)


def user(function: str) -> object:
    """Call an NVML function as the user's own code does."""
    import pynvml

    return getattr(pynvml, function)()


COMMANDS: dict[str, Callable[..., object]] = {
    "take": taken,
    "of": lambda *uuids: [asdict(gpu) for gpu in inventory.take_of(uuids)],
    "fork": in_a_fork,
    "fork-meanwhile": fork_meanwhile,
    "close": inventory.close,
    "patience": patience,
    "idle-after": idle_after,
    "pid": os.getpid,
    "open": nvml_users_and_threads,
    "fork-finds": lambda: in_a_fork(nvml_users_and_threads),
    "allocate": allocate,
    "user": user,
}


def main() -> None:
    for line in sys.stdin:
        try:
            command, *arguments = line.split()
            reply = {"answer": COMMANDS[command](*arguments)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main() if "--alone" in sys.argv else serve(main)
