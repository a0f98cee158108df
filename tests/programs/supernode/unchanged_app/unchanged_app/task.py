"""Model, data and training. The tests can also let a message pause and print a report."""

import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(16, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


def load_data(partition, folder=""):
    """Return points around four centres. Each partition has different points."""
    if folder:
        return torch.load(Path(folder, f"{partition}.pt"))
    generator = torch.Generator().manual_seed(partition)
    labels = torch.randint(4, (64,), generator=generator)
    centres = torch.eye(4).repeat(1, 4)
    return centres[labels] + 0.1 * torch.randn(64, 16, generator=generator), labels


def train(model, features, labels, learning_rate, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    criterion = nn.CrossEntropyLoss()
    model.train()
    total = 0.0
    loader = DataLoader(TensorDataset(features, labels), batch_size=16, shuffle=True)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def print_report(partition):
    names = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    seen = {name: os.environ.get(name) for name in names}
    report = {"partition": partition, "pid": os.getpid(), **seen}
    print(f"saw {json.dumps(report)}", flush=True)


def pause(folder, server_round, partition):
    """Report that this message has started, and wait for permission to continue."""
    if folder:
        temporary = Path(folder, f".{server_round}-{partition}")
        temporary.write_text(str(os.getpid()))
        temporary.rename(Path(folder, f"{server_round}-{partition}"))
        while not Path(folder, f"go-{server_round}").exists():
            time.sleep(0.05)
