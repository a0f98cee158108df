"""One round of one client: this runs in each of its ranks."""

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

# A checkpoint has the whole model, so that it does not depend on the number of ranks.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


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
        sampler.set_epoch(epoch)  # the order of an epoch is the same if others were before a stop
        for x, y in progress(loader, desc=f"epoch {epoch}/{epochs}"):
            x, y = to_device((x, y))
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if checkpoint and epoch < epochs:
            save(checkpoint, model, optimizer, epoch, losses)
    trained = get_state(model)  # in rank 0; the others need not have them
    if checkpoint and rank() == 0:
        checkpoint.unlink(missing_ok=True)
    return trained, {"train_loss": torch.stack(losses).mean().item()}


def in_ranks(model, config):
    """Bring a model to the device of this rank, and let backward passes average gradients over the ranks."""
    if world_size() == 1:
        return to_device(model)
    if config["sync-batchnorm"] and torch.cuda.is_available():  # there is none for the CPU
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return fully_shard(model) if config["strategy"] == "fsdp" else DistributedDataParallel(to_device(model))


def save(path, model, optimizer, *more):
    """Write a checkpoint: all ranks put it together, and rank 0 writes it."""
    state = [*get_state_dict(model, optimizer, options=WHOLE), *more]
    if rank() == 0:
        new = path.with_suffix(".new")
        torch.save(state, new)
        new.replace(path)  # it appears when it is complete


def load(path, model, optimizer):
    """Load a checkpoint into all ranks; return what else was written."""
    of_model, of_optimizer, *more = torch.load(path, map_location="cpu", weights_only=True)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=WHOLE)
    return more


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
