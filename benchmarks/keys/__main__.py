"""What TLS and keys cost: the same launch with and without --secure, in turn; and a connection.

Clients do nothing: whatever they did would only hide what the connections cost. README.md says what is
measured.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared import table
from benchmarks.shared.driver import Figures, Options, Parser, in_turn, positive, run
from benchmarks.shared.processes import BenchmarkError, end_servers, new_state_folder
from benchmarks.simulation.engines import environment

_APP = Path(__file__).parents[1] / "supernode" / "apps" / "no_op"
_CLIENTS = 4
_TIMEOUT_S = 600.0


def main() -> int:
    parser = Parser(
        "keys",
        __doc__,
        ["rounds", "connection"],
        quick={"runs": 1, "rounds": 2, "connections": 5},
        full={"runs": 9, "rounds": 15, "connections": 200},
    )
    parser.add_argument("--runs", type=positive, metavar="N", help="with and without each; default: 9")
    parser.add_argument("--rounds", type=positive, metavar="N", help="of each run; default: 15")
    parser.add_argument("--connections", type=positive, metavar="N", help="default: 200")
    options = parser.parse()
    parts = {"rounds": _measure_rounds, "connection": _measure_connection}
    return run(parser, options, parts, {"quick": options.quick, "rows": [], "connection": []})


def _measure_rounds(options: Options, figures: Figures) -> None:
    done: dict[str, list[dict[str, Any]]] = {"insecure": [], "secure": []}
    for _, way in in_turn(done, options.runs):
        done[way].append(_launch(way, options.rounds))
    # Each pair ran one after the other: what the machine did otherwise meanwhile hit both.
    pairs = list(zip(done["secure"], done["insecure"], strict=True))
    row: dict[str, Any] = {"clients": _CLIENTS, "rounds": options.rounds, "runs": options.runs}
    for name in ("round_s", "rest_s"):
        for way, runs in done.items():
            row[f"{way}_{name}"] = round(median(each[name] for each in runs), 3)
        ratios = sorted(secure[name] / insecure[name] for secure, insecure in pairs)
        row[f"{name}_ratio"] = round(median(ratios), 3)
        row[f"{name}_ratios"] = [round(ratio, 3) for ratio in (ratios[0], ratios[-1])]
    figures["rows"].append(row)
    table.show(
        f"keys, {_CLIENTS} clients, {options.rounds} rounds",
        ("", "insecure", "secure", "ratio", "from", "to"),
        [
            (
                name,
                row[f"insecure_{name}"],
                row[f"secure_{name}"],
                row[f"{name}_ratio"],
                *row[f"{name}_ratios"],
            )
            for name in ("round_s", "rest_s")
        ],
    )


def _launch(way: str, rounds: int) -> dict[str, Any]:
    """Run the app once; return the median round after the first, and the run's time without its rounds."""
    new_state_folder()
    with tempfile.TemporaryDirectory(prefix="fgpu-keys-") as folder:
        config = f'figures="{folder}/figures.json" arrays=20'
        command = [
            *(sys.executable, "-P", "-m", "flower_gpu.cli", "launch", str(_APP)),
            *("--clients", str(_CLIENTS), "--rounds", str(rounds), "--run-config", config),
            *("--log-dir", folder, *(["--secure"] if way == "secure" else [])),
        ]
        began = time.perf_counter()
        try:
            ran = subprocess.run(
                command, env=environment(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        finally:
            end_servers()
        seconds = time.perf_counter() - began
        if ran.returncode:
            raise BenchmarkError(f"launch, {way}: status {ran.returncode}\n{ran.stderr[-4000:]}")
        [settings] = Path(folder).glob("*/launch.json")
        if json.loads(settings.read_text())["secure"] != (way == "secure"):
            raise BenchmarkError(f"launch, {way}: that is not what was launched")
        result = json.loads(settings.with_name("result.json").read_text())
        took = [each["seconds"] for each in result["rounds"]]
        if len(took) != rounds or result["failed"]:
            raise BenchmarkError(f"launch, {way}: {len(took)} rounds, {result['failed']} failed messages")
    # The first round waits until all SuperNodes are there.
    return {"round_s": median(took[1:]), "rest_s": seconds - sum(took[1:])}


def _measure_connection(options: Options, figures: Figures) -> None:
    from flower_gpu.flower.mutual_tls import Identity
    from flower_gpu.launch.authority import Authority

    authority = Authority()
    with tempfile.TemporaryDirectory(prefix="fgpu-keys-") as folder:
        identity = Identity(Path(folder, "own.pem"))
        identity.authority.write_bytes(authority.certificate)
        identity.path.write_bytes(authority.issue("benchmark"))
        took: dict[str, list[float]] = {"insecure": [], "secure": []}
        with _server(None) as plain, _server(identity) as secure:
            ports = {"insecure": plain, "secure": secure}
            for _, way in in_turn(took, options.connections + 1):
                took[way].append(_connect(ports[way], identity if way == "secure" else None))
    cpu_ms = {way: round(median(each[1:]) * 1e3, 2) for way, each in took.items()}  # the first one imports
    figures["connection"].append(
        {"connections": options.connections, **{f"{k}_cpu_ms": v for k, v in cpu_ms.items()}}
    )
    table.show("a connection, CPU of both sides, ms", tuple(cpu_ms), [tuple(cpu_ms.values())])


def _connect(port: int, identity: Any) -> float:
    """Ask a server in this process for its health, by a new client; return the CPU time of both sides."""
    import httpx

    began = time.process_time()
    context: ssl.SSLContext | bool = identity.client_context() if identity else False
    scheme = "https" if identity else "http"
    with httpx.Client(verify=context, trust_env=False) as client:
        if client.get(f"{scheme}://127.0.0.1:{port}/health").status_code != httpx.codes.OK:
            raise BenchmarkError(f"{scheme}: the server does not answer")
    return time.process_time() - began


@contextmanager
def _server(identity: Any) -> Iterator[int]:
    """Run a server as Flower's are, which asks for certificates if it has an identity."""
    import uvicorn
    from fastapi import FastAPI
    from flwr.supercore.routers import health

    from flower_gpu.launch import ports

    app = FastAPI()
    app.include_router(health.router)
    own = {
        "ssl_certfile": str(identity.path),
        "ssl_keyfile": str(identity.path),
        "ssl_ca_certs": str(identity.authority),
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
    } if identity else {}  # fmt: skip
    [port] = ports.free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", **own))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
