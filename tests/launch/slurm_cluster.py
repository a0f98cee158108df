"""A Slurm cluster of its own for a test: munged, slurmctld, and a slurmd for each node, all on loopback.

The nodes are two names of this host. Debian's packages are `slurm-wlm` and `munge`.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from run_programs import run
from waiting import until

from flower_gpu.launch.ports import HOST, free_ports

NODES = ("one", "two")
CORES = 4  # of each node, however many this host has
GPUS = ("/dev/null", "/dev/zero")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
MISSING = [name for name in ("sbatch", "slurmctld", "slurmd", "munged") if not shutil.which(name, path=_PATH)]

_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=localhost({host})
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
PlugStackConfig={folder}/plugstack.conf
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/builtin
SchedulerParameters=sched_min_interval=10000
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES
"""
_NODE = "NodeName={name} NodeHostname=localhost NodeAddr={host} Port={port} CPUs={cores} Gres=gpu:{gpus}"


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """By which Slurm's commands find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}

    def __call__(self, *command: str) -> str:
        """Return what one of Slurm's commands prints."""
        done = run(command, env={**os.environ, **self.env})
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def states(self, *columns: str) -> list[str]:
        """Return what squeue says of all jobs that have not ended."""
        return self("squeue", "--noheader", f"--format={' '.join(columns) or '%T'}").split("\n")[:-1]


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster; its jobs are cancelled at the end, and its processes ended."""
    folder.chmod(0o755)
    control, *ports = free_ports(1 + len(NODES))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    (folder / "plugstack.conf").touch()
    # Slurm only wants devices; no job opens them.
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in GPUS))
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    nodes = "\n".join(
        _NODE.format(name=node, host=HOST, port=port, cores=CORES, gpus=len(GPUS))
        for node, port in zip(NODES, ports, strict=True)
    )
    configuration = _CONFIGURATION.format(
        host=HOST, port=control, folder=folder, user=getpass.getuser(), nodes=nodes
    )
    (folder / "slurm.conf").write_text(configuration)
    found = Cluster(folder)
    munge = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "pid-file", "seed-file")
    ]
    munge += [f"--socket={folder}/munge.socket", f"--log-file={folder}/munge.log", "--force", "--foreground"]
    with ExitStack() as stack:
        for command in (
            ["munged", *munge],
            ["slurmctld", "-D"],
            *(["slurmd", "-D", "-N", node] for node in NODES),
        ):
            stack.enter_context(_running(command, found))
            if command[0] == "munged":
                until((folder / "munge.socket").exists, "munged listens", 30)
        until(lambda: _idle(found) == len(NODES), f"all nodes are idle, see {folder}", 20)
        try:
            yield found
        finally:
            found("scancel", f"--user={getpass.getuser()}")
            until(lambda: not found.states(), "all jobs have ended", 60)


def _idle(found: Cluster) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = run(command, env={**os.environ, **found.env})
    return done.stdout.split().count("idle")


@contextmanager
def _running(command: list[str], found: Cluster) -> Iterator[None]:
    with (
        (found.folder / f"{command[0]}-{command[-1]}.out").open("w") as output,
        subprocess.Popen(
            command, env={**os.environ, **found.env}, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
