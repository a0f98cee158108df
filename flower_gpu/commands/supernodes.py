"""``flower-gpu supernodes``: many SuperNodes on one host, under the same rule."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flower_gpu.commands import supernode_options
from flower_gpu.commands.verbosity import is_quiet
from flower_gpu.config import RUN_DIR_VARIABLE
from flower_gpu.errors import ConfigError
from flower_gpu.launch import gpu_options, ports
from flower_gpu.launch.config_values import format_pairs, parse_pairs
from flower_gpu.launch.folder import RunFolder
from flower_gpu.launch.gpu_options import GPUOptions, node_environment
from flower_gpu.launch.option_types import folder, positive_int
from flower_gpu.launch.processes import describe_exit
from flower_gpu.launch.service import Service
from flower_gpu.launch.supervisor import LaunchStoppedError, Supervisor
from flower_gpu.run.recording import recorded_run
from flower_gpu.supernode import warm

HELP = "run many SuperNodes on this host whose messages get leases"
DESCRIPTION = """\
Run SuperNodes, each as `flower-gpu supernode` does, until Ctrl-C. They get ports of their own, and
partition-id and num-partitions in their node configs. One that ends is started again.

    flower-gpu supernodes --count 20 --gpu-num 0,1 -- --insecure --superlink 127.0.0.1:9092"""

_TEXTS = (
    "Which GPUs messages may use, and what each of them leases there, whatever the app's code says.",
    "device policy of the nodes",
    "the first node uses the first, and so on round and round (default: every node may use all)",
)
_NODE_CONFIG = "--node-config"
_PAUSE_S = 5.0  # before one that has ended is started again
_EARLY_S = 20.0  # one that ends before could not start, or not reach its SuperLink
_EARLY_ENDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--count", metavar="N", type=positive_int, required=True, help="how many SuperNodes")
    gpu_options.add_arguments(parser, _TEXTS)
    supernode_options.add_arguments(parser)
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        type=folder,
        default=Path("runs"),
        help="where a folder with a log of each is made (default: runs)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the SuperNodes until the user ends them."""
    given, node_config = supernode_options.without_option(arguments.flower, _NODE_CONFIG)
    if supernode_options.without_option(given, "--port")[1]:
        raise ConfigError("--port is another one for each SuperNode: leave it out, they get free ones")
    gpu = GPUOptions.from_arguments(arguments)
    pairs = parse_pairs(_NODE_CONFIG, node_config)
    gpu.check_node_config(pairs)
    env = supernode_options.environment(arguments, os.environ, arguments.count)
    logs = RunFolder.create(arguments.log_dir)
    env[RUN_DIR_VARIABLE] = str(logs.path)
    if not is_quiet(arguments):
        print(f"{arguments.count} SuperNodes; logs in {logs.shown}. Ctrl-C ends them", flush=True)
    with (
        recorded_run(
            logs.path, "supernodes", f"{arguments.count} SuperNodes", clients=arguments.count
        ) as run,
        Supervisor(f"{RUN_DIR_VARIABLE}={logs.path}") as supervisor,
    ):
        warm.up()
        nodes = [
            _Node(number, arguments.count, given, pairs, gpu, env, logs) for number in range(arguments.count)
        ]
        try:
            while True:
                for each in nodes:
                    each.look(supervisor)
                supervisor.wait(0.5)
        except LaunchStoppedError:
            run.outcome = "interrupted"
        except _NeverStartsError as error:
            run.outcome = "failed"
            print(f"flower-gpu supernodes: {error}", file=sys.stderr)
            return 1
    return 0


class _NeverStartsError(Exception):
    """A SuperNode ends again and again, soon after its start."""


class _Node:
    """One SuperNode, which is started again when it ends."""

    def __init__(
        self,
        number: int,
        count: int,
        given: Sequence[str],
        pairs: Mapping[str, bool | float | int | str],
        gpu: GPUOptions,
        env: Mapping[str, str],
        logs: RunFolder,
    ) -> None:
        config = {"partition-id": number, "num-partitions": count, **pairs, **gpu.node_config_of(number)}
        self._options = [*given, _NODE_CONFIG, format_pairs(config)]
        self._env = {**node_environment(env, config), "FLOWER_GPU_CLIENT": str(config["partition-id"])}
        self._name = f"SuperNode {number}"
        self._log = logs.log(f"supernode-{number}")
        self._service: Service | None = None
        self._began = 0.0
        self._again_at = 0.0
        self._early_ends = 0

    def look(self, supervisor: Supervisor) -> None:
        """Start it if it does not run, and its pause is over."""
        if self._service is not None and self._service.runs:
            return
        now = time.monotonic()
        if self._service is not None:
            self._note_end(self._service, now)
        if now >= self._again_at:
            port = ports.free_ports(1)[0]
            command = [supernode_options.COMMAND, "--port", str(port), *self._options]
            self._service = Service(self._name, command, self._env, self._log)
            self._began = now
            supervisor.start(self._service)

    def _note_end(self, service: Service, now: float) -> None:
        self._service = None
        self._early_ends = self._early_ends + 1 if now - self._began < _EARLY_S else 0
        how = f"{self._name} ended with {describe_exit(service.returncode or 0)}"
        if self._early_ends >= _EARLY_ENDS:
            raise _NeverStartsError(
                f"{how}, {self._early_ends} times in a row. The end of {self._log}:\n{service.tail()}"
            )
        print(f"{how}; it is started again in {_PAUSE_S:g} s", flush=True)
        self._again_at = now + _PAUSE_S
