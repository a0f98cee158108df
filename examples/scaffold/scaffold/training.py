"""One round of one client, in a worker."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch.nn.functional import cross_entropy

from flower_gpu import to_device
from scaffold import task


def train(message, context):
    """Train from the server's model. `context.state` keeps this client's variables for its next round."""
    config, settings, node = message.content["config"], context.run_config, context.node_config
    steps, learning_rate = settings["local-steps"], settings["learning-rate"]
    call = settings["seed"], config["server-round"], node["partition-id"]
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence(call).generate_state(1)[0]))

    # Model, data and kept tensors may come from different devices, so move all to the device of this call.
    model = to_device(task.build_model())
    data = to_device(task.load_partition(node["partition-id"], node["num-partitions"]))
    start = tensors(message.content["arrays"])
    model.load_state_dict(start)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    if "control" not in context.state:  # this client's first round
        context.state["control"], context.state["momentum"] = ArrayRecord(zeros), ArrayRecord(zeros)
        context.state["rounds"] = MetricRecord({"trained": 0})
    own, momentum = tensors(context.state["control"]), tensors(context.state["momentum"])
    uses_control = "control" in message.content  # not with FedAvg
    servers = tensors(message.content["control"]) if uses_control else zeros

    loss = take_steps(
        model,
        data,
        steps=steps,
        batch_size=settings["batch-size"],
        learning_rate=learning_rate,
        correction={name: servers[name] - own[name] for name in zeros},
        momentum=momentum,
        beta=settings["client-momentum"],
        generator=generator,
    )

    # All clients have the same weight, as in the paper, regardless of their number of examples.
    metrics = MetricRecord({"train_loss": loss, "weight": 1})
    reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    if uses_control:
        change = change_of_control(start, model.state_dict(), servers, steps * learning_rate)
        reply["control-change"] = ArrayRecord(change)
        context.state["control"] = ArrayRecord({name: own[name] + change[name] for name in own})
    context.state["momentum"] = ArrayRecord(momentum)
    context.state["rounds"]["trained"] += 1
    return Message(reply, reply_to=message)


def tensors(record):
    """Return a record's tensors on the GPU of this call's lease, or on the CPU without a lease."""
    return to_device(record.to_torch_state_dict())


def take_steps(model, data, *, steps, batch_size, learning_rate, correction, momentum, beta, generator):
    """Take steps of SGD on random batches, and return the mean loss.

    The correction is added to each gradient. The momentum is changed in place. It is an average of gradients
    and not their sum, so steps are as long as without momentum. Control variates depend on this length.
    """
    images, labels = data
    losses = []
    for _ in range(steps):
        batch = torch.randint(len(labels), (batch_size,), generator=generator).to(labels.device)
        loss = cross_entropy(model(images[batch]), labels[batch])
        model.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                momentum[name].mul_(beta).add_(parameter.grad + correction[name], alpha=1 - beta)
                parameter.sub_(momentum[name], alpha=learning_rate)
    return torch.stack(losses).mean().item()


def change_of_control(start, end, servers, distance):
    """Return the change of the client's control variate, by option II of the paper.

    The new variate is the old one - the server's + (start - end) / (steps * learning rate).
    """
    return {name: (start[name] - end[name]) / distance - servers[name] for name in start}
