"""``flower-gpu slurm`` without a Slurm: what it refuses, its script, and how a job is submitted."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import run_programs

from flower_gpu.cli import main as cli
from flower_gpu.cli import slurm as command
from flower_gpu.cli.slurm import JobPlan, batch_script, sbatch_lines
from flower_gpu.flower.resuming.checkpoint import INDEX_NAME

APPS = Path(__file__).parents[1] / "simulation" / "apps"
APP = str(APPS / "plain")
FIRST, SECOND = "2026-01-01_00-00-00", "2026-01-01_00-00-00-2"


def plan(folder: Path, **fields: object) -> JobPlan:
    return JobPlan("plain", folder, sys.executable, ["app", "--num-supernodes=3"], folder / "runs", **fields)  # type: ignore[arg-type]


# The command line


@pytest.mark.parametrize(
    ("typed", "of_job"),
    [
        ("slurm app --clients 3 -q", "app --clients 3 -q"),
        ("-v slurm --nodes=2 -c a=1 --num-gpus 0.5", "-v -c a=1 --num-gpus 0.5"),
        (
            """slurm --preload 'a.b:c d=1' --log-dir x app -c "b='c d'" --gpus-per-node a:2""",
            """--preload 'a.b:c d=1' app -c "b='c d'\"""",
        ),
        ("slurm --resume x --dry-run --deterministic", "--deterministic"),
    ],
)
def test_what_is_given_is_what_the_job_gives_to_simulate(typed: str, of_job: str) -> None:
    line, rest = shlex.split(typed), shlex.split(of_job)
    assert command.for_simulate(line) == rest
    parser = cli.build_parser()
    expected = vars(parser.parse_args(line)) | {"log_dir": None, "resume": None}
    found = vars(parser.parse_args(["simulate", *rest])) | {"log_dir": None, "resume": None}
    assert {name: value for name, value in expected.items() if name in found and name != "command"} == {
        name: value for name, value in found.items() if name in expected and name != "command"
    }


@pytest.mark.parametrize(
    ("ours", "for_sbatch"),
    [
        ("slurm --clients 3", "--time 1:00"),
        ("-v slurm my-app --nodes 2", "-p gpu -- x"),
        ("-q slurm", "-t 3"),
        ("slurm my-app", ""),
    ],
)
def test_what_follows_two_dashes_is_for_sbatch(ours: str, for_sbatch: str) -> None:
    assert command.split([*ours.split(), "--", *for_sbatch.split()]) == (ours.split(), for_sbatch.split())
    assert command.split(ours.split()) == (ours.split(), [])


@pytest.mark.parametrize("line", ["simulate -- slurm", "supernode --count 2 -- slurm", "-v supernode --"])
def test_two_dashes_of_other_commands_stay(line: str) -> None:
    assert command.split(line.split()) == (line.split(), [])


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process, in an empty folder, with only the programs of ``bin`` there."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)

    def run(*line: str) -> tuple[int, str, str]:
        try:
            code = cli.main(["slurm", *line])
        except SystemExit as ended:
            code = int(str(ended.code))
        return (code, *capsys.readouterr())

    return run


def program(name: str, text: str) -> None:
    path = Path("bin") / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nothing", "nothing is not a folder"),
        ("APP", "--num-supernodes N (or --clients N) is missing"),
        ("APP --clients 3 -c lr=1", "run config lr: plain declares no such key"),
        ("APP --clients 0", "must be a whole number, 1 or more, not '0'"),
        ("APP --clients 3 --nodes 0", "must be a whole number, 1 or more, not '0'"),
        ("APP --clients 3 --gpus-per-node half", "must be a number of GPUs, 1 or more"),
        ("APP --clients 3 --gpus-per-node 0", "must be a number of GPUs, 1 or more"),
        ("APP --clients 3 --partition gpu", "unknown: --partition gpu"),
        ("APP --clients 3 -- gpu", "'gpu' is not an option of sbatch; only those can follow the two dashes"),
        ("APP --clients 3 -- -N4", "--nodes cannot be given to sbatch here: give --nodes before"),
        ("APP --clients 3 -- -t 3 --output=x", "--output cannot be given to sbatch here"),
        ("APP --clients 3 -- --array 1-9", "start several with a loop"),
        ('APP --clients 3 -- --comment "a\nb"', "no line break in an option: 'a\\nb'"),
        ("APP --clients 3 --ray-address auto", "unknown: --ray-address auto"),
        ("APP --resume nothing", "--resume nothing: there is no such folder"),
        ("APP --clients 3 --log-dir 50%", "% and \\ in the name of a log have a meaning for Slurm"),
        ("APP --clients 3 --log-dir bin/sbatch", "bin/sbatch is not a folder"),
        ("APP --clients 3", "sbatch is not on PATH. Run this on a login node"),
    ],
)
def test_bad_input_is_a_line_and_nothing_is_submitted(run: Run, line: str, reason: str) -> None:
    if "bin/sbatch" in line:
        program("sbatch", "exit 1")
    code, output, error = run(*shlex.split(line.replace("APP", APP)))
    assert (code, output, error.count("\n")) == (2, "", 1), error
    assert error.startswith("flower-gpu slurm: ") and reason in error
    assert not Path("runs").exists()


