"""TCP ports on this machine."""

from __future__ import annotations

import errno
import http.client
import socket
from contextlib import ExitStack
from typing import Final

HOST: Final = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Find ports that are free now, all different.

    All are bound before any is let go, so the system cannot give out the same one twice. Another process can
    still take one before it is used.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def is_taken(host: str, port: int) -> bool:
    """Return True if a process listens on a port of an address of this host."""
    with ExitStack() as stack:
        try:
            family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            probe = stack.enter_context(socket.socket(family, kind))
            # As servers do: a port that was just closed is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False


def is_healthy(port: int, timeout_s: float = 1.0) -> bool:
    """Ask the HTTP server on a port whether it is healthy, as Flower's servers answer it."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def listens(pid: int, port: int) -> bool:
    """Tell whether it is this process that listens on a port; True where that cannot be found out.

    Another server on the same port answers as well as the one that was just started.
    """
    import psutil

    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return True
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)
