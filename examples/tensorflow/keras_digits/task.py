"""Data, model, training and evaluation in ordinary Keras. Only workers import this module."""

import os

import keras
import numpy as np
from sklearn.datasets import load_digits

from flower_gpu.keras.weights import get_weights, set_weights

HELD_OUT = 360
data = None


def load_data():
    """Return images and labels of all digits as NumPy arrays, always in the same random order."""
    global data
    if data is None:
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        data = (images[order] / 16).reshape(-1, 8, 8, 1).astype("float32"), labels[order]
    return data


def build_model():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def initial_weights(settings):
    keras.utils.set_random_seed(settings["seed"])
    return get_weights(build_model())


def compiled(weights, learning_rate=0.0):
    model = build_model()
    set_weights(model, weights)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])
    return model


def train(weights, config, settings):
    """Train on one client's partition, as ``fit`` of a NumPyClient."""
    call = settings["seed"], config["server-round"], settings["partition-id"]
    keras.utils.set_random_seed(int(np.random.SeedSequence(call).generate_state(1)[0]))
    mine = slice(HELD_OUT + settings["partition-id"], None, settings["num-partitions"])
    images, labels = (part[mine] for part in load_data())
    model = compiled(weights, settings["learning-rate"])
    done = model.fit(
        images, labels, batch_size=settings["batch-size"], epochs=settings["local-epochs"], verbose=0
    )
    return get_weights(model), len(labels), {"train_loss": done.history["loss"][-1]}


def evaluate(server_round, weights, config):
    """Evaluate on the held-out digits, as ``evaluate_fn`` of a Flower strategy."""
    images, labels = (part[:HELD_OUT] for part in load_data())
    model = compiled(weights)
    loss, accuracy = model.evaluate(images, labels, verbose=0)
    if folder := os.environ.get("FLOWER_GPU_RUN_DIR"):  # set by `flower-gpu launch`
        model.save(f"{folder}/model.keras", include_optimizer=False)
    return loss, {"accuracy": accuracy}
