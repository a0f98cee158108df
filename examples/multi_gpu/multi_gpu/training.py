"""One round of one client. This code runs in each rank."""

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from flower_gpu import progress, to_device
from flower_gpu.pytorch.distributed import rank, world_size
from flower_gpu.pytorch.weights import get_state
from multi_gpu import task

# A checkpoint holds the whole model, so a later attempt may use another number of ranks.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def train(message, context):
    """Train on one client's partition. The reply of rank 0 is sent, with the mean of all metrics."""
    config = {**context.run_config, **context.node_config}
    server_round, client = message.content["config"]["server-round"], config["partition-id"]
    arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
    # All ranks of a call have the same seed, and each client and round has another one.
    config["seed-of-call"] = seed_of(config["seed"], server_round, client)
    data = task.to_dataset(*task.load_partition(config))
    trained, metrics = learn(arrays, data, config, checkpoint_of(arrays, server_round, config))
    metrics["num-examples"] = len(data)  # examples of the client, not of the rank
    record = ArrayRecord({name: Array(array) for name, array in trained.items()})
    return Message(RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=message)


def learn(arrays, data, config, checkpoint=None):
    """Train for some epochs, and return weights and metrics. All ranks must pass the same arguments."""
    torch.manual_seed(config["seed-of-call"])
    print(f"process {os.getpid()} is rank {rank()} of {world_size()}", flush=True)
    model = task.build_model(config, data[0][0].shape[0])
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    model = in_ranks(model, config)
    size, epochs = config["batch-size"], config["local-epochs"]
    sampler = DistributedSampler(data, world_size(), rank(), seed=config["seed-of-call"])
    loader = DataLoader(data, size // world_size(), sampler=sampler, drop_last=len(data) >= size)
    optimizer = torch.optim.SGD(model.parameters(), config["learning-rate"], momentum=0.9, weight_decay=1e-4)

    done, losses = 0, []
    if checkpoint and checkpoint.exists():
        done, losses = load(checkpoint, model, optimizer)
        if rank() == 0:
            print(f"goes on after epoch {done} of {epochs}", flush=True)
    for epoch in range(done + 1, epochs + 1):
        sampler.set_epoch(epoch)  # a resumed training sees the same order in each epoch
        for x, y in progress(loader, desc=f"epoch {epoch}/{epochs}"):
            x, y = to_device((x, y))
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if checkpoint and epoch < epochs:
            save(checkpoint, model, optimizer, epoch, losses)
    trained = get_state(model)  # only rank 0 needs the weights
    if checkpoint and rank() == 0:
        checkpoint.unlink(missing_ok=True)
    return trained, {"train_loss": torch.stack(losses).mean().item()}


def in_ranks(model, config):
    """Move a model to the device of this rank, and make backward passes average gradients over all ranks."""
    if world_size() == 1:
        return to_device(model)
    if config["sync-batchnorm"] and torch.cuda.is_available():  # it does not support the CPU
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return fully_shard(model) if config["strategy"] == "fsdp" else DistributedDataParallel(to_device(model))


def save(path, model, optimizer, *more):
    """Write a checkpoint. All ranks contribute their part, and rank 0 writes the file."""
    state = [*get_state_dict(model, optimizer, options=WHOLE), *more]
    if rank() == 0:
        new = path.with_suffix(".new")
        torch.save(state, new)
        new.replace(path)  # atomic, so the checkpoint is never incomplete


def load(path, model, optimizer):
    """Load a checkpoint into all ranks, and return the additional values in it."""
    of_model, of_optimizer, *more = torch.load(path, map_location="cpu", weights_only=True)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=WHOLE)
    return more


def seed_of(*numbers):
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def checkpoint_of(arrays, server_round, config):
    """Return the path of this call's checkpoint, or None if checkpoints are off.

    Its name contains the round and a digest of the model, so a killed training resumes only with the same
    ones.
    """
    if not config["checkpoint-dir"]:
        return None
    folder = Path(config["checkpoint-dir"], f"client-{config['partition-id']}")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for array in arrays.values():
        digest.update(np.ascontiguousarray(array))
    return folder / f"round-{server_round}-{digest.hexdigest()[:16]}.pt"
