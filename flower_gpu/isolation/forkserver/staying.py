"""Having fork servers go on for as long as a process may need them."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

from flower_gpu.isolation.forkserver import identity, sockets
from flower_gpu.isolation.forkserver.sockets import Gone

_ANSWER_S = 20.0


class Stays:
    """The fork servers that this process has asked to stay; each does until this process is gone.

    Attributes
    ----------
    connections : dict of str to socket
        By the server's name; open as long as it is to stay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.connections: dict[str, socket.socket] = {}

    def ask(self, name: str) -> None:
        """Ask server ``name``, where it runs, unless it has been asked."""
        with self._lock:
            connection = self.connections.get(name)
            if connection is not None:
                if not sockets.is_closed(connection):
                    return
                self.connections.pop(name).close()
            with suppress(Gone):
                connection = sockets.connect(name, _ANSWER_S)
                try:
                    sockets.send(connection, {"op": "stay"})
                    for descriptor in sockets.receive_answer(connection)[1]:
                        os.close(descriptor)
                except Gone:
                    connection.close()
                else:
                    self.connections[name] = connection

    def ask_own(self) -> None:
        """Ask the one that a process with this environment uses first."""
        self.ask(identity.server_name(os.environ, (), ()))

    def close(self) -> None:
        """Let go of them."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
