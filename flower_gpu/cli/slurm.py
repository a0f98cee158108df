"""``flower-gpu slurm``: writes and submits a Slurm job that runs ``flower-gpu simulate``.

::

    options ──> JobPlan ── batch_script ──> sbatch ──> job: simulate on the first node
                           (pure functions)                 with several nodes: srun starts Ray on each node

The last command of the script replaces the batch shell (``exec``). So Slurm's signals reach the run, and the
exit status of the run is the exit status of the job.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Final

from flower_gpu.apps.app import FlowerApp
from flower_gpu.apps.folder import check_log_dir, short
from flower_gpu.cli import simulate
from flower_gpu.cli.arguments import Command, add_options, is_quiet
from flower_gpu.errors import ConfigError, FlowerGPUError
from flower_gpu.kinds import COUNT, SWITCH, Kind
from flower_gpu.options import Option

NAME: Final = "slurm"

_GPUS: Final = Kind(
    "a number of GPUs, 1 or more, also with their kind, such as 2 or a100:2",
    "[KIND:]N",
    allows=lambda text: re.fullmatch(r"([\w.-]+:)?[1-9]\d{0,5}", text) is not None,
)
_GROUP: Final = "Slurm"
#: Options of this command that ``simulate`` does not have.
OPTIONS: Final = {
    "nodes": Option(
        "how many nodes; the job starts Ray on them if they are several (default: {default})",
        COUNT,
        default=1,
        group=_GROUP,
    ),
    "gpus_per_node": Option(
        "how many GPUs to ask for on each node, also with their kind, such as a100:2 (default: none)",
        _GPUS,
        group=_GROUP,
    ),
    "dry_run": Option("show the batch script, and submit nothing", SWITCH, group=_GROUP),
}
#: Options of ``simulate``. The address of Ray is left out, because the job starts its own Ray.
_OF_SIMULATE: Final = {
    name: option for name, option in simulate.COMMAND.options.items() if name != "ray_address"
}
#: Options that the script passes to ``simulate`` itself.
_OF_THE_SCRIPT: Final = ("log_dir", "resume")

#: Seconds between the signal to end and the time limit of a job, in which the job writes its results.
_WARNING_S: Final = 60
#: Options of sbatch that would contradict the script, with advice for the user.
_REFUSED: Final = {
    ("--output", "-o"): "--log-dir says where the log goes",
    ("--error", "-e"): "the log has both, since progress is shown on stderr",
    ("--nodes", "-N"): "give --nodes before the two dashes",
    ("--gpus-per-node",): "give --gpus-per-node before the two dashes",
    ("--array", "-a"): "each job is one run; start several with a loop",
}

_RESUMES: Final = """\
where=(--log-dir "$logs")
# After a preemption, or the failure of a node, Slurm starts the job again: its newest run goes on.
if ((${SLURM_RESTART_COUNT:-0})); then
  runs=("$logs"/[0-9]*)
  [[ -e ${runs[-1]}/checkpoint/checkpoint.json ]] && where=(--resume "${runs[-1]}")
fi"""
# `ray symmetric-run` is not used: it refuses to start on a node where the account runs another Ray. At its
# end, it runs `ray stop`, which ends all Ray processes of the account on the node.
_RAY: Final = r"""# Ray on each node, in a step of this job, with which Slurm ends it. Its ports and folder
# are its own, as another job on the node may have a Ray, too. Nobody can use it without the token.
export python ray=$logs/ray RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$logs/ray/token
rm -rf "$ray" && mkdir -p "$ray" && (umask 077 && head -c 33 /dev/urandom | base64 >"$ray/token") || exit
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --export=ALL \
  --kill-on-bad-exit=0 --output="$ray/%t.log" bash -c '
  # Locked by all processes of the step. Those of killed steps are locked by nobody, and go.
  for old in /tmp/ray-$UID-*; do
    [[ ! -O $old ]] || { flock --nonblock 8 && rm -rf "$old"; } 8<"$old"
  done
  folder=
  until [[ -n $folder && -e $folder ]]; do
    folder=$(mktemp -d "/tmp/ray-$UID-XXXXXX") || exit
    exec 9<"$folder" && flock --nonblock 9  # else another job has removed it before it was locked
  done
  trap "rm -rf $folder" EXIT
  trap exit TERM
  port=$("$python" -c "import socket; s = socket.socket(); s.bind((str(), 0)); print(s.getsockname()[1])")
  options=(--block --temp-dir="$folder" --num-cpus=0 --num-gpus=0 --include-log-monitor=false)
  options+=(--dashboard-agent-listen-port=0 --ray-client-server-port="$port")
  if ((SLURM_PROCID)); then
    until [[ -s $ray/started-0 ]]; do sleep 0.5; done
    options+=(--address="$(<"$ray/started-0")")
  else
    options+=(--head --port=0 --include-dashboard=false --no-monitor)
  fi
  { until [[ -s $folder/ray_current_cluster ]]; do kill -0 $$ 2>/dev/null && sleep 0.2 || exit; done
    cp "$folder/ray_current_cluster" "$ray/new-$SLURM_PROCID"
    mv "$ray/new-$SLURM_PROCID" "$ray/started-$SLURM_PROCID"; } &
  "$python" -P -m ray.scripts.scripts start "${options[@]}"
  touch "$ray/ended-$SLURM_PROCID"
