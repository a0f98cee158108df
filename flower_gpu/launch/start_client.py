"""Engine ``start-client``: one ``start_server`` and N long-lived ``start_client`` processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from flower_gpu.launch import ports
from flower_gpu.launch.engine import PORT_ATTEMPTS, Engine, died
from flower_gpu.launch.supervisor import LaunchFailedError, Service

# How long clients may take to end after the server did; they only have to close a connection.
_CLIENTS_END_S: Final = 5.0


def command(settings: Path, port: int, client: int | None = None) -> list[str]:
    """Build the command line of a client, or of the server where there is no number."""
    program = [sys.executable, "-P", "-m", "flower_gpu.launch.start_client_program"]
    number = [] if client is None else [str(client)]
    return [*program, str(settings), f"{ports.HOST}:{port}", *number]


class StartClientEngine(Engine):
    """Runs an app's ``server_fn`` and ``client_fn`` on Flower's older, lighter pair of functions."""

    _attempts = 0

    @property
    def server_log(self) -> Path:
        """Log of the server."""
        return self.folder.log("server")

    def start(self) -> None:
        """Start the server and the clients at once: the clients wait until the server answers."""
        self._attempts += 1
        settings = self.folder.settings
        port = self.plan.options.port or ports.free_ports(1)[0]
        self._server = Service("server", command(settings, port), self.env, self.server_log)
        self._clients = [
            Service(
                f"client {client}",
                command(settings, port, client),
                self.client_environment(client),
                self.folder.log(f"client-{client}"),
            )
            for client in range(self.plan.clients)
        ]
        self.supervisor.start(self._server, *self._clients)

    def has_finished(self) -> bool:
        """Notice what ended: the run is over when the server has ended well."""
        if self._server.runs:
            for client in self._clients:
                if client.returncode:  # a client ends with 0 when the server dismisses it
                    raise died(client)
            return False
        if self._server.returncode == 0:
            deadline = time.monotonic() + _CLIENTS_END_S
            while any(client.runs for client in self._clients) and time.monotonic() < deadline:
                self.supervisor.wait(0.1)
            return True
        if self._server.port_was_taken and not self.plan.options.port and self._attempts < PORT_ATTEMPTS:
            self.supervisor.stop(*self._clients)
            self.start()
            return False
        raise LaunchFailedError(self._server.describe_end(), self._server)
