"""Our ``flwr``, for ``flower-gpu launch --secure``: Flower's, as the operator that a SuperLink lets in.

Its own ``register-nodes`` registers several SuperNodes in one process: ``flwr supernode register`` takes a
process for each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flower_gpu.flower import mutual_tls

#: Followed by the name of a connection, and files with public keys.
REGISTER: Final = "register-nodes"


def main() -> None:
    """Run Flower's command line."""
    mutual_tls.use(os.environ)
    sys.argv[0] = "flwr"
    if sys.argv[1:2] == [REGISTER]:
        register(sys.argv[2], sys.argv[3:])
        return
    from flwr.cli.app import app

    app()


def register(connection: str, public_keys: Sequence[str]) -> None:
    """Tell a SuperLink of the keys that it lets in, as ``flwr supernode register`` does.

    Parameters
    ----------
    connection : str
        Name of the SuperLink in Flower's configuration.
    public_keys : sequence of str
        Files.
    """
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
    from flwr.proto.control_pb2 import RegisterNodeRequest

    client = init_http_client_from_connection(read_superlink_connection(connection))
    try:
        for file in map(Path, public_keys):
            with flwr_cli_exc_handler():
                found = client.RegisterNode(RegisterNodeRequest(public_key=try_load_public_key(file)))
            print(f"{file.stem} is node {found.node_id}", flush=True)
    finally:
        client.close()
