"""TCP ports of this host."""

from __future__ import annotations

import errno
import http.client
import socket
from contextlib import ExitStack
from typing import Final

HOST: Final = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports that are free now.

    All ports are bound before the first is released, so the system cannot return the same port twice. Another
    process may still take a port before it is used.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind((HOST, 0))
        return [int(bound.getsockname()[1]) for bound in sockets]


def is_taken(host: str, port: int) -> bool:
    """Return True if a process listens on a port of an address of this host."""
    with ExitStack() as stack:
        try:
            family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            probe = stack.enter_context(socket.socket(family, kind))
            # Servers set this option, too. With it, a port that was just closed is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False


def is_healthy(port: int, timeout_s: float = 1.0) -> bool:
    """Return True if the HTTP server on a port answers ``/health`` with OK, as Flower's servers do."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def listens(pid: int, port: int) -> bool:
    """Return True if this process listens on a port, or if that is unknown.

    A health check is not enough, because another server on the same port answers it as well.
    """
    import psutil

    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return True
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in connections
    )
