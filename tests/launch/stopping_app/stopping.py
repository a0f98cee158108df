"""An app whose clients stop in the second round, until a file tells them to go on."""

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_gpu import FedAvg

server, client = ServerApp(), ClientApp()


@server.main()
def main(grid, context):
    arrays = ArrayRecord({"w": Array(np.zeros(1, np.float32))})
    FedAvg().start(grid, arrays, num_rounds=context.run_config["num-server-rounds"])


@client.train()
def train(message, context):
    folder, w = Path(context.run_config["folder"]), message.content["arrays"]["w"].numpy()
    while w[0] > 0 and not (folder / "goes-on").exists():
        (folder / "waits").touch()
        time.sleep(0.05)
    arrays = ArrayRecord({"w": Array(w + np.float32(1))})
    content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
