"""A Slurm job that runs ``flower-gpu simulate``: its batch script, its submission, and its log until it ends.

::

    JobPlan ── batch_script ──> sbatch ──> job: simulate on the first node
       (pure functions)           │             with several nodes: Ray, one process tree for each, by srun
                                  ▼
    follow: scontrol, every few seconds: does it wait, run, or has it ended?
            its log, as it grows ──> this terminal

The last command of the script takes the place of the batch shell (``exec``). So Slurm's signals reach the
run itself, and the run's exit status is the job's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from flower_gpu.errors import ConfigError, FlowerGPUError

#: So many seconds before its time limit a job is told to end: then its results are written.
_WARNING_S: Final = 60
_ASK_S: Final = 3.0  # between two questions to Slurm's controller, which all users of a cluster share
_LOOK_S: Final = 0.3  # between two looks at the log
_UNKNOWN_JOB: Final = "Invalid job id"
#: Slurm's words for a job that has ended for good.
_ENDED: Final = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"),
    *("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED"),
}
#: Options of sbatch that would contradict the script, with what to do.
_REFUSED: Final = {
    ("--output", "-o"): "--log-dir says where the log goes",
    ("--error", "-e"): "the log has both, since progress is shown on stderr",
    ("--nodes", "-N"): "give --nodes before the two dashes",
    ("--gpus-per-node",): "give --gpus-per-node before the two dashes",
    ("--array", "-a"): "each job is one run; start several with a loop",
    ("--wrap",): "the script is written by this command",
    ("--wait", "-W"): "the command waits for the job's end without it",
    ("--clusters", "-M"): "run the command on a login node of that cluster",
}

_RESUMES: Final = """\
where=(--log-dir "$logs")
# After a preemption, or the failure of a node, Slurm starts the job again: its newest run goes on.
if ((${SLURM_RESTART_COUNT:-0})); then
  runs=("$logs"/[0-9]*)
  [[ -e ${runs[-1]}/checkpoint/checkpoint.sqlite ]] && where=(--resume "${runs[-1]}")
fi"""
# Not `ray symmetric-run`: it refuses to start on a node where the account has another Ray. At its end it runs
# `ray stop`, which ends all Ray processes of the account there.
_RAY: Final = r"""# Ray on each node, in a step of this job, with which Slurm ends it. Its ports and folder
# are its own, as another job on the node may have a Ray, too. Nobody can use it without the token.
export python ray=$logs/ray RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$logs/ray/token
rm -rf "$ray" && mkdir -p "$ray" && (umask 077 && head -c 33 /dev/urandom | base64 >"$ray/token") || exit
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --export=ALL \
  --kill-on-bad-exit=0 --output="$ray/%t.log" bash -c '
  folder=$(mktemp -d /tmp/ray-XXXXXX) || exit
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
    """What a job is to do.

    Attributes
    ----------
    name : str
        What Slurm's lists call it.
    folder : Path
        The folder in which it is run: relative paths of the options are meant from there.
    python : str
        The interpreter that has this package.
    simulate : sequence of str
        Arguments of ``flower-gpu simulate``, without those that say where the run's folder is.
    log_dir : Path
        Gets the job's log and a folder for its runs.
    resume : Path, optional
        The run that it goes on with.
    nodes : int
        Hosts.
    gpus_per_node : str, optional
        GPUs of each; None leaves that to Slurm.
    sbatch : sequence of str
        Further options of sbatch.
    """

    name: str
    folder: Path
    python: str
    simulate: Sequence[str]
    log_dir: Path
    resume: Path | None = None
    nodes: int = 1
    gpus_per_node: str | None = None
    sbatch: Sequence[str] = ()

    def log(self, job: str) -> Path:
        """Return the log of the job with this id."""
        return self.log_dir / f"slurm-{job}.log"

    def script(self, job: str) -> Path:
        """Return where the script of the job with this id is kept."""
        return self.log_dir / f"slurm-{job}.sh"


def batch_script(plan: JobPlan) -> str:
    """Return the script that sbatch is given.

    Raises
    ------
    ConfigError
        If an option for sbatch contradicts the script, or a path cannot be written into it.
    """
    where = _RESUMES if plan.resume is None else f"where=(--resume {shlex.quote(str(plan.resume))})"
    parts = [
        "\n".join(["#!/bin/bash", *(f"#SBATCH {shlex.join(line)}" for line in directives(plan))]),
        f"cd {shlex.quote(str(plan.folder))} || exit\n"
        f"python={shlex.quote(plan.python)}\n"
        f"logs={shlex.quote(str(plan.log_dir))}/slurm-$SLURM_JOB_ID\n"
        f"{where}",
        *([_RAY] if plan.nodes > 1 else []),
        f'exec "$python" -P -m flower_gpu.cli simulate {shlex.join(plan.simulate)} "${{where[@]}}"',
    ]
    return "\n\n".join(parts) + "\n"


def directives(plan: JobPlan) -> list[list[str]]:
    """Return the options of sbatch, each with its value: what the script needs, and what is given.

    Raises
    ------
    ConfigError
        As :func:`batch_script`.
    """
    if set("%\\\n") & set(str(plan.log_dir)):
        raise ConfigError(
            f"--log-dir {plan.log_dir}: Slurm reads % and \\ in the name of a log as signs of its own; "
            "choose another folder"
        )
    return [
        [f"--job-name={plan.name}"],
        [f"--nodes={plan.nodes}"],
        ["--ntasks-per-node=1"],
        *([[f"--gpus-per-node={plan.gpus_per_node}"]] if plan.gpus_per_node else []),
        [f"--output={plan.log('%j')}"],
        ["--open-mode=append"],  # a job that is started again goes on in the same log
        ["--requeue"],
        [f"--signal=B:TERM@{_WARNING_S}"],
        *sbatch_lines(plan.sbatch),
    ]


