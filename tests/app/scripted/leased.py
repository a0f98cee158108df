"""A client that writes down the ledger's entry of its lease in the middle of its call."""

import json
import os
import subprocess
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_gpu.errors import WorkerDiedError
from flower_gpu.flower.records import round_of
from flower_gpu.leases.lease import Lease
from flower_gpu.leases.ledger import Ledger
from flower_gpu.workers.own_process import facts

app = ClientApp()
calls = 0


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take memory of the stub's GPU, wait, and inspect the lease."""
    config = context.run_config
    partition = context.node_config["partition-id"]
    if config["take-gib"]:
        import nvml_stub

        nvml_stub.allocate(0, int(config["take-gib"] * nvml_stub.GIB))
    if tensor := os.environ.get("LEASED_APP_TENSOR"):
        import torch

        torch.zeros(int(tensor), dtype=torch.uint8, device="cuda")
    time.sleep(config["seconds"])
    while config["waits"] and not Path(os.environ["LEASED_APP_GO_ON"]).exists():
        time.sleep(0.02)
    lease = Lease.from_environment(os.environ)
    note = {"partition": partition, "pid": os.getpid(), "lease": None if lease is None else lease.id}
    holders = {entry.id: entry.label() for entry in Ledger().status().holders if entry.gpu_parts}
    note["holders"] = len(holders)
    if lease is not None:
        note["is_in_ledger"] = lease.id in holders
        note["label"] = holders.get(lease.id)
        note["descriptor_is_ticket"] = _is_ticket(facts.lease_descriptor, lease)
        note["alone"] = lease.alone
    if device := os.environ.get("LEASED_APP_DEVICE"):
        note["opened"] = _opened(device)
    with Path(os.environ["LEASED_APP_NOTES"]).open("a") as file:
        file.write(json.dumps(note) + "\n")
    if str(partition) in config["too-much"].split() and lease is not None and not lease.alone:
        raise RuntimeError("CUDA out of memory. Tried to allocate 9.00 GiB")
    killed = Path(os.environ["LEASED_APP_NOTES"]).with_suffix(".killed")
    if partition == config["killed"] and round_of(message) == 2 and not killed.exists():
        killed.touch()
        # The caller raises this error when the kernel has killed the worker.
        raise WorkerDiedError("killed for want of main memory", is_out_of_memory=True)
    global calls
    calls += config["remembers"]
    metrics = MetricRecord({"num-examples": 1, "score (%)": float(partition), "calls": calls})
    arrays = ArrayRecord(message.content["arrays"].to_numpy_ndarrays())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def _is_ticket(descriptor: int, lease: Lease) -> bool | None:
    # A call in the caller's own process has the ticket itself.
    if descriptor < 0:
        return None
    return os.fstat(descriptor).st_ino == Path(lease.ticket).stat().st_ino


def _opened(device: str) -> dict[str, bool]:
    """Return whether a device of the lease can be opened, here and in a child program."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    for name in ("FLOWER_GPU_GUARD", "FLOWER_GPU_DEVICES", "FLOWER_GPU_GUARDED"):
        os.environ.pop(name, None)
    try:
        Path(device).open().close()
        here = True
    except PermissionError:
        here = False
    return {
        "here": here,
        "program": subprocess.run(["cat", "/dev/null", device], check=False).returncode == 0,
    }