def test_several_nodes_need_ray(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--nodes 2 needs Ray, which is not installed" in run(APP, "--clients", "3", "--nodes", "2")[2]


# The script


def test_the_script_of_one_node(run: Run) -> None:
    code, output, error = run(
        APP, "--clients", "3", "--gpus-per-node", "a100:2", "--dry-run", "--", "-t", "3"
    )
    here, python = Path.cwd(), sys.executable
    assert (code, error) == (0, "") and not Path("runs").exists()
    directives, start, last = output.split("\n\n")
    assert directives.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=plain",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=a100:2",
        f"#SBATCH --output={here}/runs/slurm-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@60",
        "#SBATCH -t 3",
    ]
    assert start.startswith(f"cd {here} || exit\npython={python}\nlogs={here}/runs/slurm-$SLURM_JOB_ID\n")
    assert last == f'exec "$python" -P -m flower_gpu.cli simulate {APP} --clients 3 "${{where[@]}}"\n'


def test_options_of_sbatch_have_their_values_on_their_lines() -> None:
    assert sbatch_lines(["-p", "gpu", "--exclusive", "--time=1:00", "--licenses", "a", "-n8"]) == [
        ["-p", "gpu"],
        ["--exclusive"],
        ["--time=1:00"],
        ["--licenses", "a"],
        ["-n8"],
    ]


def test_bash_can_read_the_script_of_several_nodes(tmp_path: Path) -> None:
    script = batch_script(plan(tmp_path, nodes=2, gpus_per_node="2"))
    done = run_programs.run(["bash", "-n"], input=script)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ray" in script.lower()


@pytest.mark.parametrize(
    ("restarts", "runs", "resume", "expected"),
    [
        (None, {}, None, ["--log-dir", "runs/slurm-17"]),
        (1, {}, None, ["--log-dir", "runs/slurm-17"]),
        (1, {FIRST: True}, None, ["--resume", f"runs/slurm-17/{FIRST}"]),
        (1, {FIRST: True, SECOND: True}, None, ["--resume", f"runs/slurm-17/{SECOND}"]),
        (1, {FIRST: True, SECOND: False}, None, ["--log-dir", "runs/slurm-17"]),
        (None, {FIRST: True}, None, ["--log-dir", "runs/slurm-17"]),  # of an older job with this number
        (0, {}, "it's", ["--resume", "it's"]),
        (2, {FIRST: True}, "it's", ["--resume", "it's"]),
    ],
)
def test_a_job_that_is_started_again_goes_on_with_its_newest_run(
    tmp_path: Path, restarts: int | None, runs: dict[str, bool], resume: str | None, expected: list[str]
) -> None:
    """Also in a folder whose name a shell would take apart."""
    here = tmp_path / "a 'folder' $HOME"
    here.mkdir()
    for run, has_checkpoint in runs.items():
        (here / "runs/slurm-17" / run / "checkpoint").mkdir(parents=True)
        if has_checkpoint:
            (here / "runs/slurm-17" / run / "checkpoint" / INDEX_NAME).touch()
    python = here / "python"
    python.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\npwd\n')
    python.chmod(0o755)
    made = JobPlan("x", here, str(python), ["my app"], here / "runs", Path(resume) if resume else None)
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "17"}
    if restarts is not None:
        env["SLURM_RESTART_COUNT"] = str(restarts)
    done = run_programs.run(["bash"], input=batch_script(made), env=env, cwd="/")
    assert done.stderr == ""
    option, value = expected
    value = value if resume else f"{here}/{value}"
    told = ["-P", "-m", "flower_gpu.cli", "simulate", "my app", option, value, str(here)]
    assert done.stdout.splitlines() == told


# Submission


def test_a_job_is_submitted_and_its_script_kept(run: Run) -> None:
    program(
        "sbatch", 'echo "$*" > options; while read -r line; do echo "$line"; done > script; echo "17;here"'
    )
    assert run(APP, "--clients", "3", "-q") == (0, "17\n", "")
    code, output, error = run(APP, "--clients", "3", "--log-dir", "logs", "--", "-p", "gpu")
    assert (code, output) == (0, "17\n")
    assert error.startswith("flower-gpu slurm: job 17 is submitted\n")
    told = [line.strip().partition("  ")[0] for line in error.splitlines()[1:]]
    assert told == [
        "squeue -j 17",
        "tail -n +1 -F logs/slurm-17.log",
        "flower-gpu top logs/slurm-17/[0-9]*",
        "scancel 17",
    ]
    _, script, _ = run(APP, "--clients", "3", "--dry-run", "--log-dir", "logs", "--", "-p", "gpu")
    assert Path("logs/slurm-17.sh").read_text() == script
    assert Path("script").read_text().split() == script.split()
    # On the command line, too: variables of sbatch go before what the script says.
    said = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert Path("options").read_text() == " ".join(["--parsable", *said]) + "\n"


@pytest.mark.parametrize("answer", ["echo 'no such partition' >&2; exit 1", "echo 'usage: sbatch'"])
def test_a_job_that_slurm_does_not_take_is_an_error(run: Run, answer: str) -> None:
    program("sbatch", answer)
    code, output, error = run(APP, "--clients", "3", "--", "-p", "gpu")
    assert (code, output) == (1, "")
    assert error == "flower-gpu slurm: sbatch refused the job; its message is above\n"
    assert not list(Path("runs").iterdir())


def test_the_reference_has_the_command_s_own_options() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs/reference/slurm.md").read_text().split())
    for name, option in command.OPTIONS.items():
        assert option.described in page and name.replace("_", "-") in page
