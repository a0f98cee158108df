"""Tasks that compute with TensorFlow or JAX in workers. Importing this module imports neither of them."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

#: Libraries that were imported before the task. This module is loaded when the worker is completely set up.
IMPORTED_BEFORE = sorted({"tensorflow", "jax", "keras"} & set(sys.modules))


def _pretend_gpus(count: int) -> None:
    """Let TensorFlow's Python code find GPUs. This works as long as its runtime does not start."""
    from tensorflow.python import pywrap_tfe

    kinds = ["CPU:0", *(f"GPU:{index}" for index in range(count))]
    pywrap_tfe.TF_ListPhysicalDevices = lambda: [f"/physical_device:{kind}".encode() for kind in kinds]


def limits_mib(program: str = "", gpus: int = 1) -> dict[str, Any]:
    """Return the settings with which TensorFlow would start its runtime after running ``program``."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    _pretend_gpus(gpus)
    looked = context.context()._physical_devices is not None
    if program:
        exec(program, {"tf": tf, "gpus": tf.config.list_physical_devices("GPU")})
    options = context.context().config.gpu_options
    return {
        "limits": [list(device.memory_limit_mb) for device in options.experimental.virtual_devices],
        "growth": os.environ["TF_FORCE_GPU_ALLOW_GROWTH"],
        "imported_before": IMPORTED_BEFORE,
        "looked_before": looked,
        "started": context.context()._context_handle is not None,
        "loader_is_its_own": "exec_module" not in vars(tf.__spec__.loader),
    }


def tensorflow_sum() -> dict[str, Any]:
    """Compute with TensorFlow, and report the devices."""
    import tensorflow as tf

    data = tf.data.Dataset.range(10).map(lambda x: x * 2, num_parallel_calls=4).prefetch(2)
    return {
        "sum": sum(int(x) for x in data),
        "devices": [device.name for device in tf.config.list_logical_devices()],
        "imported_before": IMPORTED_BEFORE,
        "pid": os.getpid(),
    }


def jax_sum() -> dict[str, Any]:
    """Compute with JAX, and report the memory settings with which it initialised its devices."""
    import jax
    import jax.numpy as jnp
    from jaxlib import xla_client

    options = xla_client.generate_pjrt_gpu_plugin_options()
    total = jax.jit(lambda n: jnp.arange(n).sum(), static_argnums=0)(10)
    return {
        "sum": int(total),
        "fraction": options["memory_fraction"],
        "preallocate": options["preallocate"],
        "imported_before": IMPORTED_BEFORE,
        "pid": os.getpid(),
    }


def jax_sum_with_fraction(name: str) -> dict[str, Any]:
    """Ask for most of the GPU, as scripts often do in their first lines."""
    os.environ[name] = "0.95"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    return jax_sum()


DATA: list[Any] = []


def load_numpy() -> None:
    """Import the libraries and keep NumPy arrays, which a preload function may do."""
    import jax
    import keras
    import numpy as np

    assert jax and keras
    DATA.append(np.arange(10))


def make_tensor() -> None:
    import tensorflow as tf

    DATA.append(tf.constant(1.0))


def make_dataset() -> None:
    import tensorflow as tf

    DATA.append(tf.data.Dataset.range(3))


def make_model() -> None:
    import keras

    DATA.append(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))


def make_jax_array() -> None:
    import jax.numpy as jnp

    DATA.append(jnp.ones(3))


def sums_of_preloaded() -> dict[str, Any]:
    sums = {"tensorflow": tensorflow_sum()["sum"], "jax": jax_sum()["sum"], "data": int(DATA[0].sum())}
    return {**sums, "imported_before": IMPORTED_BEFORE, "pid": os.getpid()}


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def tensorflow_out_of_memory() -> None:
    """Raise TensorFlow's error with the text of a real message."""
    import tensorflow as tf

    raise tf.errors.ResourceExhaustedError(
        None,
        None,
        "OOM when allocating tensor with shape[32768,32768] and type float on "
        "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:Mul]",
    )


def torch_step() -> dict[str, Any]:
    """Train with PyTorch. Its optimizers import Triton."""
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weight_before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"imported_before": IMPORTED_BEFORE, "changed": not torch.equal(weight_before, model.weight)}


def random_numbers() -> list[list[float]]:
    """Draw numbers from each generator that programs use without a seed."""
    import keras
    import tensorflow as tf

    dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    drawn = [tf.random.normal([3]), keras.random.normal([3]), dense.weights[0]]
    return [[float(number) for number in tf.reshape(array, [-1])] for array in drawn]
