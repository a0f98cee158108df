"""``flower-gpu supernode``: a SuperNode whose every message runs under a lease, whatever the app is."""

from __future__ import annotations

import argparse
import os

from flower_gpu.commands import supernode_options
from flower_gpu.launch import gpu_options
from flower_gpu.supernode import warm

HELP = "run a SuperNode whose messages get leases, whatever the app is"
DESCRIPTION = """\
Run Flower's SuperNode so that each message is handled in a worker that first gets a lease on a GPU, and is
held to it. Apps need not be changed for that, and cannot change it. Messages start in milliseconds: Flower
and torch are imported already in the process that workers are forked from.

    flower-gpu supernode --gpu-memory 4GiB -- --insecure --superlink 127.0.0.1:9092 --port 9101"""

_TEXTS = (
    "Which GPUs messages may use, and what each of them leases there, whatever the app's code says.",
    "device policy of this node",
    "what this node may use (default: every GPU of the host)",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    gpu_options.add_arguments(parser, _TEXTS)
    supernode_options.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Become the SuperNode."""
    env = supernode_options.environment(arguments, os.environ)
    warm.in_background(env)
    os.execvpe(supernode_options.COMMAND, [supernode_options.COMMAND, *arguments.flower], env)
