"""What a client process holds after it has trained: its weights, and little more than any Flower client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

WEIGHTS_MB = 45

# What every start_client process imports, trained or not. A mapped memory file counts as a whole: pages of it
# that this process has not touched are memory, too.
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


def test_fits_leave_the_weights_only_and_do_not_bring_torch_into_the_client(
    run_script: Callable[..., Any],
) -> None:
    plain_mb = float(run_script(FLOWER_CLIENT + "    print(held_mb())\n").stdout)
    found = json.loads(run_script(AFTER_FITS, str(Path(__file__).parent), timeout_s=120).stdout)
    assert found["imported"] == []
    assert found["held_mb"] < plain_mb + WEIGHTS_MB + 20, f"{found}, a plain client {plain_mb} MB"
    assert found["held_mb"] > plain_mb + WEIGHTS_MB - 20  # it measures what it should
