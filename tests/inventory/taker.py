"""A process that looks at the GPUs whenever it is told to: a word a line in, a line of JSON out."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from threading import Thread

import nvml_stub

from flower_gpu.gpu import inventory


def taken(processes: bool = True) -> dict[str, object]:
    found = inventory.take(processes=processes)
    return {**asdict(found), "usable": [gpu.uuid for gpu in found.usable]}


def in_a_fork() -> dict[str, object]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # ends it, should it wait for what never comes
        os.write(writer, json.dumps(taken()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise ChildProcessError(f"the fork ended with {os.waitstatus_to_exitcode(status)}")
    result: dict[str, object] = json.loads(text)
    return result


def in_threads() -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    threads = [Thread(target=lambda: results.append(taken())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def answer(command: str, *arguments: str) -> object:
    if command == "take":
        return taken()
    if command == "quick":
        return taken(processes=False)
    if command == "fork":
        return in_a_fork()
    if command == "fork-meanwhile":
        taken()
        with inventory._host()._lock:  # as a thread has it that looks at the GPUs now
            return in_a_fork()
    if command == "threads":
        return in_threads()
    if command == "close":
        inventory.close()
        return None
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


for line in sys.stdin:
    try:
        reply = {"answer": answer(*line.split())}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), flush=True)
