"""Rounds in which all clients give the model back, and what they took."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from benchmarks.simulation import rounds

_ARRAYS = 20

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    size = int(config["model-mb"] * 1e6) // (4 * _ARRAYS)
    result = rounds.run(grid, config, [np.full(size, number, np.float32) for number in range(_ARRAYS)])
    rounds.check_all_answered(result, config["num-clients"])
    for number, array in enumerate(result.arrays.to_numpy_ndarrays()):
        if array.shape != (size,) or not np.allclose(array, number, rtol=1e-4):
            raise ValueError(f"array {number} of the model is not what was sent")
