"""Environment variables of the processes of a run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from types import MappingProxyType

from flower_gpu import frameworks, options
from flower_gpu.apps.app import ConfigValue
from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import ConfigError
from flower_gpu.flower.commands import with_flowers
from flower_gpu.launch.ports import HOST
from flower_gpu.options import (
    CLIENT_VARIABLE,
    CONCURRENCY_VARIABLE,
    NUM_CPUS_VARIABLE,
    RUN_DIR_VARIABLE,
    CallOptions,
)
from flower_gpu.workers.threads import planned_threads


def service_environment(
    base: Mapping[str, str], folder: RunFolder, calls: CallOptions | None = None
) -> dict[str, str]:
    """Build the environment of every process of a run: the user's own, what a run needs, and call options."""
    env = {
        # What a user may want otherwise, and can set.
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # Flower's 1 s is felt in every message
        **frameworks.UNTOUCHED_CUDA,  # what an app asks of GPUs when it is imported does not start CUDA
        "PYTHONUNBUFFERED": "1",  # what an app prints is in its log when its process is killed
        **base,
        # What keeps runs apart from each other and from the user's Flower configuration.
        "FLWR_HOME": str(folder.flwr_home),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        RUN_DIR_VARIABLE: str(folder.path),
        "PATH": with_flowers(base.get("PATH")),
    }
    env.pop(CLIENT_VARIABLE, None)  # set for clients only
    for name in ("NO_PROXY", "no_proxy"):  # all connections are local, whatever proxy there is
        env[name] = ",".join(filter(None, [base.get(name), HOST, "localhost"]))
    return options.environment(calls or {}, env)


def client_environment(
    env: Mapping[str, str],
    client: int,
    at_once: int,
    node_config: Mapping[str, ConfigValue] = MappingProxyType({}),
) -> dict[str, str]:
    """Build the environment of one client's processes from the environment of every process.

    ``at_once`` clients may train at the same time; ``node_config`` is the config of the client's node.
    """
    result = {**options.node_environment(env, node_config), CLIENT_VARIABLE: str(client)}
    if not env.get(CONCURRENCY_VARIABLE):
        result[CONCURRENCY_VARIABLE] = str(at_once)
    if not env.get("OMP_NUM_THREADS"):
        # Workers get their share by themselves. This is for apps that train in the client's own process:
        # OpenMP's threads wait for each other in busy loops, and three clients with two threads each on
        # two cores were seen to take six times as long as with one.
        asked = node_config.get("num-cpus")
        told = {} if asked is None else {NUM_CPUS_VARIABLE: str(asked)}
        result["OMP_NUM_THREADS"] = str(planned_threads({**result, **told}))
    return result


def check_commands(names: tuple[str, ...]) -> None:
    """Check that Flower's commands are installed.

    Raises ConfigError if one is missing.
    """
    path = with_flowers(os.environ.get("PATH"))
    for name in names:
        if shutil.which(name, path=path) is None:
            raise ConfigError(f"{name} is not installed for {sys.executable}: pip install flwr")
