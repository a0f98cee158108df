"""Data, model, training and evaluation in ordinary JAX and Optax. Only workers import this module."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from flower_gpu.jax.weights import get_weights, set_weights

HELD_OUT = 360


def load_data():
    """Return images and labels of all digits, always in the same random order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (images[order] / 16).astype("float32"), labels[order]


def init(key):
    """Return the parameters of two dense layers."""
    first, second = jax.random.split(key)
    return {
        "hidden": {"kernel": jax.random.normal(first, (64, 128)) / 8, "bias": jnp.zeros(128)},
        "output": {"kernel": jax.random.normal(second, (128, 10)) / 11, "bias": jnp.zeros(10)},
    }


def loss_and_logits(params, images, labels):
    hidden = jax.nn.relu(images @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    logits = hidden @ params["output"]["kernel"] + params["output"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


def load_params(weights):
    return set_weights(jax.eval_shape(init, jax.random.key(0)), weights)


def initial_weights(seed):
    return get_weights(init(jax.random.key(seed)))


@partial(jax.jit, static_argnames=("epochs", "batch_size", "learning_rate"))
def fit(params, images, labels, key, epochs, batch_size, learning_rate):
    optimizer = optax.adam(learning_rate)

    def step(state, batch):
        params, memory = state
        grad = jax.value_and_grad(loss_and_logits, has_aux=True)
        (loss, _), gradient = grad(params, images[batch], labels[batch])
        updates, memory = optimizer.update(gradient, memory)
        return (optax.apply_updates(params, updates), memory), loss

    def epoch(state, key):
        batches = jax.random.permutation(key, len(labels))[: len(labels) // batch_size * batch_size]
        state, losses = jax.lax.scan(step, state, batches.reshape(-1, batch_size))
        return state, losses.mean()

    keys = jax.random.split(key, epochs)
    (params, _), losses = jax.lax.scan(epoch, (params, optimizer.init(params)), keys)
    return params, losses[-1]


def train(weights, settings):
    """Train on one client's partition, and return the new weights and metrics."""
    mine = slice(HELD_OUT + settings["partition-id"], None, settings["num-partitions"])
    images, labels = (part[mine] for part in load_data())
    call = settings["seed"], settings["server-round"], settings["partition-id"]
    key = jax.random.key(int(np.random.SeedSequence(call).generate_state(1)[0]))
    options = (settings[name] for name in ("local-epochs", "batch-size", "learning-rate"))
    params, loss = fit(load_params(weights), images, labels, key, *options)
    return get_weights(params), {"train_loss": float(loss), "num-examples": len(labels)}


def evaluate(server_round, arrays):
    """Evaluate on the digits that are held out from all clients."""
    images, labels = (part[:HELD_OUT] for part in load_data())
    loss, logits = loss_and_logits(load_params(arrays.to_numpy_ndarrays()), images, labels)
    return {"loss": float(loss), "accuracy": float((logits.argmax(axis=1) == labels).mean())}
