"""The launcher's options about GPUs, and how they reach the calls of a run.

They reach them twice, saying the same: as keys of the node config, which is where Flower's operators say such
things, and as environment variables, for apps whose code does not hand its ``context`` on and for the server,
which has no node config. Both work alike with either engine.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flower_gpu.errors import ConfigError
from flower_gpu.gpu.policy import NODE_KEY, NODE_NUMBER_KEY, POLICIES, gpu_numbers
from flower_gpu.gpu.settings import ON_OOM
from flower_gpu.launch.config_values import ConfigValue
from flower_gpu.launch.option_types import positive_float, seconds, text_value

#: The option for each variable that the launcher can set.
FLAGS: Final = MappingProxyType(
    {
        "FLOWER_GPU_POLICY": "--gpu",
        "FLOWER_GPU_NUM": "--gpu-num",
        "FLOWER_GPU_NUM_GPUS": "--num-gpus",
        "FLOWER_GPU_MEMORY": "--gpu-memory",
        "FLOWER_GPU_LEASE_TIMEOUT_S": "--lease-timeout-s",
        "FLOWER_GPU_ON_OOM": "--on-oom",
    }
)
_REQUESTS: Final = ("FLOWER_GPU_NUM_GPUS", "FLOWER_GPU_MEMORY")
_NODE_VARIABLES: Final = MappingProxyType({NODE_KEY: "FLOWER_GPU_POLICY", NODE_NUMBER_KEY: "FLOWER_GPU_NUM"})


@dataclass(frozen=True)
class GPUOptions:
    """What the user asked for; None leaves it to the environment and the app.

    Parameters
    ----------
    gpu : str, optional
        The device policy of every client, and of the server's own calls.
    gpu_num : tuple of int or str, optional
        GPUs that are dealt out: the first client gets the first, and so on round and round. The server may
        use them all.
    num_gpus : float, optional
        GPUs of a call, or the share of one.
    gpu_memory : str, optional
        GPU memory of a call.
    lease_timeout_s : float, optional
        Seconds a call may wait for its lease.
    on_oom : str, optional
        What follows when a call runs out of GPU memory.
    """

    gpu: str | None = None
    gpu_num: tuple[int | str, ...] | None = None
    num_gpus: float | None = None
    gpu_memory: str | None = None
    lease_timeout_s: float | None = None
    on_oom: str | None = None

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> GPUOptions:
        """Turn parsed arguments into options.

        Raises
        ------
        ConfigError
            If ``--gpu-num`` is no list of GPUs.
        """
        return cls(
            gpu=arguments.gpu,
            gpu_num=gpu_numbers(arguments.gpu_num, FLAGS["FLOWER_GPU_NUM"]),
            num_gpus=arguments.num_gpus,
            gpu_memory=arguments.gpu_memory,
            lease_timeout_s=arguments.lease_timeout_s,
            on_oom=arguments.on_oom,
        )

    def check_node_config(self, node_config: Mapping[str, ConfigValue]) -> None:
        """Check that ``--node-config`` does not say again what an option says.

        Raises
        ------
        ConfigError
            If it does.
        """
        for key, value in ((NODE_KEY, self.gpu), (NODE_NUMBER_KEY, self.gpu_num)):
            if value is not None and key in node_config:
                raise ConfigError(f"{FLAGS[_NODE_VARIABLES[key]]} and --node-config {key} say the same twice")

    def node_config_of(self, client: int) -> dict[str, ConfigValue]:
        """Return what goes into the config of one client's node."""
        config: dict[str, ConfigValue] = {}
        if self.gpu is not None:
            config[NODE_KEY] = self.gpu
        if self.gpu_num is not None:
            config[NODE_NUMBER_KEY] = self.gpu_num[client % len(self.gpu_num)]
        return config

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with these options in it: they win over the variables that are there."""
        values = {
            "FLOWER_GPU_POLICY": self.gpu,
            "FLOWER_GPU_NUM": None if self.gpu_num is None else ",".join(map(str, self.gpu_num)),
            "FLOWER_GPU_NUM_GPUS": self.num_gpus,
            "FLOWER_GPU_MEMORY": self.gpu_memory,
            "FLOWER_GPU_LEASE_TIMEOUT_S": self.lease_timeout_s,
            "FLOWER_GPU_ON_OOM": self.on_oom,
        }
        given = {name: str(value) for name, value in values.items() if value is not None}
        # A share and a size are two ways to say one thing: whichever is given takes the other's place.
        replaced = _REQUESTS if any(name in given for name in _REQUESTS) else ()
        return {**{name: value for name, value in base.items() if name not in replaced}, **given}

    def name_of(self, variable: str) -> str:
        """Return what the user has to change where a variable's value is wrong: it, or an option."""
        return FLAGS[variable] if variable in FLAGS and variable in self.environment({}) else variable

    def in_their_words(self, text: str) -> str:
        """Return a message about variables with the options in their place that were given."""
        return re.sub(r"FLOWER_GPU_[A-Z_]+", lambda found: self.name_of(found[0]), text)


def node_environment(env: Mapping[str, str], node_config: Mapping[str, ConfigValue]) -> dict[str, str]:
    """Return a client's environment: what its node config says of GPUs holds also if its code passes none."""
    said = {variable: node_config.get(key) for key, variable in _NODE_VARIABLES.items()}
    return {**env, **{name: str(value) for name, value in said.items() if value is not None}}


#: What the options say of themselves, where each client has a node of its own on this machine.
ABOUT_RUNS: Final = (
    "Which GPUs calls may use, and what each of them leases there. What an app's own code says goes\n"
    "before --num-gpus, --gpu-memory, --lease-timeout-s and --on-oom, and after --gpu and --gpu-num.",
    "device policy of every client and of the server's own calls",
    "the first client uses the first, and so on round and round; the server's own calls may use all of them "
    "(default: every call may)",
)


def add_arguments(parser: argparse.ArgumentParser, texts: tuple[str, str, str] = ABOUT_RUNS) -> None:
    """Add the options to a parser.

    Parameters
    ----------
    parser : ArgumentParser
        Where they go.
    texts : tuple of str
        What to say about all of them, about whose policy it is, and about who uses which of the GPUs.
    """
    about, whose, which = texts
    group = parser.add_argument_group("GPUs", about)
    group.add_argument(
        "--gpu",
        choices=POLICIES,
        help=f"{whose}: never a GPU; offer one, if the run wants it; force one; require one, or fail "
        "(default: offer)",
    )
    group.add_argument(
        "--gpu-num",
        metavar="LIST",
        type=text_value,
        help=f"GPU numbers or UUIDs, such as 0,1: {which}",
    )
    amount = group.add_mutually_exclusive_group()
    amount.add_argument(
        "--num-gpus",
        metavar="X",
        type=positive_float,
        help="GPUs of a call: a share of one, such as 0.25, or 1, 2, ... (default: what the task was seen to "
        "need)",
    )
    amount.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        type=text_value,
        help="GPU memory of a call, such as 2GiB, CUDA's own included",
    )
    group.add_argument(
        "--lease-timeout-s",
        metavar="S",
        type=seconds,
        help="seconds a call may wait for its GPU (default: 1800)",
    )
    group.add_argument(
        "--on-oom",
        choices=ON_OOM,
        help="a call that runs out of GPU memory: retry with more of it, then fail; the same, but at last on "
        "the cpu; fail at once (default: retry)",
    )
