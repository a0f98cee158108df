"""A client like most: libraries are imported inside functions, and the module keeps its data set."""

from typing import Any

import numpy as np

from bench_app.replies import client_app

_partitioner: Any = None


def train(weights: list[Any], partition: int, server_round: int, config: Any) -> tuple[list[Any], int]:
    """Train on a partition; return the weights and the number of its images."""
    import torch

    from bench_app import networks

    torch.manual_seed(1000 * server_round + partition)
    images, labels = _load_data(partition, config)
    model = networks.load(networks.build("cnn"), weights)
    networks.fit(model, networks.epochs(images, labels, config["local-epochs"], 8))
    return networks.weights_of(model), len(labels)


def _load_data(partition: int, config: Any) -> Any:
    """Return the images and labels of a partition."""
    import torch

    global _partitioner
    if _partitioner is None:
        from datasets import Dataset
        from flwr_datasets.partitioner import IidPartitioner
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(config["seed"]).permutation(len(labels))
        _partitioner = IidPartitioner(config["num-clients"])
        _partitioner.dataset = Dataset.from_dict({"image": images[order] / 16, "label": labels[order]})
    part = _partitioner.load_partition(partition).with_format("numpy")
    pixels = torch.tensor(part["image"][:], dtype=torch.float32).reshape(-1, 1, 8, 8)
    return pixels, torch.tensor(part["label"][:])


app = client_app(train)
