"""Functions that convert the leaves of JAX pytrees to numpy arrays and back. A call imports JAX."""

from flower_gpu.jax.weights import get_weights as get_weights
from flower_gpu.jax.weights import set_weights as set_weights

__all__ = ["get_weights", "set_weights"]
