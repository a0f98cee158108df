"""The options of ``flower-gpu launch``. Options of calls are in :mod:`flower_gpu.options`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from flower_gpu import options
from flower_gpu.apps.app import NUM_ROUNDS_KEY, ConfigValue
from flower_gpu.errors import ConfigError
from flower_gpu.kinds import (
    ABSOLUTE_PATH,
    COUNT,
    NON_NEGATIVE,
    PAIRS,
    POSITIVE,
    SWITCH,
    TEXT,
    Kind,
    words,
)
from flower_gpu.options import CALL, USE_GPU, CallOptions, Option, flag, table_of

CLIENTS_PER_ROUND_KEY: Final = "clients-per-round"

#: Heading of the options that stand for keys of the run config.
RUN_CONFIG_GROUP: Final = "run config"
_HINT = (
    f"add `{USE_GPU.run_config_key} = true` to [tool.flwr.app.config] in its pyproject.toml, and "
    "context=context to its GPUClient"
)


def _key(help: str, kind: Kind) -> Option:
    return Option(help, kind, group=RUN_CONFIG_GROUP)


#: Options that stand for keys of the app's run config.
RUN_CONFIG: Final[Mapping[str, Option]] = MappingProxyType(
    {
        name: replace(option, run_config_key=option.run_config_key or name.replace("_", "-"))
        for name, option in {
            "clients_per_round": _key("clients that train in a round", COUNT),
            "rounds": replace(_key("number of rounds", COUNT), run_config_key=NUM_ROUNDS_KEY),
            "dataset": _key("data the app trains on", TEXT),
            "data_dir": _key("folder of the data, if it already exists", ABSOLUTE_PATH),
            "partition": _key("how the data is split between clients", words("iid", "dirichlet")),
            "dirichlet_alpha": _key(
                "for --partition dirichlet: the smaller, the more the clients differ", POSITIVE
            ),
            "model": _key("model to train", TEXT),
            "batch_size": _key("batch size", COUNT),
            "local_epochs": _key("epochs a client trains in a round", COUNT),
            "learning_rate": _key("learning rate", POSITIVE),
            "seed": _key("seed of all random numbers", NON_NEGATIVE),
            "use_gpu": replace(USE_GPU, group=RUN_CONFIG_GROUP, hint=_HINT),
        }.items()
    }
)


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a launch. Each value has been checked by itself, but not against the app or this host."""

    app_dir: Path
    clients: Annotated[
        int | None,
        Option(
            "number of clients (default: the app's num-clients, or 2; with --resume, the earlier number)",
            COUNT,
            group="federation",
            synonyms=("num_supernodes",),  # Flower's name
        ),
    ] = None
    node_config: Annotated[
        Mapping[str, ConfigValue],
        Option(
            "further keys of every node's config (TOML values; may be repeated)", PAIRS, group="federation"
        ),
    ] = field(default_factory=dict)
    #: Values of the options in RUN_CONFIG, by the keys of the run config.
    run_config_options: Mapping[str, ConfigValue] = field(default_factory=dict)
    run_config: Annotated[
        Mapping[str, ConfigValue],
        Option(
            "any keys of the app's run config (TOML values; may be repeated)",
            PAIRS,
            group=RUN_CONFIG_GROUP,
            synonyms=("c",),  # name in flwr run
        ),
    ] = field(default_factory=dict)
    fast_start: Annotated[
        bool,
        Option(
            "start Flower's own flwr-clientapp for each message, which imports everything again",
            SWITCH,
            group="workers",
        ),
    ] = True
    keep_going: Annotated[bool, options.KEEP_GOING] = False
    #: Options of calls. For missing options, the environment and the app decide.
    calls: CallOptions = field(default_factory=CallOptions)
    log_dir: Annotated[Path, replace(options.LOG_DIR, excludes="resume")] = options.LOG_DIR.default_value
    resume: Annotated[Path | None, options.RESUME] = None
    tracker: Annotated[tuple[str, ...], options.TRACKER] = ()
    verbosity: int = 0  # 1 also shows the server's log; -1 shows only the result and errors


#: The options of :class:`LaunchOptions`, by their names.
LAUNCH_OPTIONS: Final = MappingProxyType(table_of(LaunchOptions))


def check_node_config(calls: CallOptions, node_config: Mapping[str, Any]) -> None:
    """Check that ``--node-config`` does not repeat an option. Raises ConfigError if it does."""
    for name in calls:
        key = CALL[name].node_key
        if CALL[name].is_nodes and key in node_config:
            raise ConfigError(
                f"{flag(name)} and --node-config {key} give the same setting twice: leave one out"
            )


def node_config_of(calls: CallOptions, client: int) -> dict[str, ConfigValue]:
    """Return the node config of a client from call options. Clients get the GPUs in turn."""
    config: dict[str, ConfigValue] = {}
    if "gpu" in calls:
        config["gpu"] = str(calls["gpu"])
    if ids := CALL["gpu_ids"].resolve(calls.get("gpu_ids")):
        config["gpu-ids"] = ids[client % len(ids)]
    return config
