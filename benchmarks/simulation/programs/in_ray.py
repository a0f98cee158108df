"""Runs a Flower app in Flower's Simulation Runtime with Ray, as a script of a user does."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation


def main() -> None:
    folder = Path(sys.argv[1])
    clients, cores = map(int, sys.argv[2:4])
    num_gpus = float(sys.argv[4])
    app = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    run_config = {**app["config"], **json.loads(sys.argv[5])}
    found = _load(app["components"]["serverapp"])
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        context.run_config.update(run_config)  # run_simulation takes none
        found(grid, context)

    resources = {"num_cpus": 1, "num_gpus": num_gpus}
    init_args: dict[str, Any] = {"num_cpus": cores}
    if num_gpus:
        init_args["num_gpus"] = 1
    backend = {"init_args": init_args, "client_resources": resources}
    run_simulation(server, _load(app["components"]["clientapp"]), clients, backend_config=backend)


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    main()
