"""Data, models and evaluation in ordinary PyTorch. Only workers import this module."""

import os
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flower_gpu import to_device
from flower_gpu.pytorch.weights import get_state, save_model


def load_data(config, train):
    """Return images (uint8: examples, channels, height, width) and labels. Load your own data here."""
    if config["dataset"] == "digits":
        from sklearn.datasets import load_digits  # a worker imports only what its call needs

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        part = order[360:] if train else order[:360]  # the same fifth is held out in every run
        images = torch.from_numpy(images[part]).byte() * 15  # pixels are 0 to 16
        return images.reshape(-1, 1, 8, 8), torch.from_numpy(labels[part])
    if config["dataset"] == "cifar10":
        from torchvision.datasets import CIFAR10

        data = CIFAR10(config["data-dir"] or torch.hub.get_dir(), train, download=True)
        return torch.from_numpy(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets)
    raise ValueError(f"unknown dataset {config['dataset']!r}")


def load_partition(config):
    """Return the data of one client, a random part of the same size for each client."""
    images, labels = load_data(config, train=True)
    order = np.random.default_rng(config["seed"]).permutation(len(labels))
    mine = order[config["partition-id"] :: config["num-partitions"]]
    return images[mine], labels[mine]


def to_dataset(images, labels):
    return TensorDataset(images / 127.5 - 1, labels)  # pixels from -1 to 1


class Block(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels, out, stride, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = norm(out), norm(out)
        self.around = nn.Sequential()
        if stride > 1 or channels != out:
            self.around = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm(out))

    def forward(self, x):
        inside = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inside + self.around(x))


def resnet(blocks, norm, image_channels):
    """Return a ResNet for small images with three stages of ``blocks`` blocks (He et al., 2015, 4.2)."""
    parts = [nn.Conv2d(image_channels, 16, 3, padding=1, bias=False), norm(16), nn.ReLU()]
    channels = 16
    for out in (16, 32, 64):
        for number in range(blocks):
            stride = 2 if out > channels and number == 0 else 1
            parts.append(Block(channels, out, stride, norm))
            channels = out
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def build_model(config, image_channels):
    norm = {"batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 8)}[config["norm"]]
    if config["model"] == "resnet18":
        from torchvision.models import resnet18

        model = resnet18(num_classes=10, norm_layer=norm)
        model.conv1 = nn.Conv2d(image_channels, 64, 3, padding=1, bias=False)  # stem for small images
        model.maxpool = nn.Identity()
        return model
    return resnet({"resnet8": 1, "resnet14": 2}[config["model"]], norm, image_channels)


def initial_weights(config):
    torch.manual_seed(config["seed"])
    images, _ = load_data(config, train=False)
    return get_state(build_model(config, images.shape[1]))


def measure(model, loader):
    """Return the loss (mean over examples) and the accuracy of a model."""
    model, loss, hits, count = to_device(model).eval(), 0.0, 0, 0
    with torch.inference_mode():
        for images, labels in map(to_device, loader):
            outputs = model(images)
            loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            hits += (outputs.argmax(dim=1) == labels).sum().item()
            count += len(labels)
    return {"loss": loss / count, "accuracy": hits / count}


def evaluate(server_round, arrays, config):
    """Evaluate on the held-out images, as ``evaluate_fn`` of a Flower strategy."""
    images, labels = load_data(config, train=False)
    model = build_model(config, images.shape[1])
    model.load_state_dict(arrays.to_torch_state_dict())
    metrics = measure(model, DataLoader(to_dataset(images, labels), 256))
    if folder := os.environ.get("FLOWER_GPU_RUN_DIR"):  # set by `flower-gpu launch`
        save_model(model, f"{folder}/model.safetensors")
    return metrics
