"""``flower-gpu launch``: a Flower app with several clients on this machine."""

from __future__ import annotations

import argparse
from itertools import chain
from typing import Final

from flower_gpu.apps.app import parse_pairs
from flower_gpu.cli.arguments import Command, given_calls, verbosity
from flower_gpu.kinds import PAIRS
from flower_gpu.launch.options import LAUNCH_OPTIONS, RUN_CONFIG, RUN_CONFIG_GROUP, LaunchOptions
from flower_gpu.options import flag, options_of

_GROUPS: Final = {
    "federation": "",
    RUN_CONFIG_GROUP: "Passed on only when given; the app must declare the key, and sets the default.",
    "workers": "A client gets its share of the cores (OMP_NUM_THREADS), unless that variable is set.",
    "GPUs": "Which GPUs calls may use, and how much each leases there. The app's own values override\n"
    "--num-gpus, --gpu-memory, --lease-timeout-s and --on-oom; --gpu and --gpu-ids override the app.",
    "output": "",
}
_MORE: Final = {
    "gpu": "; it holds for every client and for the server's own calls",
    "gpu_ids": ": the first client uses the first, and so on in turn; the server's own calls may use "
    "all of them (default: every call may)",
}
_TABLE: Final = {**RUN_CONFIG, **LAUNCH_OPTIONS, **options_of("launch")}


def from_arguments(arguments: argparse.Namespace) -> LaunchOptions:
    """Turn parsed arguments into options.

    Raises ConfigError if ``--run-config`` or ``--node-config`` cannot be read.
    """
    values = {name: getattr(arguments, name) for name in LAUNCH_OPTIONS}
    pairs = {
        name: parse_pairs(flag(name), values[name])
        for name, option in LAUNCH_OPTIONS.items()
        if option.kind is PAIRS
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
        verbosity=verbosity(arguments),
    )


def _run(arguments: argparse.Namespace) -> int:
    options = from_arguments(arguments)
    from flower_gpu.launch import run

    return run.launch(options)


COMMAND: Final = Command(
    "run a Flower app with several clients on this machine",
    """\
Run a Flower app on this machine: a server, N clients and the run, each with its own log file, all of them
stopped at the end. Nothing needs to be configured, and the user's Flower configuration is not touched.""",
    _run,
    dict(sorted(_TABLE.items(), key=lambda item: [*_GROUPS].index(item[1].group))),
    _GROUPS,
    _MORE,
    takes_app=True,
    outlives_output=True,
)
