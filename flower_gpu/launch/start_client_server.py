"""Process of engine ``start-client``: the server. ``python -m ... SETTINGS ADDRESS``."""

from __future__ import annotations

import os
import sys
import traceback

from flower_gpu.launch.start_client_parts import (
    MAX_MESSAGE_BYTES,
    exit_on_sigterm,
    load_function,
    load_settings,
)


def main(settings_path: str, address: str) -> None:
    """Serve one run as the app's ``server_fn`` describes it."""
    exit_on_sigterm()
    settings = load_settings(settings_path)
    server_fn = load_function(settings["serverapp"], "server_fn")

    from flwr.common import Context, RecordDict
    from flwr.server import start_server

    from flower_gpu.simulation.recording import recorded_run
    from flower_gpu.simulation.traced import trace_event_and_replies

    context = Context(
        run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config=settings["run_config"]
    )
    with recorded_run(trace_event_and_replies, has_grid=False):
        components = server_fn(context)
        start_server(
            server_address=address,
            server=components.server,
            config=components.config,
            strategy=components.strategy,
            client_manager=components.client_manager,
            grpc_max_message_length=MAX_MESSAGE_BYTES,
        )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the interpreter would wait for gRPC's threads, and they for their clients
