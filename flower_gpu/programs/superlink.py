"""The address at which a SuperNode finds its SuperLink, and whether a program listens there.

A SuperLink serves all of its interfaces (Fleet, Control and Runtime) on one HTTP port: 8000 by default in
flwr 1.40 to 1.43. Up to flwr 1.39 SuperNodes connected to port 9092 by gRPC. Flower's SuperNode retries for
ever when it cannot connect. Its log then has only "Connection attempt failed", without the address and the
reason.
"""

from __future__ import annotations

import argparse
import socket
import time
import urllib.request
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Final

from flower_gpu.flower import distribution
from flower_gpu.flower.private_names import DEFAULT_SUPERLINK, DEFAULT_SUPERNODE, find

# A SuperLink that is started at the same time needs some seconds on a busy machine.
_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.5
_CONNECT_S: Final = 2.0
_LAST_PORT: Final = 65535


def address_of(options: Sequence[str]) -> str:
    """Return the SuperLink's address, ``host:port``, for a ``flower-supernode`` with these options."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--superlink")
    address: str | None = parser.parse_known_args(options)[0].superlink
    return address or find(DEFAULT_SUPERLINK) or "127.0.0.1:8000"


def runtime_address_of(options: Sequence[str]) -> tuple[str, int | None]:
    """Return host and port on which a ``flower-supernode`` with these options listens for its ClientApps.

    The port is None if it is unknown or not a number.
    """
    host, _, port = (find(DEFAULT_SUPERNODE) or "127.0.0.1:").rpartition(":")
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", default=host)
    parser.add_argument("--port", default=port)
    parsed, _ = parser.parse_known_args(options)
    is_port = parsed.port.isdecimal() and 0 < int(parsed.port) <= _LAST_PORT
    return parsed.host, int(parsed.port) if is_port else None


def is_on_this_host(address: str) -> bool:
    """Return True if an address belongs to the loopback interface."""
    host, _ = _parts(address)
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def wait_until_it_listens(
    address: str, say: Callable[[str], object], sleep: Callable[[float], object] = time.sleep
) -> None:
    """Wait a few seconds until a program listens at an address. If it does not, report the reason.

    This wait costs no time: a SuperNode that starts too early waits longer and longer between its attempts.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while (reason := unreachable_because(address)) is not None:
        if time.monotonic() > deadline:
            say(f"{reason}. The SuperNode keeps trying. {_hint(address)}")
            return
        sleep(_PAUSE_S)


def unreachable_because(address: str) -> str | None:
    """Return why a connection to an address fails; None if it succeeds or would go through a proxy."""
    host, port = _parts(address)
    if not port.isdecimal() or int(port) > _LAST_PORT or _has_proxy(host):
        return None  # Flower itself refuses an address without a valid port.
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return f"no program listens at {address}"
    except TimeoutError:
        return f"{address} does not answer: the host is off, or a firewall drops connections to it"
    except OSError as error:
        return f"{address} cannot be reached ({error})"
    return None


def _hint(address: str) -> str:
    default = address_of([])
    text = f"A SuperLink of {distribution.described()} listens on port {_parts(default)[1]} by default"
    if is_on_this_host(address):
        return text
    return f"{text}, and on its own host only, unless it is started with --host 0.0.0.0"


def _parts(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition("//")[2].rpartition(":")
    return host.strip("[]"), port


def _has_proxy(host: str) -> bool:
    """Return True if Flower's HTTP client would ask a proxy for a connection to this host."""
    return bool(urllib.request.getproxies()) and not urllib.request.proxy_bypass(host)
