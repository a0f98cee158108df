"""One round of one client: this runs in each of its ranks."""

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from flower_gpu import progress, to_device
from flower_gpu.pytorch.distributed import (
    load_checkpoint,
    prepare_loader,
    prepare_model,
    prepare_optimizer,
    rank,
    save_checkpoint,
    world_size,
)
from flower_gpu.pytorch.weights import get_state
from multi_gpu import task


def train(message, context):
    """Train on one client's partition; rank 0's reply is the client's, with the mean of all metrics."""
    config = {**context.run_config, **context.node_config}
    server_round, client = message.content["config"]["server-round"], config["partition-id"]
    arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
    # The same number in each rank, another one for each client and round.
    config["seed-of-call"] = seed_of(config["seed"], server_round, client)
    data = task.to_dataset(*task.load_partition(config))
    trained, metrics = learn(arrays, data, config, checkpoint_of(arrays, server_round, config))
    metrics["num-examples"] = len(data)  # of this client, not of this rank
    record = ArrayRecord({name: Array(array) for name, array in trained.items()})
    return Message(RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=message)


def learn(arrays, data, config, checkpoint=None):
    """Return the weights after some epochs, and metrics; all ranks have the same arguments."""
    torch.manual_seed(config["seed-of-call"])
    print(f"process {os.getpid()} is rank {rank()} of {world_size()}", flush=True)
    model = task.build_model(config, data[0][0].shape[0])
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    model = prepare_model(model)
    size, epochs = config["batch-size"], config["local-epochs"]
    is_enough = len(data) >= size * world_size()  # also where each rank takes batches of that size
    loader = prepare_loader(DataLoader(data, size, shuffle=True, drop_last=is_enough))
    rate = config["learning-rate"]
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4))

    found = load_checkpoint(checkpoint, model, optimizer) if checkpoint else None
    first, losses = (found["epoch"] + 1, found["losses"]) if found else (1, [])
    if found and rank() == 0:
        print(f"goes on after epoch {found['epoch']} of {epochs}", flush=True)
    for epoch in range(first, epochs + 1):
        loader.sampler.set_epoch(epoch)  # the order of an epoch is the same if others were before a stop
        for x, y in progress(loader, desc=f"epoch {epoch}/{epochs}"):
            x, y = to_device((x, y))
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if checkpoint and epoch < epochs:
            save_checkpoint(checkpoint, model, optimizer, epoch=epoch, losses=losses)
    trained = get_state(model)  # in rank 0; the others need not have them
    if checkpoint and rank() == 0:
        checkpoint.unlink(missing_ok=True)
    return trained, {"train_loss": torch.stack(losses).mean().item()}


def seed_of(*numbers):
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def checkpoint_of(arrays, server_round, config):
    """Return where this call keeps its checkpoint; None: nowhere.

    A training that was killed goes on only from the same model in the same round: the name says which.
    """
    if not config["checkpoint-dir"]:
        return None
    folder = Path(config["checkpoint-dir"], f"client-{config['partition-id']}")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for array in arrays.values():
        digest.update(np.ascontiguousarray(array))
    return folder / f"round-{server_round}-{digest.hexdigest()[:16]}.pt"
