"""The options of ``flower-gpu launch``; those about calls are in :mod:`flower_gpu.options`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from flower_gpu import kinds, options
from flower_gpu.apps.app import ConfigValue, FlowerApp, parse_pairs
from flower_gpu.errors import ConfigError
from flower_gpu.gpu.policy import SERVER_KEY, gpu_numbers
from flower_gpu.kinds import (
    ABSOLUTE_PATH,
    COUNT,
    NON_NEGATIVE,
    PAIRS,
    PORT,
    POSITIVE,
    SWITCH,
    TEXT,
    TRUE_OR_FALSE,
    Option,
    flag,
    table_of,
    words,
)
from flower_gpu.options import CALL, CallOptions

DESCRIPTION: Final = """\
Run a Flower app on this machine: a server, N clients and the run, each with its own log file, all of them
stopped at the end. Nothing needs to be configured, and the user's Flower configuration is not touched."""

CLIENTS_PER_ROUND_KEY: Final = "clients-per-round"
NUM_ROUNDS_KEY: Final = "num-server-rounds"

_RUN = "run config"
_HINT = (
    f"add `{SERVER_KEY} = true` to [tool.flwr.app.config] in its pyproject.toml, and context=context to its "
    "GPUClient"
)

#: Options that stand for keys of the app's run config.
RUN_CONFIG: Final[Mapping[str, Option]] = MappingProxyType(
    {
        name: Option(help, kind, group=_RUN, run_config_key=key or name.replace("_", "-"), hint=hint)
        for name, kind, help, key, hint in (
            ("clients_per_round", COUNT, "clients that train in a round", CLIENTS_PER_ROUND_KEY, ""),
            ("rounds", COUNT, "number of rounds", NUM_ROUNDS_KEY, ""),
            ("dataset", TEXT, "data the app trains on", "", ""),
            ("data_dir", ABSOLUTE_PATH, "folder of the data, if it is there already", "", ""),
            ("partition", words("iid", "dirichlet"), "how the data is split between clients", "", ""),
            (
                "dirichlet_alpha",
                POSITIVE,
                "for --partition dirichlet: the smaller, the more the clients differ",
                "",
                "",
            ),
            ("model", TEXT, "model to train", "", ""),
            ("batch_size", COUNT, "batch size", "", ""),
            ("local_epochs", COUNT, "epochs a client trains in a round", "", ""),
            ("learning_rate", POSITIVE, "learning rate", "", ""),
            ("seed", NON_NEGATIVE, "seed of everything random", "", ""),
            (
                "use_gpu",
                TRUE_OR_FALSE,
                "whether the run wants GPUs; nodes have the last word, see --gpu",
                SERVER_KEY,
                _HINT,
            ),
        )
    }
)


@dataclass(frozen=True)
class LaunchOptions:
    """What the user asked for, each value checked on its own."""

    app_dir: Path
    clients: Annotated[
        int | None,
        Option(
            "number of clients (default: the app's num-clients, else 2)",
            COUNT,
            group="federation",
            synonyms=("num_supernodes",),  # as Flower has it
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
            group=_RUN,
            synonyms=("c",),  # as in flwr run
        ),
    ] = field(default_factory=dict)
    fast_start: Annotated[
        bool,
        Option(
            "start Flower's own flwr-clientapp for each message, which imports everything anew",
            SWITCH,
            group="workers",
        ),
    ] = True
    keep_going: Annotated[bool, options.KEEP_GOING] = False
    #: What the user asked for calls; what is left out is up to the environment and the app.
    calls: CallOptions = field(default_factory=CallOptions)
    log_dir: Annotated[Path, options.LOG_DIR] = Path("runs")
    port: Annotated[
        int | None, Option("port of the server on 127.0.0.1 (default: a free one)", PORT, group="output")
    ] = None
    tracker: Annotated[tuple[str, ...], options.TRACKER] = ()
    verbosity: int = 0  # 1 shows the server's log as well, -1 only the result, and errors


