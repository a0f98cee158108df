"""A simulation whose rounds are timed, with and without the mod in turn. Prints the seconds as JSON."""

from __future__ import annotations

import json
import sys
import time

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from benchmarks.mod import app as mod_app

_TIMEOUT_S = 600.0


def main() -> None:
    size_mb = float(sys.argv[1])
    clients, rounds, actors = map(int, sys.argv[2:])
    seconds: dict[str, list[float]] = {way: [] for way in mod_app.ACTIONS}
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        model = mod_app.content(size_mb)
        while len(nodes := list(grid.get_node_ids())) < clients:
            time.sleep(0.1)
        for number in range(rounds + 1):
            ways = list(mod_app.ACTIONS)
            for way in ways if number % 2 else reversed(ways):
                messages = [Message(model, node, mod_app.ACTIONS[way]) for node in nodes]
                began = time.perf_counter()
                replies = list(grid.send_and_receive(messages, timeout=_TIMEOUT_S))
                took_s = time.perf_counter() - began
                if len(replies) != clients:
                    raise ValueError(f"{len(replies)} of {clients} clients answered")
                for reply in replies:
                    mod_app.check(reply, model)
                if number:  # in the first one actors import, and the fork server starts
                    seconds[way].append(took_s)

    backend = {"init_args": {"num_cpus": actors}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, mod_app.client_app(), clients, backend_config=backend)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
