"""Opacus: per-example gradients, noise, and the spent privacy, which the client's state keeps."""

import json
import warnings

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

client_app = ClientApp()
server_app = ServerApp()


def data(part: int) -> TensorDataset:
    """Return every fourth image."""
    digits = load_digits()
    inputs = torch.from_numpy(digits.data[part::4].astype(np.float32) / 16)
    return TensorDataset(inputs, torch.from_numpy(digits.target[part::4]))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train for an epoch with noise."""
    warnings.simplefilter("ignore")
    client_data = data(int(context.node_config["partition-id"]))
    model = torch.nn.Linear(64, 10)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    engine = PrivacyEngine(accountant="rdp")
    if "spent" in context.state.config_records:
        engine.accountant.load_state_dict({
            "history": [tuple(json.loads(step)) for step in context.state["spent"]["history"]],
            "mechanism": "rdp",
        })  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(client_data, batch_size=64),
        noise_multiplier=0.8,
        max_grad_norm=1.0,
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(private(inputs), targets).backward()
        optimizer.step()
    history = [json.dumps(step) for step in engine.accountant.history]
    context.state["spent"] = ConfigRecord({"history": history})
    metrics = MetricRecord({"num-examples": len(client_data), "epsilon": engine.get_epsilon(delta=1e-5)})
    arrays = ArrayRecord(private._module.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Average for two rounds. The spent privacy grows from round to round."""
    start = ArrayRecord(torch.nn.Linear(64, 10).state_dict())
    result = FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=2)
    model = torch.nn.Linear(64, 10)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    inputs, targets = data(0).tensors
    accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
    spent = [round(dict(each)["epsilon"], 2) for each in result.train_metrics_clientapp.values()]
    print("RESULT", json.dumps({"epsilons": spent, "accuracy": round(accuracy, 2)}), flush=True)