_OWN: Final = MappingProxyType(table_of(LaunchOptions))
_DEFAULTS: Final = {name: getattr(LaunchOptions, name, None) for name in _OWN}
_GROUPS: Final = {
    "federation": "",
    _RUN: "Passed on only when given; the app must declare the key, and sets the default.",
    "workers": "A client gets its share of the cores (OMP_NUM_THREADS), unless that variable is set.",
    "GPUs": "Which GPUs calls may use, and what each of them leases there. The app's own values override\n"
    "--num-gpus, --gpu-memory, --lease-timeout-s and --on-oom; --gpu and --gpu-ids override the app.",
    "output": "",
}
_MORE: Final = {
    "gpu": "; it holds for every client and for the server's own calls",
    "gpu_ids": ": the first client uses the first, and so on round and round; the server's own calls may use "
    "all of them (default: every call may)",
}


class _HelpWithAppDefaults(argparse.Action):
    """``--help``; after an app's folder it also shows what that app declares."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show this help and exit")

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        app_dir: Path = getattr(namespace, "app_dir", kinds.HERE)
        try:
            app = FlowerApp.load(app_dir)
        except ConfigError as error:
            if app_dir != kinds.HERE:
                parser.error(str(error))
        else:
            lines = "\n".join(f"  {key} = {value!r}" for key, value in app.run_config.items())
            parser.epilog = f"run config of {app.name} and its defaults:\n{lines or '  (empty)'}"
        parser.print_help()
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``launch`` to a parser."""
    kinds.add_app_folder(parser)
    parser.add_argument("-h", "--help", action=_HelpWithAppDefaults)
    table = {**RUN_CONFIG, **_OWN, **options.options_of("launch")}
    by_group = sorted(table.items(), key=lambda item: [*_GROUPS].index(item[1].group))
    kinds.add_arguments(parser, dict(by_group), _GROUPS, _MORE, _DEFAULTS)


def from_arguments(arguments: argparse.Namespace) -> LaunchOptions:
    """Turn parsed arguments into options.

    Raises ConfigError if ``--run-config``, ``--node-config`` or ``--gpu-ids`` cannot be read.
    """
    values = {name: getattr(arguments, name) for name in _OWN}
    pairs = {
        name: parse_pairs(flag(name), values[name]) for name, option in _OWN.items() if option.kind is PAIRS
    }
    run_config_options = {
        option.run_config_key: value
        for name, option in RUN_CONFIG.items()
        if (value := getattr(arguments, name)) is not None
    }
    return LaunchOptions(
        app_dir=arguments.app_dir,
        **{**values, **pairs, "tracker": tuple(chain(*arguments.tracker))},
        run_config_options=run_config_options,
        calls=given_calls(arguments),
        verbosity=getattr(arguments, "verbosity", 0),
    )


def given_calls(arguments: argparse.Namespace) -> CallOptions:
    """Return the call options of a command line.

    Raises ConfigError if ``--gpu-ids`` is no list of GPUs.
    """
    calls = options.given(arguments)
    gpu_numbers(calls.get("gpu_ids"), flag("gpu_ids"))
    return calls


def check_node_config(calls: CallOptions, node_config: Mapping[str, Any]) -> None:
    """Check that ``--node-config`` does not say again what an option says.

    Raises ConfigError if it does.
    """
    for name in calls:
        key = CALL[name].node_key
        if CALL[name].is_nodes and key in node_config:
            raise ConfigError(f"{flag(name)} and --node-config {key} say the same twice")


def node_config_of(calls: CallOptions, client: int) -> dict[str, ConfigValue]:
    """Return what call options put into a node's config. GPUs are dealt out to the clients."""
    config: dict[str, ConfigValue] = {}
    if "gpu" in calls:
        config["gpu"] = str(calls["gpu"])
    if ids := gpu_numbers(calls.get("gpu_ids"), flag("gpu_ids")):
        config["gpu-ids"] = ids[client % len(ids)]
    return config
