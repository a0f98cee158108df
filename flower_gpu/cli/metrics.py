"""``flower-gpu metrics``: what GPUs, leases and runs do, for Prometheus."""

from __future__ import annotations

import argparse

HELP = "serve figures of GPUs, leases and runs for Prometheus"
DESCRIPTION = """\
Answer Prometheus, over HTTP and until Ctrl-C: what the GPUs of this host do, how much of them is leased, and
what the runs of this account do. It looks when it is asked, and changes nothing.

    flower-gpu metrics
    curl http://127.0.0.1:9460/metrics"""

_ADDRESS = "127.0.0.1"
PORT = 9460


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--port",
        metavar="N",
        type=int,
        default=PORT,
        help=f"port to listen on; 0: a free one (default: {PORT})",
    )
    parser.add_argument(
        "--address",
        metavar="HOST",
        default=_ADDRESS,
        help=f"address of this host to listen on (default: {_ADDRESS}, which other hosts cannot reach)",
    )
    parser.add_argument(
        "--per-client",
        action="store_true",
        help="count workers for each client: one more time series for each client",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends this process.

    Returns 128 + n: ended by signal n.
    """
    from flower_gpu.watch.metrics import Collector, HostMetrics, Runs, serve

    return serve(
        Collector(HostMetrics(), Runs(), per_client=arguments.per_client), arguments.address, arguments.port
    )
