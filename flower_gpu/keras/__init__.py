"""For users of Keras, with any of its backends: weights as numpy arrays and back. Imports none of them."""

from flower_gpu.keras.weights import get_weights as get_weights
from flower_gpu.keras.weights import set_weights as set_weights

__all__ = ["get_weights", "set_weights"]
