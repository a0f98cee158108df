"""What the two engines have in common, and engine ``start-client``: a server and N long-lived clients."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Final

from flower_gpu.apps.folder import RunFolder
from flower_gpu.launch import ports
from flower_gpu.launch.environment import client_environment
from flower_gpu.launch.plan import Plan
from flower_gpu.launch.supervisor import LaunchFailedError, Service, Supervisor, last_traceback

#: How often a process is started again with another port when another process took the one it was given.
PORT_ATTEMPTS: Final = 4
# How long clients may take to end after the server did; they only have to close a connection.
_CLIENTS_END_S: Final = 5.0


class LaunchEngine(ABC):
    """Starts the processes of one run and finds out how it ends."""

    #: What clients and server are called.
    parts: ClassVar = "clients and the server"

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        env: Mapping[str, str],
        supervisor: Supervisor,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.env = env
        self.supervisor = supervisor
        #: Shows a line.
        self.say: Callable[[str], object] = print

    @property
    @abstractmethod
    def server_log(self) -> Path:
        """The log that shows the rounds as Flower reports them."""

    @abstractmethod
    def start(self) -> None:
        """Start everything; raises LaunchFailedError or LaunchStoppedError."""

    @abstractmethod
    def has_finished(self) -> bool:
        """Tell whether the run has completed; raises LaunchFailedError if it cannot complete any more."""

    def client_of(self, node_id: int) -> str:
        """Return the number of a node's client; ``"node ID"`` where that is not known."""
        return f"node {node_id}"

    def traceback_of(self, client: str) -> str:
        """Return the last traceback in a client's log; empty where there is none."""
        return last_traceback(self.folder.log(f"client-{client}"))

    def client_environment(self, client: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Build the environment of one client's processes, from that of all processes or another one."""
        node_config = self.plan.node_config_of(client)
        return client_environment(env or self.env, client, self.plan.clients_at_once, node_config)

    def start_on_free_port(self, make: Callable[[int], Service], is_ready: Callable[[int], bool]) -> int:
        """Start a server and wait until it answers; return its port.

        ``make`` builds the service for a port, ``is_ready`` asks the server on a port. Where another process
        takes the port meanwhile, the server is started again on another one.
        """
        for attempt in range(1, PORT_ATTEMPTS + 1):
            port = self.plan.options.port or ports.free_ports(1)[0]
            service = make(port)
            self.supervisor.start(service)
            while service.runs:
                if is_ready(port) and service.pid and ports.listens(service.pid, port):
                    return port
                self.supervisor.wait(0.05)
            if self.plan.options.port or attempt == PORT_ATTEMPTS or not service.port_was_taken:
                raise died(service)
        raise AssertionError("the last attempt returns or raises")


def died(service: Service) -> LaunchFailedError:
    """Describe a service that ended although the run goes on."""
    return LaunchFailedError(f"{service.describe_end()} before the run was over", service)


def start_client_command(settings: Path, port: int, client: int | None = None) -> list[str]:
    """Build the command line of a client, or of the server where there is no number."""
    program = [sys.executable, "-P", "-m", "flower_gpu.launch.start_client_program"]
    number = [] if client is None else [str(client)]
    return [*program, str(settings), f"{ports.HOST}:{port}", *number]


class StartClientEngine(LaunchEngine):
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
        self._server = Service("server", start_client_command(settings, port), self.env, self.server_log)
        self._clients = [
            Service(
                f"client {client}",
                start_client_command(settings, port, client),
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
