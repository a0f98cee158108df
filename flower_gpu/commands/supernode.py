"""``flower-gpu supernode``: a SuperNode whose every message runs under a lease, whatever the app is."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence

from flower_gpu.errors import ConfigError
from flower_gpu.gpu.settings import GPUSettings
from flower_gpu.launch import environment, gpu_options
from flower_gpu.launch.gpu_options import GPUOptions
from flower_gpu.launch.option_types import positive_float, positive_int
from flower_gpu.supernode import command_folder, slots
from flower_gpu.supernode.rule import Rule

HELP = "run a SuperNode whose messages get leases, whatever the app is"
DESCRIPTION = """\
Run Flower's SuperNode in such a way that each message is handled in a worker that first gets a lease on a GPU and
is held to it. Apps need not be changed, and cannot change it. Messages start in milliseconds, since Flower and torch
are imported already in the process that workers are forked from.

    flower-gpu supernode --gpu-memory 4GiB -- --insecure --superlink 127.0.0.1:9092 --port 9101"""

_COMMAND = "flower-supernode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    gpu_options.add_arguments(parser)
    add_limits(parser)
    parser.add_argument(
        "flower", nargs="*", metavar="FLOWER_OPTION", help="after --: options of flower-supernode"
    )


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that are not about GPUs."""
    group = parser.add_argument_group("messages")
    group.add_argument(
        "--max-concurrent",
        metavar="N",
        type=positive_int,
        help="how many messages run at a time, also without a GPU (default: as many as come)",
    )
    group.add_argument(
        "--timeout-s",
        metavar="S",
        type=positive_float,
        help="seconds a message may take, counted from its lease (default: no limit)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Become the SuperNode."""
    check(arguments.flower)
    env = supernode_environment(arguments, os.environ)
    GPUSettings.resolve(environ=env)
    program = shutil.which(_COMMAND, path=env["PATH"])
    if program is None:
        raise ConfigError(f"{_COMMAND} is not installed beside this Python: pip install flwr")
    os.execve(program, [_COMMAND, *arguments.flower], env)


def check(flower: Sequence[str]) -> None:
    """Refuse options of Flower with which it starts no process that could be ours.

    Raises
    ------
    ConfigError
        If there is such an option.
    """
    text = " ".join(flower)
    if "--isolation process" in text or "--isolation=process" in text:
        raise ConfigError(
            "--isolation process leaves it to you to start flower-superexec; with flower-gpu the SuperNode must do that: "
            "leave it out"
        )


def supernode_environment(arguments: argparse.Namespace, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of SuperNodes with these options."""
    env = GPUOptions.from_arguments(arguments).environment(base)
    if arguments.timeout_s is not None:
        env["FLOWER_GPU_TIMEOUT_S"] = str(arguments.timeout_s)
    if arguments.max_concurrent is not None:
        env[slots.VARIABLE] = str(slots.make(arguments.max_concurrent))
    env.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")  # Flower's 1 s is felt in every message
    path = [str(command_folder.make()), *environment.script_folders(), env.get("PATH", os.defpath)]
    return {**env, **Rule(with_lease=True).environment(), "PATH": os.pathsep.join(path)}