def sbatch_lines(options: Sequence[str]) -> list[list[str]]:
    """Return options of sbatch, each with its value.

    Raises
    ------
    ConfigError
        If one of them contradicts the script, or is no option.
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
            raise ConfigError(f"after two dashes there are options of sbatch, and {text!r} is none")
    for name, *_ in lines:
        for (long, *short), what_to_do in _REFUSED.items():
            is_long = name.partition("=")[0] == long
            if is_long or (not name.startswith("--") and name.startswith(tuple(short))):
                raise ConfigError(f"{long} cannot be given to sbatch here: {what_to_do}")
    return lines


def submit(plan: JobPlan) -> str:
    """Submit a job, and keep its script beside its log.

    Returns
    -------
    str
        The job's id.

    Raises
    ------
    ConfigError
        If there is no sbatch, or an option cannot be used.
    FlowerGPUError
        If Slurm does not take the job; what sbatch says of it is on stderr.
    """
    script = os.fsencode(batch_script(plan))
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch is not on PATH: run this where jobs are submitted, such as a login node of the cluster, "
            "or have the batch script shown with --dry-run"
        )
    plan.log_dir.mkdir(parents=True, exist_ok=True)
    # Variables such as SBATCH_OUTPUT go before what a script says, and after a command line.
    command = ["sbatch", "--parsable", *chain(*directives(plan))]
    done = subprocess.run(command, input=script, stdout=subprocess.PIPE, check=False)
    job = done.stdout.decode(errors="replace").strip().partition(";")[0]  # the cluster's name may follow
    if done.returncode or not job.isdecimal():
        raise FlowerGPUError("sbatch did not take the job; what it says is above")
    plan.script(job).write_bytes(script)
    return job


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job.

    Attributes
    ----------
    name : str
        Slurm's word for it, such as RUNNING.
    reason : str
        Why it waits, or has ended.
    nodes : str
        Where it runs.
    restarts : int
        How often it was put back into the queue.
    code, signal : int
        What its script exited with, and which signal ended the script.
    """

    name: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    code: int = 0
    signal: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether the job is over for good."""
        return self.name in _ENDED

    @property
    def exit_status(self) -> int:
        """The exit status, as of a program that was run here; once the job has ended."""
        if self.name == "COMPLETED":
            return 0
        return self.code or (128 + self.signal if self.signal else 1)

    def __str__(self) -> str:
        """Return it in words."""
        restarts = f" (restart {self.restarts})" if self.restarts else ""
        if self.name == "PENDING":
            return f"waits ({self.reason})" if self.reason else "waits"
        if self.name == "RUNNING":
            return f"runs on {self.nodes}{restarts}"
        if self.has_ended and self.exit_status:
            return f"has ended{restarts}: {self.name}, exit status {self.exit_status}"
        return f"has ended{restarts}" if self.has_ended else f"is {self.name}"


def read_state(text: str) -> JobState:
    """Read what ``scontrol show job`` says of one job."""
    # Each pattern begins with a line: a job's name or comment may hold anything else.
    patterns = (
        r"^ +JobState=(\S+) Reason=(\S+)",
        r"^ +NodeList=(\S+)",
        r"^ +Requeue=\S+ Restarts=(\d+) .*ExitCode=(\d+):(\d+)",
    )
    found = [re.search(pattern, text, re.MULTILINE) for pattern in patterns]
    state, nodes, ends = (match.groups() if match else None for match in found)
    name, reason = state or ("UNKNOWN", "")
    return JobState(
        name, "" if reason == "None" else reason, nodes[0] if nodes else "", *map(int, ends or ())
    )


def job_state(job: str) -> JobState | None:
    """Ask Slurm about a job; None where it does not answer.

    Raises
    ------
    FlowerGPUError
        If Slurm knows the job no more.
    """
    done = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False)
    if _UNKNOWN_JOB in done.stderr:
        raise FlowerGPUError(
            f"Slurm has forgotten job {job}, so how it ended is not known; `sacct -j {job}` may tell"
        )
    return read_state(done.stdout) if done.returncode == 0 else None


def follow(job: str, log: Path, show: Callable[[bytes], object], tell: Callable[[str], object]) -> JobState:
    """Show the log of a job as it grows, until the job has ended.

    Parameters
    ----------
    job : str
        Its id.
    log : Path
        Its log.
    show : callable
        Gets what is new in the log.
    tell : callable
        Gets a line when the job begins to wait, or to run.

    Returns
    -------
    JobState
        How it ended.

    Raises
    ------
    FlowerGPUError
        If Slurm knows the job no more.
    """
    told, ask_at, position = "", 0.0, 0
    state: JobState | None = None
    while True:
        if time.monotonic() >= ask_at:
            state = job_state(job)
            ask_at = time.monotonic() + _ASK_S
        # After the question: so the log of a job that has ended is whole.
        position = _shown(log, position, show)
        if state is not None and state.has_ended:
            return state
        text = "is out of sight: Slurm does not answer, and is asked again" if state is None else str(state)
        if text != told:
            tell(f"job {job} {text}")
            told = text
        time.sleep(_LOOK_S)


def _shown(log: Path, position: int, show: Callable[[bytes], object]) -> int:
    """Show what a log has after a position; return the position of its end."""
    try:
        file = log.open("rb")
    except FileNotFoundError:  # the job waits
        return position
    with file:
        file.seek(position)
        while part := file.read(1 << 20):
            show(part)
        return file.tell()
