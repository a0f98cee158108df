"""For users of JAX: the leaves of pytrees as numpy arrays and back. Imports JAX when a function is called."""

from flower_gpu.jax.weights import get_weights as get_weights
from flower_gpu.jax.weights import set_weights as set_weights

__all__ = ["get_weights", "set_weights"]
