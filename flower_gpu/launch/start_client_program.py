"""The processes of engine ``start-client``: ``python -m ... SETTINGS ADDRESS [NUMBER]``.

With a number it is that client, else it is the server. ``SETTINGS`` is the file that the launcher writes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from flower_gpu.launch import ports

if TYPE_CHECKING:
    from flwr.client import Client
    from flwr.common import Context as ContextType

_MAX_MESSAGE_BYTES: Final = 2**31 - 1  # as large as gRPC allows
_MAX_RETRIES: Final = 3  # a server that is gone does not come back
_POLL_S: Final = (0.1, 1.0)  # at first and at most: there may be hundreds of clients


def serve(settings: dict[str, Any], address: str) -> None:
    """Serve one run as the app's ``server_fn`` describes it."""
    server_fn = _load_function(settings["serverapp"], "server_fn")

    from flwr.common import Context, RecordDict
    from flwr.server import start_server

    from flower_gpu.flower.recording.recorder import write_event
    from flower_gpu.flower.recording.strategies import recorded_rounds

    context = Context(
        run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config=settings["run_config"]
    )
    with recorded_rounds(write_event, has_grid=False):
        components = server_fn(context)
        start_server(
            server_address=address,
            server=components.server,
            config=components.config,
            strategy=components.strategy,
            client_manager=components.client_manager,
            grpc_max_message_length=_MAX_MESSAGE_BYTES,
        )


def be_client(settings: dict[str, Any], address: str, client: int) -> None:
    """Serve as one client until the server dismisses it."""
    try:
        app_client_fn = _load_function(settings["clientapp"], "client_fn")
        node_config = settings["node_configs"][client]

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
            grpc_max_message_length=_MAX_MESSAGE_BYTES,
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


def _load_function(component: str, name: str) -> Callable[..., Any]:
    """Import a function from the module of a component ``"package.module:attribute"``."""
    module = component.partition(":")[0]
    function = getattr(import_module(module), name, None)
    if not callable(function):
        sys.exit(f"module {module} has no function {name}")
    return function  # type: ignore[no-any-return]


def _leave(signum: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def main(settings_path: str, address: str, client: str = "") -> None:
    """Be the server, or a client, of the app that the settings name."""
    signal.signal(signal.SIGTERM, _leave)  # through the ``finally`` blocks
    settings: dict[str, Any] = json.loads(Path(settings_path).read_text(encoding="utf-8"))
    sys.path.insert(0, settings["app"])
    if client:
        be_client(settings, address, int(client))
        return
    try:
        serve(settings, address)
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the interpreter would wait for gRPC's threads, and they for their clients


if __name__ == "__main__":
    main(*sys.argv[1:])
