"""Run the app in Flower's Simulation Runtime with Ray, as a user's script does."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation


def main() -> None:
    config, cores, num_gpus = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    server_app = importlib.import_module("bench_app.server_app").app
    client_app = importlib.import_module(f"bench_app.{config['client']}").app
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        # run_simulation has no parameter for a run config.
        context.run_config.update(config)
        server_app(grid, context)

    resources = {"num_cpus": 1, "num_gpus": num_gpus}
    init_args: dict[str, Any] = {"num_cpus": cores, **({"num_gpus": 1} if num_gpus else {})}
    backend = {"init_args": init_args, "client_resources": resources}
    run_simulation(server, client_app, config["num-clients"], backend_config=backend)


if __name__ == "__main__":
    main()
