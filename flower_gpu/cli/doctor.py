"""``flower-gpu doctor``: what of this machine and shell is fine, and what to do about the rest."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Final

from flower_gpu.cli.verbosity import is_quiet
from flower_gpu.doctor import Check, Finding, cuda, environment, examine, gpus, host, ledger, superlinks
from flower_gpu.gpu import inventory

HELP = "check driver, PyTorch, Flower, the ledger and this shell, and tell what to do"

DESCRIPTION = """\
Checks what calls on a GPU depend on. Each line is ok, a note (fine, and good to know), or a problem, with
what to do about it. With a GPU it runs a call as a client's: in a worker with a lease, which asks for more
than that, and computes. Exit status: 0, or 1 if there is a problem."""

#: Exit status if something must be done.
EXIT_PROBLEM: Final = 1

_WIDTH = 100
_COLUMNS = 26  # of level and check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--confine",
        nargs="?",
        choices=("on", "strict"),
        const="on",
        help="also try a worker that is confined, as flower-gpu supernode --confine has them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    findings = []
    for finding in examine(checks(arguments.confine)):
        findings.append(finding)
        if not (arguments.json or (is_quiet(arguments) and finding.level != "problem")):
            print(as_text(finding), flush=True)
    ok = all(finding.level != "problem" for finding in findings)
    if arguments.json:
        print(json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(summary(findings))
    return 0 if ok else EXIT_PROBLEM


def checks(confine: str | None = None) -> Mapping[str, Check]:
    """Return all checks by their names, in the order in which they are told.

    ``confine``: how apps are to be confined, ``on`` or ``strict``; None where they are not.
    """
    found = inventory.take()
    inventory.close()
    return {
        "driver": partial(gpus.driver, found),
        "gpu": partial(gpus.gpus, found),
        "visible": partial(gpus.visible, found),
        "GPU guard": gpus.gpu_guard,
        "confinement": partial(gpus.app_confinement, confine),
        "policy": partial(gpus.calls, found),
        "torch": partial(cuda.torch, found),
        "flower": environment.flower,
        "flower-gpu": environment.ourselves,
        "variables": environment.variables,
        "system": host.system,
        "state folder": host.state_folder,
        "fork server": host.fork_servers,
        "ledger": ledger.folder,
        "leases": ledger.leases,
        "one ledger": partial(ledger.only_one, found),
        "SuperLinks": superlinks.superlinks,
        "cuda": partial(cuda.works, found, confined=confine is not None),
    }


def as_text(finding: Finding) -> str:
    """Return a finding as it is printed."""
    lines = _wrapped(finding.text, f"{finding.level:<9}{finding.check:<{_COLUMNS - 9}}"[:_COLUMNS])
    if finding.todo:
        lines += _wrapped(f"-> {finding.todo}", " " * _COLUMNS)
    return "\n".join(lines)


def summary(findings: Iterable[Finding]) -> str:
    """Return the last line."""
    levels = [finding.level for finding in findings]
    counted = [(levels.count(level), level) for level in ("problem", "note")]
    named = [f"{number} {level}{'' if number == 1 else 's'}" for number, level in counted if number]
    return ", ".join(named) or "all is fine"


def _wrapped(text: str, first: str) -> list[str]:
    # What may be copied stays in one piece.
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * _COLUMNS,
        break_long_words=False,
        break_on_hyphens=False,
    )
