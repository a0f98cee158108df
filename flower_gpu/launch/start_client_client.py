"""Process of engine ``start-client``: one client. ``python -m ... SETTINGS ADDRESS NUMBER``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from flower_gpu.launch import ports
from flower_gpu.launch.start_client_parts import (
    MAX_MESSAGE_BYTES,
    exit_on_sigterm,
    load_function,
    load_settings,
)

if TYPE_CHECKING:
    from flwr.client import Client
    from flwr.common import Context as ContextType

_MAX_RETRIES = 3  # a server that is gone does not come back
_POLL_S = (0.1, 1.0)  # at first and at most: there may be hundreds of clients


def main(settings_path: str, address: str, client: str) -> None:
    """Serve as one client until the server dismisses it."""
    exit_on_sigterm()
    try:
        settings = load_settings(settings_path)
        app_client_fn = load_function(settings["clientapp"], "client_fn")
        node_config = settings["node_configs"][int(client)]

        from flwr.client import start_client
        from flwr.common import Context

        def client_fn(context: ContextType) -> Client:
            # start_client fills in neither config, and refuses a context whose run config was changed.
            # The state is shared, so what a client keeps there is there in the next round.
            filled = Context(
                run_id=context.run_id,
                node_id=context.node_id,
                node_config=dict(node_config),
                state=context.state,
                run_config=dict(settings["run_config"]),
            )
            made: Client = app_client_fn(filled)
            return made

        _wait_for_server(int(address.rpartition(":")[2]))
        start_client(
            server_address=address,
            client_fn=client_fn,
            grpc_max_message_length=MAX_MESSAGE_BYTES,
            insecure=True,
            max_retries=_MAX_RETRIES,
        )
    finally:
        print(f"torch imported: {'yes' if 'torch' in sys.modules else 'no'}", flush=True)


def _wait_for_server(port: int) -> None:
    """Wait as long as it takes: the launcher ends this process if there will be no server."""
    interval, longest = _POLL_S
    while not ports.accepts_connections(port):
        time.sleep(interval)
        interval = min(1.5 * interval, longest)


if __name__ == "__main__":
    main(*sys.argv[1:])
