"""Functions of the ClientApps in these tests. The workers import this module."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import nvml_stub
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from mod_messages import make_reply

from flower_gpu import GPUClient, distributed
from flower_gpu.leases.lease import Lease


def report_call(received: Message, context: Context) -> Message:
    """Report the process of this call and the arguments that it received."""
    return make_reply(
        received,
        pid=os.getpid(),
        kind=received.metadata.message_type,
        partition=context.node_config["partition-id"],
        which=os.environ.get("MOD_TEST_WHICH", ""),
        lr=received.content["config"]["lr"],
    )


def special(received: Message, context: Context) -> Message:
    return make_reply(received, pid=os.getpid(), kind="the special one")


def adds_ten(received: Message, context: Context) -> Message:
    """Add 10 to all weights, and report the pid of this process."""
    arrays = {key: Array(np.asarray(value.numpy() + 10)) for key, value in received.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": 1, "pid": os.getpid()})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=received)


def writes_to_another(received: Message, context: Context) -> Message:
    """Report the metadata of a new message that is no reply, for which Flower needs this task's identity."""
    metadata = Message(RecordDict(), dst_node_id=77, message_type="query").metadata
    values = {
        name: getattr(metadata, name) for name in ("src_task_id", "run_id", "src_node_id", "dst_node_id")
    }
    return Message(RecordDict({"told": ConfigRecord(values)}), reply_to=received)


class Client(NumPyClient):
    """A user's client, written without flower_gpu."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_parameters(self, config: dict[str, Any]) -> list[Any]:
        return [np.full(3, float(os.getpid()))]

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid(), "name": self.name}

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
        use_gpus(1000)
        return [array + 1 for array in parameters], 5, {"pid": os.getpid(), "name": self.name, **config}

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
        return 0.5, 5, {"pid": os.getpid(), "name": self.name}


def client_fn(context: Context) -> Any:
    return Client(f"partition {context.node_config['partition-id']}").to_client()


def client_fn_with_cid(cid: str) -> Any:
    return Client(f"cid {cid}").to_client()


def forgets_to_convert(context: Context) -> Any:
    return Client("not converted")


def leases_again(weights: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
    """Train in a worker of a ``GPUClient``, and report that worker's parent and lease."""
    return weights, 5, {"pid": os.getpid(), "parent": os.getppid(), "lease": os.environ["FLOWER_GPU_LEASE"]}


def client_fn_with_workers(context: Context) -> Any:
    client = GPUClient(leases_again, context=context, num_gpus=2, start_method="fork", lease_timeout_s=5)
    return client.to_client()


def client_fn_without_options(context: Context) -> Any:
    return GPUClient(leases_again, context=context, num_gpus=2).to_client()


# State ----------------------------------------------------------------------------------------------------


def counts(received: Message, context: Context) -> Message:
    """Change the state in every possible way: change, replace, add, remove and retype records."""
    state = context.state
    assert state["numbers"]["calls"] >= 0
    state["numbers"]["calls"] += 1  # changed in place
    state["numbers"]["pid"] = os.getpid()
    old = state["arrays"]["momentum"].numpy()
    state["arrays"]["momentum"] = Array(old * np.float32(0.9) + np.float32(1 / 3))
    state["new"] = ConfigRecord({"text": "added", "list": [1, 2], "bytes": b"\0\xff", "bool": True})
    del state["removed"]
    state["retyped"] = MetricRecord({"was": 1})
    return make_reply(received, pid=os.getpid(), calls=state["numbers"]["calls"])


def reassigns(received: Message, context: Context) -> Message:
    """Replace the whole state by another object."""
    context.state = type(context.state)({"other": MetricRecord({"pid": os.getpid()})})
    return make_reply(received)


def spoils_and_fails(received: Message, context: Context) -> Message:
    context.state["numbers"]["calls"] = -1
    context.state["arrays"].clear()
    context.state["left"] = ConfigRecord({})
    received.content["arrays"].clear()
    raise ValueError("after it has changed everything")


def gives_state_back(received: Message, context: Context) -> Message:
    """Send the content back unchanged, and also store it in the state."""
    for name, record in received.content.items():
        context.state[name] = record
    return Message(received.content, reply_to=received)


# Failures -------------------------------------------------------------------------------------------------


