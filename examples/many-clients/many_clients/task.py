"""Networks, data, and training as a pure function that ``torch.func.vmap`` runs for several clients."""

from functools import cache, partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call, grad, vmap

from flower_gpu import to_device, to_numpy
from flower_gpu.pytorch import group_alike, stack, unstack

HELD_OUT = 360
BATCH = 8


def build_model(network):
    if network == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


@cache
def load_data():
    """Return images and labels of all digits, always in the same random order."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16, torch.tensor(labels)[
        order
    ]


def load_partition(partition_id, num_partitions):
    """Return one client's share of the digits. Every third client has half of it."""
    images, labels = (part[HELD_OUT:].tensor_split(num_partitions)[partition_id] for part in load_data())
    size = len(labels) // 2 if partition_id % 3 == 0 else len(labels)
    return images[:size], labels[:size]


def train_many(network, models, data, learning_rate):
    """Train the models of several clients for an epoch. Clients with data of the same shape share each step.

    ``models``: a state dict for each client. ``data``: images and labels of each client.
    """
    train_one = partial(train_epoch, build_model(network), learning_rate=learning_rate)
    trained = [None] * len(models)
    for group in group_alike(data):
        images, labels = stack([data[place] for place in group])
        together = vmap(train_one)(stack([models[place] for place in group]), images, labels)
        for place, model in zip(group, unstack(together), strict=True):
            trained[place] = model
    return trained


def train_epoch(module, model, images, labels, *, learning_rate):
    """Train one model by SGD and return it. Only the layers of ``module`` are used, and not its weights."""

    def loss(parameters, buffers, images, labels):
        outputs = functional_call(module, (parameters, buffers), (images,))
        # BatchNorm changes its buffers in place, so they are returned as a second result.
        return nn.functional.cross_entropy(outputs, labels), buffers

    names = {name for name, _ in module.named_parameters()}
    parameters = {name: value for name, value in model.items() if name in names}
    buffers = {name: value for name, value in model.items() if name not in names}
    for start in range(0, len(labels), BATCH):
        batch = slice(start, start + BATCH)
        gradients, buffers = grad(loss, has_aux=True)(parameters, buffers, images[batch], labels[batch])
        parameters = {name: value - learning_rate * gradients[name] for name, value in parameters.items()}
    return {**parameters, **buffers}


def initial_model(network, seed):
    torch.manual_seed(seed)
    return to_numpy(build_model(network).state_dict())


def evaluate(server_round, arrays, network):
    """Evaluate on the digits that are held out from all clients."""
    model = build_model(network)
    model.load_state_dict(arrays.to_torch_state_dict())
    images, labels = to_device([part[:HELD_OUT] for part in load_data()])
    with torch.inference_mode():
        outputs = to_device(model).eval()(images)
    accuracy = (outputs.argmax(dim=1) == labels).float().mean().item()
    return {"loss": nn.functional.cross_entropy(outputs, labels).item(), "accuracy": accuracy}
