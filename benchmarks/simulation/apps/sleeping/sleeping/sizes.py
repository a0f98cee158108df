"""How large clients are."""

from typing import Any

import numpy as np


def sizes_s(clients: int, config: Any) -> list[float]:
    """Draw what each client takes, from a lognormal distribution."""
    drawn = np.random.default_rng(config["seed"]).lognormal(0.0, config["sigma"], clients)
    return [float(size) * config["scale-s"] for size in drawn]
