"""Data, models, training and evaluation in ordinary PyTorch. Only workers import this module."""

import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flower_gpu import device, progress
from flower_gpu.pytorch.weights import get_weights, save_model, set_weights


def load_data(settings, train):
    """Return images (uint8: examples, channels, height, width) and labels. Load your own data here."""
    if settings["dataset"] == "digits":
        from sklearn.datasets import load_digits  # a worker imports only what its call needs

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        part = order[360:] if train else order[:360]  # the same fifth is held out in every run
        images = torch.from_numpy(images[part]).byte() * 15  # pixels are 0 to 16
        return images.reshape(-1, 1, 8, 8), torch.from_numpy(labels[part])
    from torchvision import datasets, transforms

    if settings["dataset"] == "cifar10":
        folder = settings["data-dir"] or torch.hub.get_dir()
        data = datasets.CIFAR10(folder, train, download=True)  # downloads only missing files
        return torch.from_numpy(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets)
    if settings["dataset"] == "synthetic":
        first, to_tensor = 0 if train else 512, transforms.PILToTensor()
        data = datasets.FakeData(512, (3, 32, 32), 10, to_tensor, random_offset=first)
        images, labels = zip(*data, strict=True)
        return torch.stack(images), torch.tensor(labels)
    raise ValueError(f"unknown dataset {settings['dataset']!r}")


def partition(labels, settings):
    """Return the indices of one client's examples."""
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner

    count, alpha, seed = (settings[key] for key in ("num-partitions", "dirichlet-alpha", "seed"))
    partitioner = {
        "iid": IidPartitioner(count),
        "dirichlet": DirichletPartitioner(count, "label", float(alpha), min_partition_size=2, seed=seed),
    }[settings["partition"]]
    order = np.random.default_rng(seed).permutation(len(labels))  # IidPartitioner does not shuffle
    partitioner.dataset = Dataset.from_dict({"index": order, "label": labels.numpy()[order]})
    return partitioner.load_partition(settings["partition-id"])["index"][:]


def build_model(name, image_shape):
    channels, height, width = image_shape
    if name == "cnn":
        first = [nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        hidden = [nn.Linear(64 * (height // 4) * (width // 4), 128), nn.ReLU(), nn.Dropout(0.2)]
        return nn.Sequential(*first, *second, *hidden, nn.Linear(128, 10))
    if name == "resnet18":
        from torchvision.models import resnet18

        model = resnet18(num_classes=10)
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)  # stem for small images
        model.maxpool = nn.Identity()
        return model
    raise ValueError(f"unknown model {name!r}")


def initial_weights(settings):
    torch.manual_seed(settings["seed"])
    images, _ = load_data(settings, train=False)
    return get_weights(build_model(settings["model"], images.shape[1:]))


def prepare(weights, settings, images, labels):
    """Return the model with these weights, and a data set with pixels from -1 to 1."""
    model = build_model(settings["model"], images.shape[1:])
    set_weights(model, weights)
    return model.to(device()), TensorDataset(images / 127.5 - 1, labels)


def train(weights, config, settings):
    """Train on one client's partition, as ``fit`` of a NumPyClient."""
    call = settings["seed"], config["server-round"], settings["partition-id"]
    torch.manual_seed(int(np.random.SeedSequence(call).generate_state(1)[0]))
    images, labels = load_data(settings, train=True)
    mine = partition(labels, settings)
    model, data = prepare(weights, settings, images[mine], labels[mine])
    size, epochs, pin = settings["batch-size"], settings["local-epochs"], torch.cuda.is_available()
    # BatchNorm cannot train on a last batch of one example.
    loader = DataLoader(data, size, shuffle=True, drop_last=len(data) > size, pin_memory=pin)
    optimizer = torch.optim.SGD(model.parameters(), settings["learning-rate"], momentum=0.9)
    for epoch in range(1, epochs + 1):
        losses = []
        for x, y in progress(loader, desc=f"epoch {epoch}/{epochs}"):
            x, y = x.to(device(), non_blocking=True), y.to(device(), non_blocking=True)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return get_weights(model), len(data), {"train_loss": torch.stack(losses).mean().item()}


def evaluate(server_round, weights, config, settings):
    """Evaluate on the held-out images, as ``evaluate_fn`` of a Flower strategy."""
    model, data = prepare(weights, settings, *load_data(settings, train=False))
    batches = progress(DataLoader(data, 256), desc="evaluate")
    with torch.inference_mode():
        outputs = torch.cat([model.eval()(x.to(device())) for x, _ in batches]).cpu()
    labels = data.tensors[1]
    accuracy = (outputs.argmax(dim=1) == labels).float().mean().item()
    if folder := os.environ.get("FLOWER_GPU_RUN_DIR"):  # set by `flower-gpu launch`
        save_model(model, f"{folder}/model.safetensors")
    loss = nn.functional.cross_entropy(outputs, labels).item()
    return loss, {"accuracy": accuracy, "num_examples": len(labels)}
