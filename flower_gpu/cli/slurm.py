"""``flower-gpu slurm``: a simulation as a job of a Slurm cluster."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from flower_gpu import kinds
from flower_gpu.apps.app import FlowerApp
from flower_gpu.apps.folder import check_log_dir, short
from flower_gpu.cli import simulate
from flower_gpu.cli.verbosity import is_quiet, verbosity
from flower_gpu.errors import ConfigError
from flower_gpu.kinds import COUNT, SWITCH, Kind, Option
from flower_gpu.launch import slurm

NAME: Final = "slurm"
HELP = "run a simulation as a job of a Slurm cluster"
AFTER_DASHES: Final = "sbatch"  # whose options stand there
DESCRIPTION = """\
Have Slurm run `flower-gpu simulate`: write the batch script, submit it, and say how to follow the job. It
takes the options of simulate. What stands after two dashes are options of sbatch.

    flower-gpu slurm my-app --nodes 4 --gpus-per-node 2 --clients 10000 -- --time 8:00:00 --partition gpu

A job that is preempted waits in the queue again, and goes on after the last round that it has finished. Log,
batch script and results are left in --log-dir."""

_GPUS: Final = Kind(
    "a number of GPUs, 1 or more, also with their kind, such as 2 or a100:2",
    "[KIND:]N",
    allows=lambda text: re.fullmatch(r"([\w.-]+:)?[1-9]\d{0,5}", text) is not None,
)
_GROUP: Final = "Slurm"
#: The command's own options, beside those of ``simulate``.
OPTIONS: Final = {
    "nodes": Option(
        "how many nodes; the job starts Ray on them if they are several (default: 1)",
        COUNT,
        group=_GROUP,
    ),
    "gpus_per_node": Option(
        "how many GPUs to ask for on each node, also with their kind, such as a100:2 (default: none)",
        _GPUS,
        group=_GROUP,
    ),
    "dry_run": Option("show the batch script, and submit nothing", SWITCH, group=_GROUP),
}
_DEFAULTS: Final = {"nodes": 1}
#: What the script itself says to ``simulate``, and what is no option.
_OF_THE_SCRIPT: Final = ("app_dir", "log_dir", "resume", "ray_address")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into its own arguments, and what follows two dashes if this is the command.

    argparse takes a word after two dashes for APP_DIR.
    """
    ours = list(takewhile(lambda text: text != "--", argv))
    is_this = next((text for text in ours if not text.startswith("-")), None) == NAME
    return (ours, list(argv[len(ours) + 1 :])) if is_this else (list(argv), [])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    kinds.add_arguments(parser, OPTIONS, defaults=_DEFAULTS)
    simulate.add_arguments(parser)
    for action in parser._actions:
        if action.dest == "ray_address":
            action.help = argparse.SUPPRESS
    parser.set_defaults(sbatch=[])  # what follows two dashes


def run(arguments: argparse.Namespace) -> int:
    """Submit the job; print its id, and how to follow it.

    Returns 0; the job has its own exit status.
    Raises ConfigError if an option cannot be used, or there is no sbatch; nothing was submitted.
    Raises FlowerGPUError if Slurm does not take the job.
    """
    plan = _plan(arguments)
    if arguments.dry_run:
        print(slurm.batch_script(plan), end="")
        return 0
    job = slurm.submit(plan)
    print(job)
    if not is_quiet(arguments):
        print(how_to_follow(job, plan), file=sys.stderr)
    return 0


def how_to_follow(job: str, plan: slurm.JobPlan) -> str:
    """Return the commands that show what becomes of a job."""
    log = short(plan.log(job))
    runs = short(plan.log(job).with_suffix(""))
    commands = {
        f"squeue -j {job}": "whether it waits or runs",
        f"tail -n +1 -F {log}": "its log",
        f"flower-gpu top {runs}/[0-9]*": "its rounds and clients, once it runs",
        f"scancel {job}": "ends it",
    }
    width = max(map(len, commands))
    lines = (f"  {command:<{width}}  {what}" for command, what in commands.items())
    return "\n".join([f"flower-gpu slurm: job {job} is submitted", *lines])


def _plan(arguments: argparse.Namespace) -> slurm.JobPlan:
    """Return the job, if what can be known here of its options lets it start."""
    app = FlowerApp.load(arguments.app_dir)
    given = simulate.given_run_config(arguments.run_config)
    if arguments.num_supernodes is not None:
        app.simulated(given, arguments.num_supernodes)
    elif arguments.resume is None:
        raise ConfigError(
            "--num-supernodes N (or --clients N) is missing: how many virtual clients are there?"
        )
    if arguments.resume is not None and not arguments.resume.is_dir():
        raise ConfigError(f"--resume {arguments.resume}: there is no such folder")
    if getattr(arguments, "ray_address", None) is not None:
        raise ConfigError("--ray-address is that of the job's own Ray: leave it out")
    if arguments.nodes > 1 and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"--nodes {arguments.nodes} needs Ray, which is not installed: pip install 'flower-gpu[cluster]'"
        )
    check_log_dir(arguments.log_dir)
    return slurm.JobPlan(
        app.name,
        Path.cwd(),
        sys.executable,
        [str(arguments.app_dir), *given_options(arguments)],
        arguments.log_dir.absolute(),
        arguments.resume,
        arguments.nodes,
        arguments.gpus_per_node,
        arguments.sbatch,
    )


def given_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options of ``simulate`` that were given, as its command line has them."""
    parser = argparse.ArgumentParser(add_help=False)
    simulate.add_arguments(parser)
    options = [{1: "--verbose", -1: "--quiet"}.get(verbosity(arguments), "")]
    for action in parser._actions:
        if action.dest not in _OF_THE_SCRIPT:
            options += _written(action, getattr(arguments, action.dest))
    return [option for option in options if option]


def _written(action: argparse.Action, value: Any) -> Iterator[str]:
    if value == action.default:
        return
    name = max(action.option_strings, key=len)
    if action.nargs == 0:
        yield name
        return
    for each in value if isinstance(value, list) else [value]:
        yield f"{name}={','.join(each) if isinstance(each, tuple) else each}"
