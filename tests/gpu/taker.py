"""A process that looks at the GPUs whenever it is told to: a word a line in, a line of JSON out."""

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

from flower_gpu.gpu import inventory, nvml_thread


def taken() -> dict[str, object]:
    found = inventory.take()
    return {**asdict(found), "usable": [gpu.uuid for gpu in found.usable]}


def what_is_open() -> object:
    """Whether NVML is started here; the stub itself starts anew in a fork, so its own count is read."""
    import pynvml

    users = ctypes.c_int.in_dll(pynvml.nvmlLib, "users").value if pynvml.nvmlLib is not None else 0
    return {"users": users, "threads": len(list(Path("/proc/self/task").iterdir()))}


def in_a_fork(look: Callable[[], object] = taken) -> object:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # ends it, should it wait for what never comes
        os.write(writer, json.dumps(look()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise ChildProcessError(f"the fork ended with {os.waitstatus_to_exitcode(status)}")
    return json.loads(text)


def answer(command: str, *arguments: str) -> object:
    if command == "take":
        return taken()
    if command == "of":
        return [asdict(gpu) for gpu in inventory.take_of(arguments)]
    if command == "fork":
        return in_a_fork()
    if command == "fork-meanwhile":
        taken()
        with inventory._host().thread._lock:  # as a thread has it that looks at the GPUs now
            return in_a_fork()
    if command == "close":
        inventory.close()
        return None
    if command == "patience":
        inventory._START_S = inventory._ANSWER_S = float(arguments[0])
        return None
    if command == "idle-after":
        nvml_thread.IDLE_S = float(arguments[0])
        return None
    if command == "pid":
        return os.getpid()
    if command == "open":
        return what_is_open()
    if command == "fork-finds":
        return in_a_fork(what_is_open)
    if command == "allocate":
        gpu, nbytes = arguments
        nvml_stub.allocate(int(gpu) if gpu.isdigit() else gpu, int(nbytes))
        return nvml_stub.used(int(gpu) if gpu.isdigit() else gpu)
    import pynvml  # the user's own use of it

    if command == "user-init":
        return pynvml.nvmlInit()
    if command == "user-shutdown":
        return pynvml.nvmlShutdown()
    if command == "user-count":
        return pynvml.nvmlDeviceGetCount()
    raise ValueError(command)


def main() -> None:
    for line in sys.stdin:
        try:
            reply = {"answer": answer(*line.split())}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main() if "--alone" in sys.argv else serve(main)
