"""What a message costs a SuperNode: Flower's own, and `flower-gpu supernodes`, in turn.

A SuperLink and N SuperNodes on this machine run an app for some rounds, with all clients in each. README.md
says what is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared import memory, table
from benchmarks.shared.driver import Figures, Options, Parser, chosen, in_turn, positive, positives, run
from benchmarks.shared.processes import BenchmarkError, descendants, end_descendants, new_state_folder
from flower_gpu.launch import ports
from flower_gpu.launch.environment import script_folders
from flower_gpu.workers.forkserver import control

_APPS = {"no-op": "no_op", "digits": "digits"}
_SUPERNODES = {"no-op": (6, 12), "digits": (6,), "memory": (12,)}
_WAYS = ("flower", "ours")
_FOLDER = Path(__file__).parent / "apps"
_SETTLE_S = 10.0
_START_S, _RUN_S = 120.0, 500.0
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = Parser("supernode", __doc__, list(_SUPERNODES))
    add = parser.add_argument
    add("--supernodes", type=positives, metavar="N,N",
        help="how many; default: 6, for no-op also 12, for memory 12")  # fmt: skip
    add("--ways", type=partial(chosen, _WAYS), default=list(_WAYS), metavar="WAY,WAY",
        help="flower, ours; default: both")  # fmt: skip
    add("--rounds", type=positive, default=3, metavar="N", help="of each run; default: 3")
    add("--runs", type=positive, default=3, metavar="N", help="of each way; default: 3")
    parts = {part: partial(_part, part) for part in _SUPERNODES}
    return run(parser, parser.parse(), parts, {"rows": [], "memory": []})


def _part(part: str, options: Options, figures: Figures) -> None:
    for count in options.supernodes or _SUPERNODES[part]:
        if part == "memory":
            figures["memory"] += _memory(count, options.ways)
        else:
            figures["rows"] += _measure(part, count, options)


def _measure(app: str, count: int, options: Options) -> list[dict[str, Any]]:
    """Run an app in both ways in turn, several times."""
    measured: dict[str, list[tuple[float, float]]] = {way: [] for way in options.ways}
    for _, way in in_turn(options.ways, options.runs):
        measured[way].append(_run(app, way, count, options.rounds))
    rows = []
    for way, values in measured.items():
        row = {
            "app": app,
            "way": way,
            "supernodes": count,
            "rounds": options.rounds,
            "runs": options.runs,
            "total_s": round(median(total_s for total_s, _ in values), 2),
            "cpu_s_per_message": round(median(cpu_s for _, cpu_s in values), 3),
            "all_total_s": [round(total_s, 2) for total_s, _ in values],
        }
        rows.append(row)
    _show(rows)
    return rows


def _memory(count: int, ways: list[str]) -> list[dict[str, Any]]:
    """Measure what SuperNodes take that wait for a message."""
    rows = []
    for way in ways:
        with tempfile.TemporaryDirectory(prefix="fgpu-nodes-") as name:
            new_state_folder()
            with _federation(way, count, _environment(name), Path(name)) as nodes:
                row = {
                    "way": way,
                    "supernodes": count,
                    "mb": round(_settled_mb(nodes), 1),
                    "fork_server_mb": round(memory.proportional_mb(control.family()), 1),
                }
        rows.append(row)
    table.show(
        f"memory of {count} SuperNodes that wait",
        ("way", "SuperNodes", "fork server"),
        [(row["way"], f"{row['mb']:.0f} MB", f"{row['fork_server_mb']:.0f} MB") for row in rows],
    )
    return rows


def _settled_mb(nodes: list[int]) -> float:
    """Return what these processes and those below them take when they do nothing any more."""
    last = 0.0
    while True:
        time.sleep(_SETTLE_S)
        pids = {*nodes, *(pid for node in nodes for pid in descendants(node))}
        now = memory.proportional_mb(pids - control.family())
        if abs(now - last) < 0.005 * now:
            return now
        last = now


def _run(app: str, way: str, count: int, rounds: int) -> tuple[float, float]:
    """Run an app once; return the seconds of the run, and the CPU seconds of a message."""
    with tempfile.TemporaryDirectory(prefix="fgpu-nodes-") as name:
        folder = Path(name)
        new_state_folder()
        env = _environment(name)
        with _federation(way, count, env, folder) as nodes:
            executors = [
                pid for node in nodes for pid in descendants(node) if "flower-superexec" in _command(pid)
            ]
            config = f"num-server-rounds={rounds} num-clients={count}"
            command = ["flwr", "run", str(_FOLDER / _APPS[app]), "bench", "--stream", "--run-config", config]
            before = _cpu_times(nodes, executors)
            began = time.monotonic()
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_RUN_S)
            total_s = time.monotonic() - began
            log = f"{done.stdout}\n{done.stderr}"
            if done.returncode or log.count(f"Received {count} results and 0 failures") < rounds:
                raise BenchmarkError(f"{app}, {way}: not all clients answered in all rounds\n{log[-4000:]}")
            time.sleep(1.0)  # the last processes exit
            return total_s, _used_s(before, _cpu_times(nodes, executors)) / (count * rounds)


def _environment(flwr_home: str) -> dict[str, str]:
    return {
        **os.environ,
        "FLWR_HOME": flwr_home,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # for both: ours sets it by itself
        "PATH": os.pathsep.join([*script_folders(), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def _federation(way: str, count: int, env: Mapping[str, str], folder: Path) -> Iterator[list[int]]:
    """Start a SuperLink and SuperNodes. Yields the processes that were started for the latter."""
    port = ports.free_ports(1)[0]
    connection = f'[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (folder / "config.toml").write_text(f'[superlink]\ndefault = "bench"\n\n{connection}')
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder))

    try:
        address = ["--insecure", "--host", "127.0.0.1"]
        link = ["flower-superlink", *address, "--port", str(port)]
        start("superlink", *link, "--disable-runtime-dependency-installation")
        _wait(lambda: ports.is_healthy(port), "the SuperLink does not answer")
        to_link = [*address, "--superlink", f"127.0.0.1:{port}"]
        if way == "ours":
            ours = [sys.executable, "-m", "flower_gpu.cli", "supernodes", "--count", str(count)]
            start("supernodes", *ours, "--log-dir", str(folder), "--", *to_link)
        else:
            for number, node_port in enumerate(ports.free_ports(count)):
                config = f"partition-id={number} num-partitions={count}"
                node = ["flower-supernode", *to_link, "--port", str(node_port), "--node-config", config]
                start(f"supernode-{number}", *node)
        log = folder / "superlink.log"
        _wait(lambda: log.read_text().count("Activated node_id") >= count, "not all SuperNodes came")
        yield [process.pid for process in started[1:]]
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        end_descendants()


def _cpu_times(nodes: list[int], executors: list[int]) -> dict[tuple[str, int], float]:
    """Return the CPU time so far of what was started for messages, and of the fork servers."""
    # A process is told its children's time when it asks how they ended. The launcher asks that of fork
    # servers that have a successor.
    ended = {("below", pid): sum(_times_s(pid)[2:]) for pid in [*nodes, *executors]}
    below = {child for pid in executors for child in descendants(pid)}
    return ended | {("own", pid): sum(_times_s(pid)) for pid in below | control.family()}


def _used_s(before: Mapping[tuple[str, int], float], after: Mapping[tuple[str, int], float]) -> float:
    """Return the CPU time between two looks."""
    # A fork server that has ended and was nobody's child takes its time with it: then at least what the
    # others have used.
    difference = sum(after.values()) - sum(before.values())
    of_others = sum(used_s - before.get(key, 0.0) for key, used_s in after.items())
    return difference if difference > 0 else of_others


def _times_s(pid: int) -> tuple[float, float, float, float]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0, 0.0, 0.0
    user, system, of_children, of_children_in_kernel = (int(field) / _TICKS for field in fields[11:15])
    return user, system, of_children, of_children_in_kernel


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _wait(is_so: Any, problem: str) -> None:
    deadline = time.monotonic() + _START_S
    while not is_so():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{problem} within {_START_S:g} s")
        time.sleep(0.1)


def _show(rows: list[dict[str, Any]]) -> None:
    flower = rows[0]  # without it, ours is compared with itself
    table.show(
        f"{flower['app']}, {flower['supernodes']} SuperNodes, {flower['rounds']} rounds",
        ("way", "total", "CPU per message", "faster", "less CPU", "runs"),
        [
            (
                row["way"],
                f"{row['total_s']:.1f} s",
                f"{row['cpu_s_per_message']:.2f} s",
                f"{flower['total_s'] / row['total_s']:.1f}x",
                f"{flower['cpu_s_per_message'] / row['cpu_s_per_message']:.1f}x",
                row["runs"],
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
