"""64 clients that name no size share one stub GPU on which five of them fit: how well it is used.

The first call runs alone and its peak is learned; then as many run at a time as fit. Everything is real but
the GPU: client processes, workers, ledger, the driver's library as pynvml sees it. What a worker allocates is
counted by the stub; one that finds the GPU full fails as CUDA does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import machine
import table
from options import Parser, json_file, positive

_TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(_TESTS))

import nvml_stub  # noqa: E402

from flower_gpu.gpu.ledger import Ledger, State  # noqa: E402

GIB = 1 << 30
_TAKES_BYTES = int(2.8 * GIB)  # with the margin so many fit on 16 GiB, next to the reserve:
_FIT = 5
_LOOK_S = 0.02
_LONGEST_S = 600.0


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="flower-gpu-benchmark-") as folder:
        figures = measure(Path(folder), options)
    table.show(f"{options.clients} clients, auto", ("figure", "value"), list(figures.items()))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine.describe(), **figures}, indent=1) + "\n")
    is_right = figures["finished"] == options.clients and not figures["out_of_memory"]
    return 0 if is_right and figures["most_at_a_time"] <= _FIT else 1


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    host = nvml_stub.Host(folder / "stub", gpus=1, total=16 * GIB)
    (folder / "state").mkdir(mode=0o700)
    (folder / "ledger").mkdir()
    env = {
        **os.environ,
        **host.env,
        "FLOWER_GPU_STATE_DIR": str(folder / "state"),
        "FLOWER_GPU_LEDGER_DIR": str(folder / "ledger"),
        "FLOWER_GPU_RUN_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(_TESTS), str(Path(__file__).parent)]),
    }
    os.environ.update({name: env[name] for name in ("NVML_STUB_DIR", "FLOWER_GPU_LEDGER_DIR")})
    _use_stub(env)
    began = time.monotonic()
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", "footprint_client", str(number), str(_TAKES_BYTES), str(options.seconds)],
            env=env,
        )
        for number in range(options.clients)
    ]
    try:
        looks = _watch(clients, began)
    finally:
        for client in clients:
            client.kill()
            client.wait()
        subprocess.run(
            [sys.executable, "-m", "flower_gpu.cli", "server", "stop"], env=env, capture_output=True
        )
    events = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    return _figures(events, looks, time.monotonic() - began, [client.returncode for client in clients])


def _use_stub(env: Mapping[str, str]) -> None:
    """Have this process find the stub, too: a library that is loaded is found by its name."""
    import ctypes

    ctypes.CDLL(str(Path(env["LD_LIBRARY_PATH"].split(os.pathsep)[0]) / "libnvidia-ml.so.1"))


def _watch(clients: list[subprocess.Popen[bytes]], began: float) -> list[tuple[float, State]]:
    ledger = Ledger()
    looks = []
    while any(client.poll() is None for client in clients):
        if time.monotonic() - began > _LONGEST_S:
            break
        looks.append((time.monotonic() - began, ledger.status()))
        time.sleep(_LOOK_S)
    return looks


def _figures(
    events: list[dict[str, Any]], looks: list[tuple[float, State]], seconds: float, codes: list[int]
) -> dict[str, Any]:
    leases = [event for event in events if event["event"] == "lease_granted"]
    alone = [event for event in leases if event["alone"]]
    learned = next((event["time"] for event in leases if not event["alone"]), None)
    busy = [
        state.leased_bytes(state.gpus[0].uuid) / (16 * GIB - (256 << 20))
        for _, state in looks
        if state.waiting and state.gpus
    ]
    return {
        "clients": len(codes),
        "finished": codes.count(0),
        "out_of_memory": sum(event["event"] == "out_of_memory" for event in events),
        "calls_alone": len(alone),
        "most_at_a_time": max((len(state.holders) for _, state in looks), default=0),
        "leased_while_work_waits_percent": round(100 * sum(busy) / max(1, len(busy)), 1),
        "first_learned_after_s": None if learned is None else round(learned - events[0]["time"], 2),
        "seconds": round(seconds, 1),
    }


def _options() -> argparse.Namespace:
    parser = Parser(prog="footprint.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--clients", type=positive, default=64, metavar="N", help="how many (default: 64)")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each call takes (default: 1)")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the figures there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
