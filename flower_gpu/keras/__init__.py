"""For users of Keras, with any of its backends: weights as numpy arrays and back. Imports none of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_gpu.keras.weights import get_weights as get_weights
    from flower_gpu.keras.weights import set_weights as set_weights

__all__ = ["get_weights", "set_weights"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.weights"), name)
