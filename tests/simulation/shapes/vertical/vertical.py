"""Vertical learning: each client has some columns and a model of its own, the server has the labels."""

import json

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_digits
from torch import nn

client_app = ClientApp()
server_app = ServerApp()
ROWS, WIDTH = 400, 8


def columns(context: Context) -> torch.Tensor:
    """Return the columns of a client."""
    data = load_digits().data[:ROWS].astype(np.float32) / 16
    parts = np.array_split(np.arange(data.shape[1]), int(context.node_config["num-partitions"]))
    return torch.from_numpy(data[:, parts[int(context.node_config["partition-id"])]])


def model_of(context: Context, inputs: torch.Tensor) -> nn.Linear:
    """Return a client's own model, which never leaves its state."""
    torch.manual_seed(int(context.node_config["partition-id"]))
    model = nn.Linear(inputs.shape[1], WIDTH)
    if "model" in context.state.array_records:
        model.load_state_dict(context.state.array_records["model"].to_torch_state_dict())
    return model


@client_app.query("embeddings")
def embed(message: Message, context: Context) -> Message:
    """Send what the own columns become."""
    inputs = columns(context)
    with torch.no_grad():
        outputs = torch.relu(model_of(context, inputs)(inputs))
    partition = MetricRecord({"partition": int(context.node_config["partition-id"])})
    reply = RecordDict({"embeddings": ArrayRecord([outputs.numpy()]), "metrics": partition})
    return Message(reply, reply_to=message)


@client_app.train("gradients")
def step(message: Message, context: Context) -> Message:
    """Go back through the own model with the server's gradients."""
    inputs = columns(context)
    model = model_of(context, inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    (gradients,) = message.content["gradients"].to_numpy_ndarrays()
    torch.relu(model(inputs)).backward(torch.from_numpy(gradients))
    optimizer.step()
    context.state["model"] = ArrayRecord(model.state_dict())
    return Message(RecordDict(), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the head, and send each client its part of the gradients."""
    labels = torch.from_numpy(load_digits().target[:ROWS])
    nodes = sorted(grid.get_node_ids())
    torch.manual_seed(0)
    head = nn.Linear(WIDTH * len(nodes), 10)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        asked = [Message(RecordDict(), node, "query.embeddings") for node in nodes]
        replies = sorted(
            grid.send_and_receive(asked), key=lambda reply: reply.content["metrics"]["partition"]
        )
        parts = [
            torch.from_numpy(reply.content["embeddings"].to_numpy_ndarrays()[0].copy()).requires_grad_()
            for reply in replies
        ]
        loss = nn.functional.cross_entropy(head(torch.cat(parts, 1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
        told = [
            Message(
                RecordDict({"gradients": ArrayRecord([part.grad.numpy()])}),
                reply.metadata.src_node_id,
                "train.gradients",
            )
            for part, reply in zip(parts, replies, strict=True)
        ]
        assert not any(reply.has_error() for reply in grid.send_and_receive(told))
    print("RESULT", json.dumps({"losses": losses}), flush=True)
