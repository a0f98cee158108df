"""Simulates clients on a card with MPS, once per line of options on standard input, and prints replies."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flower_gpu import simulate
from flower_gpu.errors import FlowerGPUError

client = ClientApp()
server = ServerApp()
OUT_OF_MEMORY = 2


@client.train()
def train(message: Message, context: Context) -> Message:
    """Report what this worker sees of its card. On request, the first worker of a round causes a fault."""
    import torch

    config = message.content["config"]
    has_fault = config["fault"] and context.node_config["partition-id"] == 0
    tensor = torch.zeros(1 << 20, device="cuda")
    cuda = ctypes.CDLL(None)
    code = cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4 << 30))
    # Otherwise PyTorch attributes this error to its own calls.
    cuda.cudaGetLastError()
    folder = Path(str(config["folder"]))
    (folder / f"{context.node_config['partition-id']}").touch()
    while config["fault"] and len(list(folder.iterdir())) < 2:
        time.sleep(0.02)
    if config["waits"]:
        print(os.environ["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
        time.sleep(600)
    if has_fault:
        cuda.stub_fault()
    while config["fault"] and not has_fault and cuda.cudaFree(None) == 0:
        time.sleep(0.02)
    (tensor + 1).sum()
    facts = {
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
        "is_capped": int(code == OUT_OF_MEMORY),
        "pid": os.getpid(),
    }
    return Message(RecordDict({"metrics": MetricRecord(facts)}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Send a message to each client in each round."""
    for number, kind in enumerate(str(context.run_config["rounds"]).split()):
        folder = Path(str(context.run_config["folder"]), str(number))
        folder.mkdir(parents=True)
        config = {"fault": kind == "fault", "waits": kind == "waits", "folder": str(folder)}
        messages = [
            Message(RecordDict({"config": ConfigRecord(config), "arrays": ArrayRecord()}), node, "train")
            for node in grid.get_node_ids()
        ]
        replies = grid.send_and_receive(messages)
        print(json.dumps([_described(reply) for reply in replies]), flush=True)


def _described(reply: Message) -> object:
    return reply.error.reason if reply.has_error() else dict(reply.content["metrics"])


for line in sys.stdin:
    options = json.loads(line)
    try:
        simulate((server, client), **{"num_supernodes": 2, "progress": False, "verbose": False, **options})
    except FlowerGPUError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
