"""A client that writes down, in the middle of its call, what the ledger says of its lease."""

import json
import os
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_gpu.leases.lease import Lease
from flower_gpu.leases.ledger import Ledger
from flower_gpu.workers import worker as child

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take memory of the stub's GPU, wait, and look."""
    config = context.run_config
    partition = context.node_config["partition-id"]
    if config["take-gib"]:
        import nvml_stub

        nvml_stub.allocate(0, int(config["take-gib"] * nvml_stub.GIB))
    time.sleep(config["seconds"])
    lease = Lease.from_environment(os.environ)
    note = {"partition": partition, "pid": os.getpid(), "lease": None if lease is None else lease.id}
    holders = [entry.id for entry in Ledger().status().holders if entry.gpu_parts]
    note["holders"] = len(holders)
    if lease is not None:
        note["is_in_ledger"] = lease.id in holders
        note["descriptor_is_ticket"] = _is_ticket(child.held(), lease)
        note["alone"] = lease.alone
    with Path(os.environ["LEASED_APP_NOTES"]).open("a") as file:
        file.write(json.dumps(note) + "\n")
    if str(partition) in config["too-much"].split() and lease is not None and not lease.alone:
        raise RuntimeError("CUDA out of memory. Tried to allocate 9.00 GiB")
    metrics = MetricRecord({"num-examples": 1, "score (%)": float(partition)})
    arrays = ArrayRecord(message.content["arrays"].to_numpy_ndarrays())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def _is_ticket(descriptor: int, lease: Lease) -> bool | None:
    if descriptor < 0:  # a call in the caller's own process, which has the ticket itself
        return None
    return os.fstat(descriptor).st_ino == Path(lease.ticket).stat().st_ino