class UnpicklableError(Exception):
    def __init__(self, lock: Any, more: str) -> None:
        super().__init__(f"with a lock, {more}")
        self.lock = lock


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fails(received: Message, context: Context) -> Any:
    failure = received.content["config"]["failure"]
    if failure == "value":
        raise ValueError("the data are gone")
    if failure == "odd error":
        raise ValueError("im\udcffage.png")
    if failure == "odd reply":
        return make_reply(received, file="im\udcffage.png")
    if failure == "odd state":
        context.state["seen"] = ConfigRecord({"files": ["a", "im\udcffage.png"]})
        return make_reply(received)
    if failure == "unpicklable":
        raise UnpicklableError(threading.Lock(), "and more")
    if failure == "mute":
        raise MuteError
    if failure == "exit":
        print("last words", file=sys.stderr)
        sys.exit(3)
    if failure == "kill":
        print("last words", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    if failure == "sleep":
        time.sleep(600)
    if failure == "interrupt":
        raise KeyboardInterrupt
    if failure == "weights":
        from flower_gpu.errors import WeightsError

        raise WeightsError("model has 3 arrays, got 2")
    if failure == "another node's":
        reply = Message(received.content, reply_to=received)
        reply.metadata.__dict__["_src_node_id"] = 14
        return reply
    if failure == "a message of its own":
        return Message(received.content, dst_node_id=received.metadata.src_node_id, message_type="train")
    if failure == "its own error":
        return Message(Error(77, "e" * 1_000_000), reply_to=received)
    replies = {"none": None, "content": received.content, "a text": "reply", "the message": received}
    return replies[failure]


# Lifespan -------------------------------------------------------------------------------------------------


def lives(context: Context) -> Iterator[None]:
    """Log the begin and the end of the lifespan with the pid of the process."""
    path = Path(context.node_config["log"])
    with path.open("a") as file:
        file.write(f"begin {os.getpid()}\n")
    context.state.setdefault("lifespan", ConfigRecord({"begun": 0, "ended": 0}))["begun"] += 1
    yield
    with path.open("a") as file:
        file.write(f"end {os.getpid()}\n")
    context.state["lifespan"]["ended"] += 1


def in_lifespan(received: Message, context: Context) -> Message:
    return make_reply(received, pid=os.getpid(), begun=context.state["lifespan"]["begun"])


def fails_on_second_use(context: Context) -> Iterator[None]:
    with contextlib.suppress(FileExistsError):
        # The first use is in the client's process, and works.
        Path(context.node_config["log"]).touch(exist_ok=False)
        yield
        return
    raise OSError("the database is locked")


# On a GPU -------------------------------------------------------------------------------------------------


def use_gpus(mib: int) -> None:
    """Simulate the use of ``mib`` MiB on each GPU of this worker's lease. NVML reports it as used."""
    lease = Lease.from_environment(os.environ)
    for share in lease.shares if lease is not None else ():
        nvml_stub.allocate(share.uuid, mib << 20)


def leased(received: Message, context: Context) -> Message:
    """Report the lease of this call, and use as much memory as the config says."""
    lease = Lease.from_environment(os.environ)
    shares = lease.shares if lease is not None else ()
    use_gpus(received.content["config"].get("use-mib", 0))
    return make_reply(
        received,
        pid=os.getpid(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
        mib=[share.memory_bytes >> 20 for share in shares],
        gpus=[share.index for share in shares],
        alone=lease is not None and lease.alone,
    )


def runs_out_of_memory_once(received: Message, context: Context) -> Message:
    """Fail with PyTorch's error until the lease is large enough."""
    context.state.setdefault("tries", MetricRecord({"count": 0}))["count"] += 1
    reply = leased(received, context)
    (mib,) = reply.content["told"]["mib"]
    if mib < 6000:
        raise RuntimeError(
            "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of ..."
        )
    return reply


# In several ranks ------------------------------------------------------------------------------------------


@distributed(num_gpus=2)
def in_ranks(received: Message, context: Context) -> Message:
    """Reply with metrics that differ between ranks, and count the calls in the state."""
    from flower_gpu.pytorch.distributed import rank, world_size

    previous = context.state.get("calls", MetricRecord({"number": 0}))
    context.state["calls"] = MetricRecord({"number": previous["number"] + 1, "rank": rank()})
    reply = make_reply(received, pid=os.getpid(), world=world_size(), rank=rank())
    reply.content["metrics"] = MetricRecord(
        {"num-examples": 5, "loss": float(rank()), "epochs": 3, "of-each": [1.0, 2.0]}
    )
    return reply


@distributed(num_gpus=2)
def in_ranks_that_disagree(received: Message, context: Context) -> Message:
    """Reply with a different number of examples in each rank, and change the state."""
    from flower_gpu.pytorch.distributed import rank

    context.state["calls"] = MetricRecord({"number": -1})
    content = RecordDict({"metrics": MetricRecord({"num-examples": 5 + rank()})})
    return Message(content, reply_to=received)
