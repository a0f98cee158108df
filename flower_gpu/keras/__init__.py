"""Functions that convert the weights of Keras models to numpy arrays and back. No backend is imported."""

from flower_gpu.keras.weights import get_weights as get_weights
from flower_gpu.keras.weights import set_weights as set_weights

__all__ = ["get_weights", "set_weights"]
