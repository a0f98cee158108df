"""Every command accepts ``-v`` and ``-q``, which change its output and the log levels of its children."""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_shell import Shell
from nvml_stub import Host
from run_programs import run_cli, run_python

from flower_gpu.cli import main as cli
from flower_gpu.cli.arguments import verbosity
from flower_gpu.cli.main import COMMANDS, build_parser

PAGE = Path(__file__).parents[2] / "docs/reference/commands.md"
ABOUT = re.compile(r"flower-gpu \S+, Python \S+, /\S+\n")


def parsers(
    parser: argparse.ArgumentParser, name: str = "flower-gpu"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a parser and all its subparsers, each with the words of its command."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, subparser in action.choices.items():
                yield from parsers(subparser, f"{name} {word}")


REQUIRED = {
    "launch": ["app"],
    "simulate": ["app"],
    "metrics": ["--port", "0"],
    "workers": ["status"],
    "report": ["run"],
}
PARSERS = dict(parsers(build_parser()))


def run(shell: Shell, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_cli(*arguments, env=shell.env, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_may_stand_before_and_after_the_command(name: str) -> None:
    parser, required = build_parser(), REQUIRED.get(name, [])
    for flag, value in (("-v", 1), ("--verbose", 1), ("-q", -1), ("--quiet", -1)):
        for typed in ([flag, name, *required], [name, flag, *required], [name, *required, flag]):
            assert verbosity(parser.parse_args(typed)) == value
    assert verbosity(parser.parse_args([name, *required])) == 0


def test_verbose_and_quiet_together_are_refused(shell: Shell) -> None:
    done = run(shell, "gpus", "-v", "-q")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "not allowed with" in done.stderr


def test_verbose_shows_debug_lines_once_on_stderr_and_quiet_hides_empty_results(
    shell: Shell,
) -> None:
    plain, verbose, quiet = (run(shell, "workers", "status", *flag) for flag in ((), ("-v",), ("-q",)))
    assert ABOUT.fullmatch(verbose.stderr.replace(plain.stderr, "", 1))
    assert re.sub(r"\d", "", verbose.stdout) == re.sub(r"\d", "", plain.stdout)
    assert not ABOUT.search(plain.stderr)
    for done in (quiet, run(shell, "footprint", "-q")):
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_quiet_doctor_shows_problems_and_their_number(shell: Shell) -> None:
    shell.env["FLOWER_GPU_RESERV"] = "1GiB"
    quiet = shell.run("doctor", "-q", env={"ONLY": "variables,ledger"})
    assert quiet.returncode == 1
    problems = re.findall(r"^(ok|note|problem) ", quiet.stdout, re.MULTILINE)
    assert set(problems) == {"problem"} and "FLOWER_GPU_RESERV is set" in quiet.stdout
    assert quiet.stdout.splitlines()[-1].startswith(f"{len(problems)} problem")


LEVELS = """
import logging, os, sys
from flower_gpu.cli.main import logged
if sys.argv[2] == "before":
    import flwr.common.logger
with logged(int(sys.argv[1]), to_children=sys.argv[3] == "to children"):
    if sys.argv[2] == "later":
        import flwr.common.logger
    for name in ("flwr", "flwr.flower_gpu"):
        for level in ("DEBUG", "INFO", "WARNING", "ERROR"):
            logging.getLogger(name).log(getattr(logging, level), "<%s %s>", name, level)
    logging.getLogger("my.own").debug("<my own>")
    print(os.environ.get("FLWR_LOG_LEVEL"))
print(os.environ.get("FLWR_LOG_LEVEL"))
logging.getLogger("flwr").debug("<after>")
"""


@pytest.mark.parametrize(
    ("value", "flwr", "first"),
    [(1, "never", 0), (1, "later", 0), (0, "never", 2), (-1, "never", 3), (-1, "before", 3)],
)
def test_lines_are_shown_once_by_level(value: int, flwr: str, first: int, shell: Shell) -> None:
    done = run_python(LEVELS, str(value), flwr, "to children", env=shell.env)
    assert done.returncode == 0, done.stderr
    # Python's own handler shows warnings and errors only.
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    expected = [f"{name} {level}" for name in ("flwr", "flwr.flower_gpu") for level in levels[first:]]
    # Flower keeps the level that was set when it was imported.
    after = ["after"] if (value, flwr) == (1, "later") else []
    assert re.findall(r"<(.*?)>", done.stderr) == expected + after
    assert done.stdout.split() == [{1: "DEBUG", 0: "None", -1: "ERROR"}[value], "None"]


@pytest.mark.parametrize(
    "line", [["launch"], ["simulate"], ["supernode"], ["supernode", "--count", "2"]], ids=" ".join
)
def test_quiet_applies_to_child_processes_without_log_files(
    line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It always applies to the command itself. Children with log files keep their level."""
    name = line[0]
    seen: list[tuple[str | None, int]] = []

    def run(_: object) -> int:
        seen.append(
            (os.environ.get("FLWR_LOG_LEVEL"), logging.getLogger("flwr.flower_gpu").getEffectiveLevel())
        )
        return 0

    monkeypatch.delenv("FLWR_LOG_LEVEL", raising=False)
    # Without handlers, the logger is as before the import of Flower.
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [])
    if name == "launch":
        monkeypatch.setattr("flower_gpu.launch.run.launch", run)
    else:
        patched = {**COMMANDS, name: replace(COMMANDS[name], run=run)}
        monkeypatch.setattr(cli, "COMMANDS", patched)
    assert cli.main([*line, *REQUIRED.get(name, []), "-q"]) == 0
    assert cli.main([*line, *REQUIRED.get(name, []), "-v"]) == 0
    has_log_files = name == "launch" or "--count" in line
    assert seen == [(None if has_log_files else "ERROR", logging.ERROR), ("DEBUG", logging.DEBUG)]


def test_quiet_applies_to_a_single_supernode(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []
    monkeypatch.setattr("flower_gpu.programs.commands.warm_up_in_background", lambda env: None)
    monkeypatch.setattr(os, "execvpe", lambda file, words, env: environments.append(env))
    cli.main(["supernode", "-q", "--", "--insecure"])
    assert environments[0]["FLWR_LOG_LEVEL"] == "ERROR"


LEASED = """
import flower_gpu
from flower_gpu.cli.main import logged

with logged(1, to_children=True):
    print(flower_gpu.run_in_worker("math:sqrt", 4.0, gpu_memory="2GiB", name="3", start_method="spawn"))
"""


def test_debug_lines_report_granted_leases(shell: Shell, host: Host) -> None:
    done = run_python(LEASED, env=shell.on(host).env)
    assert done.stdout == "2.0\n", done.stderr
    assert re.search(
        r"^math:sqrt of client 3 has a lease on 2\.0 GiB of GPU \d after \d+\.\d\d s$", done.stderr, re.M
    )


def test_the_documentation_names_existing_commands_only() -> None:
    _, _, page = PAGE.read_text().partition("\n## All commands\n")
    table = re.findall(r"^\| (`[a-z`, -]+`) \|.*\|.*\|$", page, re.MULTILINE)
    named = {word.removesuffix(" --count") for row in table for word in re.findall(r"`([a-z -]+)`", row)}
    assert {"launch", "simulate", "doctor"} <= named
    assert {f"flower-gpu {name}" for name in named} <= PARSERS.keys()
