"""PyTorch Lightning: each client has a trainer and checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

client_app = ClientApp()
server_app = ServerApp()


class Digits(pl.LightningModule):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss."""
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


def data(part: int) -> TensorDataset:
    """Return every fourth image."""
    digits = load_digits()
    inputs = torch.from_numpy(digits.data[part::4].astype(np.float32) / 16)
    return TensorDataset(inputs, torch.from_numpy(digits.target[part::4]))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Fit for two epochs. Lightning writes into the working directory of the client."""
    client_data = data(int(context.node_config["partition-id"]))
    model = Digits()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    trainer = pl.Trainer(max_epochs=2, accelerator="auto", enable_progress_bar=False, log_every_n_steps=1)
    trainer.fit(model, DataLoader(client_data, batch_size=32, num_workers=0))
    assert Path(trainer.checkpoint_callback.best_model_path).is_file()
    metrics = {"num-examples": len(client_data), "loss": float(trainer.callback_metrics["train_loss"])}
    reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(reply, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Average for two rounds, and evaluate on the server."""
    torch.manual_seed(0)
    start = ArrayRecord(Digits().state_dict())
    result = FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=2)
    model = Digits()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    inputs, targets = data(0).tensors
    accuracy = (model.layer(inputs).argmax(1) == targets).float().mean().item()
    print("RESULT", json.dumps({"accuracy": round(accuracy, 3)}), flush=True)
