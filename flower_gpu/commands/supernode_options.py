"""What SuperNodes are started with: options, and the environment that makes them ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Final

from flower_gpu.config import CONCURRENCY_VARIABLE
from flower_gpu.errors import ConfigError
from flower_gpu.gpu.settings import GPUSettings
from flower_gpu.launch.environment import script_folders
from flower_gpu.launch.gpu_options import GPUOptions
from flower_gpu.launch.option_types import positive_int, seconds
from flower_gpu.supernode import command_folder, slots
from flower_gpu.supernode.rule import Rule

COMMAND: Final = "flower-supernode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that are not about GPUs, and those of Flower."""
    group = parser.add_argument_group("messages")
    group.add_argument(
        "--max-concurrent",
        metavar="N",
        type=positive_int,
        help="how many messages are handled at a time, also without a GPU (default: as many as come)",
    )
    group.add_argument(
        "--timeout-s",
        metavar="S",
        type=seconds,
        help="seconds a message may take, counted from its lease (default: no limit)",
    )
    parser.add_argument(
        "flower", nargs="*", metavar="-- OPTIONS", help=f"options of {COMMAND}, after two dashes"
    )


def environment(arguments: argparse.Namespace, base: Mapping[str, str], nodes: int = 1) -> dict[str, str]:
    """Return the environment of this many SuperNodes with these options.

    Raises
    ------
    ConfigError
        If an option or variable cannot be used.
    """
    check(arguments.flower)
    gpu = GPUOptions.from_arguments(arguments)
    env = gpu.environment(base)
    if arguments.timeout_s is not None:
        env["FLOWER_GPU_TIMEOUT_S"] = str(arguments.timeout_s)
    try:
        GPUSettings.resolve(environ=env)
    except ConfigError as error:
        raise ConfigError(gpu.in_their_words(str(error))) from error
    if arguments.max_concurrent is not None:
        env[slots.VARIABLE] = str(slots.make(arguments.max_concurrent))
    if nodes > 1 and not env.get(CONCURRENCY_VARIABLE):  # so many workers share the cores: fewer threads each
        env[CONCURRENCY_VARIABLE] = str(min(nodes, arguments.max_concurrent or nodes))
    env.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")  # Flower's 1 s is felt in every message
    env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # an app's import does not start CUDA
    path = os.pathsep.join([*script_folders(), env.get("PATH", os.defpath)])
    return command_folder.fast_start({**env, "PATH": path}, Rule(with_lease=True), nodes)


def check(flower: Sequence[str]) -> None:
    """Refuse options of Flower with which it starts no process that could be ours.

    Raises
    ------
    ConfigError
        If there is such an option.
    """
    _, isolation = without_option(flower, "--isolation")
    if "process" in isolation:
        raise ConfigError(
            "with --isolation process somebody else starts the processes of messages, so they would have no "
            "lease: leave it out, flower-supernode then starts them itself"
        )


def without_option(options: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Split Flower's options into those without one of them, and its values.

    Parameters
    ----------
    options : sequence of str
        Names and values as on a command line.
    name : str
        The option, such as ``"--node-config"``; as Flower does, this takes abbreviations for it, too.
    """
    rest: list[str] = []
    values: list[str] = []
    left = iter(options)
    for option in left:
        given, sign, value = option.partition("=")
        if len(given) <= 2 or not name.startswith(given):
            rest.append(option)
        elif sign:
            values.append(value)
        else:
            values.append(next(left, ""))
    return rest, values
