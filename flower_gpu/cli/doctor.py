"""``flower-gpu doctor``: checks of this host and shell, with a solution for each problem."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from textwrap import TextWrapper
from typing import Final

from flower_gpu.cli.arguments import JSON, Command, is_quiet
from flower_gpu.doctor import Check, Finding, cuda, environment, examine, gpus, host
from flower_gpu.gpu import inventory

#: Exit status if there is a problem.
EXIT_PROBLEM: Final = 1

_WIDTH = 100
_COLUMNS = 26  # width of level and check


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the findings, and return the exit status."""
    findings = []
    for finding in examine(checks()):
        findings.append(finding)
        if not (arguments.json or (is_quiet(arguments) and finding.level != "problem")):
            print(as_text(finding), flush=True)
    ok = all(finding.level != "problem" for finding in findings)
    if arguments.json:
        print(json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(summary(findings))
    return 0 if ok else EXIT_PROBLEM


def checks() -> Mapping[str, Check]:
    """Return all checks by name, in the order of the output."""
    gpu_inventory = inventory.take()
    inventory.close()
    return {
        "driver": partial(gpus.driver, gpu_inventory),
        "gpu": partial(gpus.gpus, gpu_inventory),
        "policy": partial(gpus.calls, gpu_inventory),
        "torch": partial(cuda.torch, gpu_inventory),
        "packages": environment.packages,
        "variables": environment.variables,
        "system": host.system,
        "state folder": host.state_folder,
        "fork server": host.fork_servers,
        "ledger": host.ledger_folder,
        "leases": host.leases,
        "one ledger": partial(host.other_ledger, gpu_inventory),
        "SuperLink": host.superlinks,
        "cuda": partial(cuda.works, gpu_inventory),
    }


def as_text(finding: Finding) -> str:
    """Return the printed text of a finding."""
    wrap = TextWrapper(
        _WIDTH,
        initial_indent=f"{finding.level:<9}{finding.check:<{_COLUMNS - 9}}",
        subsequent_indent=" " * _COLUMNS,
        break_long_words=False,  # Commands and paths must stay in one piece, so that users can copy them.
        break_on_hyphens=False,
    )
    lines = wrap.wrap(finding.text)
    if finding.todo:
        wrap.initial_indent = wrap.subsequent_indent
        lines += wrap.wrap(f"-> {finding.todo}")
    return "\n".join(lines)


def summary(findings: Iterable[Finding]) -> str:
    """Return the last line of the output, with the numbers of problems and notes."""
    levels = [finding.level for finding in findings]
    counted = [(levels.count(level), level) for level in ("problem", "note")]
    named = [f"{number} {level}{'' if number == 1 else 's'}" for number, level in counted if number]
    return ", ".join(named) or "all is fine"


COMMAND: Final = Command(
    "check driver, PyTorch, Flower, the ledger and this shell, and say what to do",
    """\
Check this host from the driver to the ledger, with the variables of this shell. Each line is ok, a note
(fine, and good to know), or a problem and its solution. With a GPU a worker with a lease asks for more memory
than it has, and computes. Exit status: 0, or 1 if there is a problem.""",
    run,
    JSON,
)
