"""Clients that start processes of their own, each in another way."""

import multiprocessing

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from children.squares import square

app = ClientApp()
WAYS = ("fork", "forkserver", "spawn", "loader")


@app.train()
def train(message: Message, context: Context) -> Message:
    """Sum up the first squares with two processes."""
    way = WAYS[context.node_config["partition-id"]]
    if way == "loader":
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(torch.arange(4) ** 2)
        total = sum(int(batch.sum()) for (batch,) in DataLoader(data, batch_size=2, num_workers=2))
    else:
        with multiprocessing.get_context(way).Pool(2) as pool:
            total = sum(pool.map(square, range(4)))
    metrics = MetricRecord({"num-examples": 1, "total": total})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
