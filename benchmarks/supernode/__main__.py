"""What a message costs a SuperNode: Flower's own, `flower-gpu supernode`, and `flower-gpu launch`, in turn.

A SuperLink and N SuperNodes on this machine run an app for some rounds, with all clients in each. README.md
says what is measured.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared import memory, table
from benchmarks.shared.driver import Figures, Options, Parser, chosen, in_turn, positive, positives, run
from benchmarks.shared.member import QUICK
from benchmarks.shared.processes import ROOT, BenchmarkError, new_state_folder
from benchmarks.supernode.federation import MessageTime, environment, federation, fork_servers, settled_mb
from flower_gpu.apps.app import format_pairs

_NO_OP = ROOT / "benchmarks" / "supernode" / "apps" / "no_op"
_APPS = {
    "no-op": _NO_OP,
    "arrays": _NO_OP,
    "digits": ROOT / "benchmarks" / "supernode" / "apps" / "digits",
    "ordinary": ROOT / "benchmarks" / "simulation" / "apps" / "ordinary",
}
_SUPERNODES = {
    "no-op": (6, 12, 100),
    "arrays": (6,),
    "digits": (6,),
    "ordinary": (6, 12, 100),
    "memory": (6, 12, 100),
}
_ARRAYS = 122  # as many as a ResNet-18 has
_WAYS = ("flower", "ours", "launch")
_MOST_OF_FLOWER = 12  # of its own SuperNodes: two cores cannot have a hundred of these
_RUN_S = 900.0


def main() -> int:
    quick = {"supernodes": [1], "ways": ["ours", "launch"], "rounds": 1, "runs": 1}
    full = {"ways": list(_WAYS), "rounds": 3, "runs": 3}
    parser = Parser("supernode", __doc__, list(_SUPERNODES), quick=quick, full=full)
    add = parser.add_argument
    add("--supernodes", type=positives, metavar="N,N",
        help="how many; default: 6, 12 and 100, for digits 6")  # fmt: skip
    add("--ways", type=partial(chosen, _WAYS), metavar="WAY,WAY",
        help="flower (up to 12 SuperNodes), ours, and launch; default: all")  # fmt: skip
    add("--rounds", type=positive, metavar="N", help="of each run; default: 3")
    add("--runs", type=positive, metavar="N", help="of each way; default: 3")
    parts = {part: partial(_part, part) for part in _SUPERNODES}
    return run(parser, parser.parse(), parts, {"rows": [], "memory": []})


def _part(part: str, options: Options, figures: Figures) -> None:
    for count in options.supernodes or _SUPERNODES[part]:
        left_out = {"flower"} if count > _MOST_OF_FLOWER else set()
        if part in ("memory", "digits"):
            left_out.add("launch")
        ways = [way for way in options.ways if way not in left_out]
        if part == "memory":
            figures["memory"] += _memory(count, ways, options.runs)
        else:
            figures["rows"] += _measure(part, count, ways, options)


def _measure(app: str, count: int, ways: list[str], options: Options) -> list[dict[str, Any]]:
    """Run an app in these ways in turn, several times."""
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _, way in in_turn(ways, options.runs):
        measured[way].append(_run(app, way, count, options.rounds))
    rows = [
        {
            "app": app,
            "way": way,
            "supernodes": count,
            "rounds": options.rounds,
            "runs": options.runs,
            **_medians(values),
            "all_total_s": [round(value["total_s"], 2) for value in values],
        }
        for way, values in measured.items()
    ]
    if rows:
        _show(rows)
    return rows


def _medians(values: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(value[name] for value in values), 3) for name in values[0]}


def _memory(count: int, ways: list[str], runs: int) -> list[dict[str, Any]]:
    """Measure what SuperNodes take that wait for a message, and how long it takes until all do."""
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _, way in in_turn(ways, runs):
        with tempfile.TemporaryDirectory(prefix="fgpu-nodes-") as name:
            new_state_folder()
            with federation(way, count, environment(name), Path(name)) as found:
                mb = settled_mb(found.nodes)
                measured[way].append(
                    {
                        "registered_s": found.registered_s,
                        "mb": mb,
                        "mb_per_supernode": mb / count,
                        "fork_server_mb": memory.proportional_mb(fork_servers()),
                    }
                )
    rows = [
        {"way": way, "supernodes": count, "runs": runs, **_medians(values)}
        for way, values in measured.items()
    ]
    table.show(
        f"{count} SuperNodes that wait",
        ("way", "all registered", "SuperNodes", "each", "fork server"),
        [
            (
                row["way"],
                f"{row['registered_s']:.1f} s",
                f"{row['mb']:.0f} MB",
                f"{row['mb_per_supernode']:.0f} MB",
                f"{row['fork_server_mb']:.0f} MB",
            )
            for row in rows
        ],
    )
    return rows


def _run(app: str, way: str, count: int, rounds: int) -> dict[str, float]:
    """Run an app once; return what was measured."""
    with tempfile.TemporaryDirectory(prefix="fgpu-nodes-") as name:
        folder = Path(name)
        new_state_folder()
        env = environment(name)
        config: dict[str, Any] = {"num-server-rounds": rounds, "num-clients": count}
        config["figures"] = str(folder / "figures.json")
        if app == "arrays":
            config["arrays"] = _ARRAYS
        if app == "ordinary":
            config["model"] = str(folder / "model.npz")
        # The memory of a no-op run is that of its SuperNodes, and looking at it takes time of its rounds.
        sampler = memory.Sampler() if app == "ordinary" else None
        began = time.monotonic()
        with sampler or nullcontext():
            if way == "launch":
                found = _launch(app, count, rounds, config, env, folder)
            else:
                found = _run_in_federation(app, way, count, rounds, config, env, folder)
        whole_s = time.monotonic() - began - found.get("again_total_s", 0.0)
        rounds_s = json.loads(Path(config["figures"]).read_text())["rounds_s"]
        return {
            "whole_s": whole_s,
            **found,
            "strategy_s": sum(rounds_s),
            "round_s": median(rounds_s),
            **({} if sampler is None else {"peak_mb": sampler.peak_mb}),
        }


def _run_in_federation(
    app: str,
    way: str,
    count: int,
    rounds: int,
    config: Mapping[str, Any],
    env: Mapping[str, str],
    folder: Path,
) -> dict[str, float]:
    def timed(config: Mapping[str, Any]) -> float:
        command = ["flwr", "run", str(_APPS[app]), "bench", "--stream", "--run-config", format_pairs(config)]
        return _timed(command, env, f"{app}, {way}", f"Received {count} results and 0 failures", rounds)

    with federation(way, count, env, folder) as found:
        of_messages = MessageTime(found.nodes)
        measured = {"registered_s": found.registered_s, "total_s": timed(config)}
        # Beside the first run, libraries are imported for all messages to come.
        if way == "ours" and QUICK not in os.environ:
            of_messages = MessageTime(found.nodes)
            again = folder / "again.json"
            measured["again_total_s"] = timed({**config, "figures": str(again)})
            measured["again_strategy_s"] = sum(json.loads(again.read_text())["rounds_s"])
        time.sleep(1.0)  # the last processes exit
        return {**measured, "cpu_s_per_message": of_messages.used_s() / (count * rounds)}


def _launch(
    app: str, count: int, rounds: int, config: Mapping[str, Any], env: Mapping[str, str], folder: Path
) -> dict[str, float]:
    command = [sys.executable, "-m", "flower_gpu.cli", "launch", str(_APPS[app]), "--log-dir", str(folder)]
    command += ["--clients", str(count), "--rounds", str(rounds)]
    given = {name: value for name, value in config.items() if not name.startswith("num-")}
    command += ["--run-config", format_pairs(given)]
    return {"total_s": _timed(command, env, f"{app}, launch", rf"train +{count}/{count} clients", rounds)}


def _timed(command: list[str], env: Mapping[str, str], what: str, line: str, rounds: int) -> float:
    """Run a command that tells such a line in each round; return its seconds."""
    began = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_RUN_S, cwd=os.sep)
    total_s = time.monotonic() - began
    log = f"{done.stdout}\n{done.stderr}"
    if done.returncode or len(re.findall(line, log)) < rounds:
        raise BenchmarkError(f"{what}: not all clients answered in all rounds\n{log[-4000:]}")
    return total_s


def _show(rows: list[dict[str, Any]]) -> None:
    flower = rows[0]  # without it, ours is compared with itself
    table.show(
        f"{flower['app']}, {flower['supernodes']} SuperNodes, {flower['rounds']} rounds",
        (
            "way",
            "with all starts",
            "command",
            "strategy",
            "a round",
            "CPU per message",
            "peak",
            "faster",
            "runs",
        ),
        [
            (
                row["way"],
                f"{row['whole_s']:.1f} s",
                f"{row['total_s']:.1f} s",
                f"{row['strategy_s']:.1f} s",
                f"{row['round_s']:.1f} s",
                f"{row['cpu_s_per_message']:.2f} s" if "cpu_s_per_message" in row else "",
                f"{row['peak_mb']:.0f} MB" if "peak_mb" in row else "",
                f"{flower['whole_s'] / row['whole_s']:.1f}x",
                row["runs"],
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