' 2>"$ray/srun.log" &
# Wait for all nodes. One that is very late joins the run.
for ((looks = 0; looks < 240; looks++)); do
  started=("$ray"/started-*)
  ((${#started[@]} < SLURM_NNODES)) && [[ ! -e $ray/ended-0 ]] && kill -0 $! 2>/dev/null || break
  sleep 0.5
done
if [[ ! -s $ray/started-0 || -e $ray/ended-0 ]]; then
  echo "Ray was not started:" >&2
  cat "$ray"/*.log >&2
  exit 1
fi
where+=(--ray-address="$(<"$ray/started-0")")"""


@dataclass(frozen=True)
class JobPlan:
    """Description of a job, from which its script is made."""

    name: str  # name of the job in Slurm's lists
    folder: Path  # working directory, to which relative paths in options refer
    python: str  # path of the interpreter that has this package
    simulate: Sequence[str]  # arguments of `simulate`, without the options about the run's folder
    log_dir: Path  # folder of the job's log, and of a folder for its runs
    resume: Path | None = None  # folder of the run to resume
    nodes: int = 1  # number of nodes
    gpus_per_node: str | None = None  # number of GPUs, also with their kind; None for Slurm's default
    sbatch: Sequence[str] = ()  # further options of sbatch

    def log(self, job: str) -> Path:
        """Return the path of the log of the job with this id. Its script is in the same folder."""
        return self.log_dir / f"slurm-{job}.log"


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our arguments of a command line, and the arguments for sbatch, which follow two dashes.

    Only a command line of this command is split. argparse cannot do it, because it would use a word after two
    dashes as APP_DIR.
    """
    ours = list(takewhile(lambda text: text != "--", argv))
    is_this = next((text for text in ours if not text.startswith("-")), None) == NAME
    return (ours, list(argv[len(ours) + 1 :])) if is_this else (list(argv), [])


def run(arguments: argparse.Namespace) -> int:
    """Submit the job, print its id and the commands to follow it, and return 0.

    The exit status of the job is not known here.

    Raises ConfigError if an option cannot be used, or sbatch is not installed. Nothing is submitted then.
    Raises FlowerGPUError if Slurm refuses the job.
    """
    plan = _plan(arguments)
    if arguments.dry_run:
        print(batch_script(plan), end="")
        return 0
    job = submit(plan)
    print(job)
    if not is_quiet(arguments):
        print(how_to_follow(job, plan), file=sys.stderr)
    return 0


def how_to_follow(job: str, plan: JobPlan) -> str:
    """Return a text with the commands to follow a job."""
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


def _plan(arguments: argparse.Namespace) -> JobPlan:
    """Return the plan of the job. Checks its options as far as this host allows."""
    app = FlowerApp.load(arguments.app_dir)
    run_config = simulate.given_run_config(arguments.run_config)
    if arguments.num_supernodes is not None:
        app.overrides(run_config, arguments.num_supernodes)
    elif arguments.resume is None:
        raise ConfigError(
            "--num-supernodes N (or --clients N) is missing: how many virtual clients are there?"
        )
    if arguments.resume is not None and not arguments.resume.is_dir():
        raise ConfigError(
            f"--resume {arguments.resume}: there is no such folder. Name the folder of an earlier run"
        )
    if arguments.nodes > 1 and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"--nodes {arguments.nodes} needs Ray, which is not installed: pip install 'flower-gpu[cluster]'"
        )
    check_log_dir(arguments.log_dir)
    return JobPlan(
        app.name,
        Path.cwd(),
        sys.executable,
        for_simulate(arguments.words),
        arguments.log_dir.absolute(),
        arguments.resume,
        arguments.nodes,
        arguments.gpus_per_node,
        arguments.sbatch,  # the arguments after two dashes
    )


def for_simulate(words: Sequence[str]) -> list[str]:
    """Return the arguments that ``simulate`` gets unchanged. The script contains the others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(parser, {**OPTIONS, **{name: _OF_SIMULATE[name] for name in _OF_THE_SCRIPT}})
    _, rest = parser.parse_known_args(list(words))
    rest.remove(NAME)
    return rest


def batch_script(plan: JobPlan) -> str:
    """Return the script for sbatch.

    Raises ConfigError if an option for sbatch contradicts the script, or if a path cannot be used in it.
    """
    where = _RESUMES if plan.resume is None else f"where=(--resume {shlex.quote(str(plan.resume))})"
    parts = [
        "\n".join(["#!/bin/bash", *(f"#SBATCH {shlex.join(line)}" for line in _directives(plan))]),
        f"cd {shlex.quote(str(plan.folder))} || exit\n"
        f"python={shlex.quote(plan.python)}\n"
        f"logs={shlex.quote(str(plan.log_dir))}/slurm-$SLURM_JOB_ID\n"
        f"{where}",
        *([_RAY] if plan.nodes > 1 else []),
        f'exec "$python" -P -m flower_gpu.cli simulate {shlex.join(plan.simulate)} "${{where[@]}}"',
    ]
    return "\n\n".join(parts) + "\n"


def _directives(plan: JobPlan) -> list[list[str]]:
    """Return the options of sbatch with their values: the script's options first, then the user's."""
    if set("%\\\n") & set(str(plan.log_dir)):
        raise ConfigError(
            f"--log-dir {plan.log_dir}: % and \\ in the name of a log have a meaning for Slurm. "
            "Choose another folder"
        )
    return [
        [f"--job-name={plan.name}"],
        [f"--nodes={plan.nodes}"],
        ["--ntasks-per-node=1"],
        *([[f"--gpus-per-node={plan.gpus_per_node}"]] if plan.gpus_per_node else []),
        [f"--output={plan.log('%j')}"],
        ["--open-mode=append"],  # A requeued job appends to its log.
        ["--requeue"],
        [f"--signal=B:TERM@{_WARNING_S}"],
        *sbatch_lines(plan.sbatch),
    ]


def sbatch_lines(options: Sequence[str]) -> list[list[str]]:
    """Return the user's options of sbatch, each with its value.

    Raises ConfigError if an option contradicts the script, or if a text is not an option.
    """
    lines: list[list[str]] = []
    for text in options:
        if "\n" in text:
            raise ConfigError(f"sbatch takes no line break in an option: {text!r}")
        if text.startswith("-"):
            lines.append([text])
        elif lines:
            lines[-1].append(text)
        else:
            raise ConfigError(f"{text!r} is not an option of sbatch; only those can follow the two dashes")
    for name, *_ in lines:
        for (long, *letters), what_to_do in _REFUSED.items():
            is_long = name.partition("=")[0] == long
            if is_long or (not name.startswith("--") and name.startswith(tuple(letters))):
                raise ConfigError(f"{long} cannot be given to sbatch here: {what_to_do}")
    return lines


def submit(plan: JobPlan) -> str:
    """Submit a job, and return its id. Writes the script to the folder of the log.

    Raises ConfigError if sbatch is not installed, or an option cannot be used.
    Raises FlowerGPUError if Slurm refuses the job. The message of sbatch is on stderr.
    """
    script = os.fsencode(batch_script(plan))
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch is not on PATH. Run this on a login node of the cluster, or show the batch script with "
            "--dry-run"
        )
    plan.log_dir.mkdir(parents=True, exist_ok=True)
    # Variables such as SBATCH_OUTPUT override options in a script, but not options on the command line.
    command = ["sbatch", "--parsable", *chain(*_directives(plan))]
    done = subprocess.run(command, input=script, stdout=subprocess.PIPE, check=False)
    job = done.stdout.decode(errors="replace").strip().partition(";")[0]  # The cluster's name may follow.
    if done.returncode or not job.isdecimal():
        raise FlowerGPUError("sbatch refused the job; its message is above")
    plan.log(job).with_suffix(".sh").write_bytes(script)
    return job


COMMAND: Final = Command(
    "run a simulation as a job of a Slurm cluster",
    """\
Have Slurm run `flower-gpu simulate`: write the batch script, submit it, and say how to follow the job. It
takes the options of simulate, and options of sbatch after two dashes.

    flower-gpu slurm my-app --nodes 4 --gpus-per-node 2 --clients 10000 -- --time 8:00:00 --partition gpu

A job that is preempted waits in the queue again, and goes on after its last finished round. Log,
batch script and results are left in --log-dir.""",
    run,
    {**OPTIONS, **_OF_SIMULATE},
    simulate.COMMAND.groups,
    simulate.COMMAND.more,
    takes_app=True,
    after_dashes="sbatch",
)
