"""After training, a client process holds its weights and little more memory than any Flower client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

WEIGHTS_MB = 45

# Imports of every start_client process, whether it trains or not. A mapped memory file counts in full,
# because pages that this process has not touched use memory, too.
FLOWER_CLIENT = """
    import json, sys
    import numpy as np
    from flwr.client import NumPyClient, start_client

    def held_mb():
        kilobytes, in_memory_file = 0, False
        for line in open("/proc/self/smaps"):
            name, *values = line.split()
            if not name.endswith(":"):
                in_memory_file = "/memfd:" in line
            elif name == ("Size:" if in_memory_file else "Rss:"):
                kilobytes += int(values[0])
        return kilobytes / 1000
"""

AFTER_FITS = (
    FLOWER_CLIENT
    + """
    from flower_gpu import GPUClient
    sys.path.insert(0, sys.argv[1])
    client = GPUClient("flower_tasks:train_with_torch")
    weights = np.split(np.ones(11_250_000, np.float32), 90)  # malloc may keep small arrays that are freed
    for _ in range(3):
        weights, examples, metrics = client.fit(weights, {})
    assert float(weights[-1].mean()) == 4.0 and (examples, metrics) == (5, {"torch": 1.0})
    assert {type(array) for array in weights} == {np.ndarray}
    heavy = [name for name in ("torch", "flower_tasks") if name in sys.modules]
    print(json.dumps({"held_mb": held_mb(), "imported": heavy}))
"""
)


def test_fits_keep_only_the_weights_and_do_not_import_torch_in_the_client(
    run_script: Callable[..., Any],
) -> None:
    plain_mb = float(run_script(FLOWER_CLIENT + "    print(held_mb())\n").stdout)
    report = json.loads(run_script(AFTER_FITS, str(Path(__file__).parents[1]), timeout_s=120).stdout)
    assert report["imported"] == []
    assert report["held_mb"] < plain_mb + WEIGHTS_MB + 20, f"{report}, a plain client {plain_mb} MB"
    assert report["held_mb"] > plain_mb + WEIGHTS_MB - 20, "the measure sees the weights"
