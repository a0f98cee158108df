"""Environment variables of the processes of a run."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from flower_gpu.config import RUN_DIR_VARIABLE, planned_threads
from flower_gpu.errors import ConfigError
from flower_gpu.launch.config_values import ConfigValue
from flower_gpu.launch.folder import RunFolder
from flower_gpu.launch.gpu_options import GPUOptions, node_environment
from flower_gpu.launch.ports import HOST


def service_environment(
    base: Mapping[str, str],
    folder: RunFolder,
    *,
    start_method: str | None = None,
    timeout_s: float | None = None,
    gpu: GPUOptions | None = None,
) -> dict[str, str]:
    """Build the environment of every process of a run: the user's own, plus what a run needs.

    Parameters
    ----------
    base : mapping
        The launcher's environment.
    folder : RunFolder
        The run's folder.
    start_method, timeout_s
        For calls in workers, where the user gave them.
    gpu : GPUOptions, optional
        What they want of the host's GPUs.
    """
    env = {
        # What a user may want otherwise, and can set.
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # Flower's 1 s is felt in every message
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # cuda.is_available() at import does not start CUDA
        "PYTHONUNBUFFERED": "1",  # what an app prints is in its log when its process is killed
        **base,
        # What keeps runs apart from each other and from the user's Flower configuration.
        "FLWR_HOME": str(folder.flwr_home),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        RUN_DIR_VARIABLE: str(folder.path),
        "PATH": os.pathsep.join([*script_folders(), base.get("PATH", os.defpath)]),
    }
    env.pop("FLOWER_GPU_CLIENT", None)  # set for clients only
    for name in ("NO_PROXY", "no_proxy"):  # all connections are local, whatever proxy there is
        env[name] = ",".join(filter(None, [base.get(name), HOST, "localhost"]))
    if start_method is not None:
        env["FLOWER_GPU_START_METHOD"] = start_method
    if timeout_s is not None:
        env["FLOWER_GPU_TIMEOUT_S"] = str(timeout_s)
    return env if gpu is None else gpu.environment(env)


def client_environment(
    env: Mapping[str, str],
    client: int,
    at_once: int,
    node_config: Mapping[str, ConfigValue] = MappingProxyType({}),
) -> dict[str, str]:
    """Build the environment of one client's processes from that of every process.

    Parameters
    ----------
    env : mapping
        Environment of every process of the run.
    client : int
        Number of the client.
    at_once : int
        How many clients may train at the same time.
    node_config : mapping
        Config of the client's node.
    """
    result = {**node_environment(env, node_config), "FLOWER_GPU_CLIENT": str(client)}
    if not env.get("FLOWER_GPU_CONCURRENCY"):
        result["FLOWER_GPU_CONCURRENCY"] = str(at_once)
    if not env.get("OMP_NUM_THREADS"):
        # Workers get their share by themselves. This is for apps that train in the client's own process:
        # OpenMP's threads wait for each other in busy loops, and three clients with two threads each on
        # two cores were seen to take six times as long as with one.
        result["OMP_NUM_THREADS"] = str(planned_threads(result))
    return result


def script_folders() -> list[str]:
    """Folders of this Python environment's own commands; Flower starts its parts by their names."""
    # Not resolved: the python of a virtual environment is a link to one that lies elsewhere.
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    return list(dict.fromkeys(folders))


def check_commands(names: tuple[str, ...]) -> None:
    """Check that Flower's commands are installed.

    Raises
    ------
    ConfigError
        If one is missing.
    """
    path = os.pathsep.join([*script_folders(), os.environ.get("PATH", os.defpath)])
    for name in names:
        if shutil.which(name, path=path) is None:
            raise ConfigError(f"{name} is not installed beside {sys.executable}: pip install flwr")
