"""The batch scripts of docs/how-to/slurm.md, with programs that stand in for Slurm, Ray and `flower-gpu`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from how_to_pages import blocks
from waiting import until

SCRIPTS = [text for text in blocks("slurm.md", "bash") if "flower-gpu simulate" in text and "#!" in text]
PROGRAMS = {
    # Notes its arguments. It runs until SIGTERM if there is a file "long", as a run does that takes hours.
    "flower-gpu": """
echo "$*" >>arguments
trap 'echo ended >>arguments; exit 143' TERM
touch started
while [[ -e long ]]; do sleep 0.1; done
[[ ! -e fails ]]
""",
    "scontrol": 'echo "$*" >>requeued',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": '[[ $1 == symmetric-run ]] || exit 0; until [[ $1 == -- ]]; do shift; done; shift; "$@"',
}
RUN = "runs/slurm-17/2026-01-31_12-00-00"


@pytest.fixture(params=SCRIPTS, ids=["one node", "several nodes"])
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A batch script of the page, in a folder of its own, with the programs."""
    for name, code in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}")
        (tmp_path / name).chmod(0o755)
    path = tmp_path / "simulate.sh"
    path.write_text(request.param)
    return path


def checkpoint(script: Path) -> None:
    path = script.parent / RUN / "checkpoint" / "checkpoint.json"
    path.parent.mkdir(parents=True)
    path.touch()


def lines(script: Path, name: str) -> list[str]:
    path = script.parent / name
    return path.read_text().splitlines() if path.exists() else []


@contextmanager
def started(script: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the job as Slurm does."""
    path = os.pathsep.join([str(script.parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}
    command = ["bash", str(script), "--rounds", "5"]
    with subprocess.Popen(command, cwd=script.parent, env=env, start_new_session=True) as job:
        try:
            yield job
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)


def test_the_page_has_a_script_for_one_node_and_one_for_several() -> None:
    assert [text.count("ray symmetric-run") for text in SCRIPTS] == [0, 1]


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_job_without_a_checkpoint_begins_a_run(script: Path, has_folder: bool) -> None:
    """A run that ended in its first round has a folder, but no checkpoint."""
    if has_folder:
        (script.parent / RUN).mkdir(parents=True)
    with started(script) as job:
        assert job.wait(60) == 0
    (arguments,) = lines(script, "arguments")
    assert arguments.startswith("simulate my-app --clients ")
    assert arguments.endswith(" --log-dir runs/slurm-17 --rounds 5")


def test_a_requeued_job_resumes_its_run(script: Path) -> None:
    checkpoint(script)
    with started(script) as job:
        assert job.wait(60) == 0
    assert lines(script, "arguments")[0].endswith(f" --resume {RUN} --rounds 5")


def test_a_run_that_fails_fails_the_job(script: Path) -> None:
    (script.parent / "fails").touch()
    with started(script) as job:
        assert job.wait(60) == 1
    assert not lines(script, "requeued")


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_near_its_time_limit_a_job_is_requeued_if_it_can_resume(script: Path, has_checkpoint: bool) -> None:
    (script.parent / "long").touch()
    with started(script) as job:
        until((script.parent / "started").exists, "the run has started")
        if has_checkpoint:
            checkpoint(script)
        job.send_signal(signal.SIGUSR1)
        job.wait(60)
    assert lines(script, "arguments")[1:] == ["ended"]
    assert lines(script, "requeued") == (["requeue 17"] if has_checkpoint else [])


def test_a_cancelled_job_waits_for_its_run(script: Path) -> None:
    (script.parent / "long").touch()
    checkpoint(script)
    with started(script) as job:
        until((script.parent / "started").exists, "the run has started")
        os.killpg(job.pid, signal.SIGTERM)  # as Slurm does: all processes of the job get it
        assert job.wait(60) != 0
        until(lambda: lines(script, "arguments")[1:] == ["ended"], "the run has ended")
    assert not lines(script, "requeued")
