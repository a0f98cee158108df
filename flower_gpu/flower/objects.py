"""Objects of a message that is there before them.

A message of Flower's can be pulled as soon as its head was pushed. Who then asks for an object that was not
pushed yet waits a second, twice as long the next time. Who asks often for messages meets that often.
"""

from __future__ import annotations

import importlib
from typing import Final

_FIRST_S: Final = 0.02
_MODULE: Final = "flwr.supercore.inflatable.inflatable_utils"
_FUNCTIONS: Final = ("pull_objects", "pull_and_inflate_object_from_tree")


def ask_sooner_for_objects() -> None:
    """Have Flower's functions of this process wait shorter before they ask again for an object."""
    module = importlib.import_module(_MODULE)
    for name in _FUNCTIONS:
        defaults = getattr(getattr(module, name, None), "__kwdefaults__", None) or {}
        if "initial_backoff" in defaults:
            defaults["initial_backoff"] = _FIRST_S
