"""The model, the data, training and testing. This module does not use flower-gpu."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    """A small CNN for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.hidden = nn.Linear(16 * 4 * 4, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.out(torch.relu(self.hidden(x.flatten(1))))


def load_data():
    """Return all digits in the same random order, and the number of held-out digits at their end."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = torch.from_numpy(images[order]).float().reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.from_numpy(labels[order])), 360


def load_partition(partition_id, num_partitions, batch_size):
    """Return one client's images: four fifths for training and one fifth for testing."""
    data, held_out = load_data()
    mine = range(partition_id, len(data) - held_out, num_partitions)
    cut = len(mine) * 4 // 5
    train = torch.utils.data.Subset(data, mine[:cut])
    test = torch.utils.data.Subset(data, mine[cut:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def load_held_out():
    """Return the images that are held out from all clients."""
    data, held_out = load_data()
    return DataLoader(torch.utils.data.Subset(data, range(len(data) - held_out, len(data))), 128)


def train(net, loader, epochs, lr):
    net.to(DEVICE)
    net.train()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(DEVICE)), labels.to(DEVICE))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, loader):
    net.to(DEVICE)
    net.eval()
    criterion = nn.CrossEntropyLoss(reduction="sum")
    loss, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(DEVICE), labels.to(DEVICE)
            outputs = net(images)
            loss += criterion(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(loader.dataset), correct / len(loader.dataset)
