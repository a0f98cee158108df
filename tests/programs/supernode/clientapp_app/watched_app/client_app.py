"""A ClientApp that does what the config of a message says, and reports on its process."""

import json
import os
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

if "WATCHED_APP_FAILS" in os.environ:
    raise RuntimeError("this app cannot be loaded")

mods = []
if "WATCHED_APP_ASKS" in os.environ:
    from flower_gpu import gpu_mod

    mods = [gpu_mod(num_gpus=int(os.environ["WATCHED_APP_ASKS"]), lease_timeout_s=5)]
pool = ThreadPoolExecutor(1)
if "WATCHED_APP_STARTS_THREADS" in os.environ:
    pool.submit(int)
app = ClientApp(mods=mods)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Follow the config of the message, then write a report about this process."""
    config = dict(message.content["config"])
    print(config.get("print", ""), flush=True)
    print(config.get("complain", ""), file=sys.stderr, flush=True)
    if path := config.get("wait"):
        Path(path).write_text(str(os.getpid()))
        while True:
            time.sleep(0.05)
    if "raise" in config:
        raise ZeroDivisionError(config["raise"])
    if "exit" in config:
        sys.exit(config["exit"])
    if "kill" in config:
        os.kill(os.getpid(), signal.SIGKILL)
    if "return" in config:
        returned = {"nothing": None, "the message": message, "another": Message(message.content, 13, "train")}
        return returned.get(config["return"], config["return"])
    if path := config.get("open"):
        with open(path, "rb"):
            print("it could be opened", flush=True)
    if config.get("submit"):
        pool.submit(print, "done by a thread", flush=True).result()
        print("a fork of", Path(f"/proc/{os.getppid()}/cmdline").read_text(), flush=True)
    umask = os.umask(0o22)
    os.umask(umask)
    seen = {
        "environ": dict(os.environ),
        "cwd": str(Path.cwd()),
        "umask": umask,
        "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "processors": sorted(os.sched_getaffinity(0)),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "executable": sys.executable,
        "stdin": sys.stdin.read() if config.get("read") else None,
        "pid": os.getpid(),
    }
    state = context.state.config_records.setdefault("state", ConfigRecord({"calls": 0}))
    state["calls"] += 1
    if path := config.get("tell"):
        Path(path).write_text(json.dumps(seen))
    return Message(RecordDict({"answer": ConfigRecord({"number": 42})}), reply_to=message)
