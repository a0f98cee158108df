"""Part ``memory``: what the GPU holds after each of several clients has trained once.

The article's clients train in themselves and stay, as a Flower client does between rounds. Ours stay, too,
but their training ran in a worker that has ended.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.clients import Client, TimeLimitError, ask, checked, clients
from benchmarks.gpu.setting import MB, Setting, prepare_images
from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError

LIMIT_S = 210.0

_WAYS = ("article", "ours")
_BACK_MB = 64.0  # what the driver itself, or a display, may take meanwhile
_BACK_S = 5.0  # the driver frees the memory of a process on its own time
_SETTLE_S = 0.3


def measure(setting: Setting) -> dict[str, Any]:
    source = prepare_images(setting)
    with clients("ours", 1) as (client,):
        path = str(setting.folder / "weights.pkl")
        request = {"do": "initial", "args": [0, setting.model], "options": {"gpu": "never"}, "result": path}
        checked(ask(client, request, setting.deadline), client)
    start = setting.memory()
    rows = []
    for way in _WAYS:
        level_mb = _settled(setting, start.used_bytes / MB)
        row = _measure(setting, way, level_mb)
        row["after_all_ended_mb"] = round(_settled(setting, level_mb), 1)
        rows.append(row)
    return {
        "model": setting.model,
        "images": source,
        "batch": setting.sizes.batch,
        "gpu_mb": round(start.total_bytes / MB, 1),
        "clients": setting.sizes.clients,
        "ways": rows,
    }


def _measure(setting: Setting, way: str, start_mb: float) -> dict[str, Any]:
    row: dict[str, Any] = {"way": way, "start_mb": round(start_mb, 1)}
    after: list[float] = []
    highest: list[float] = []
    out_of_memory = 0
    cut_short = False
    try:
        with clients(way, setting.sizes.clients) as started:
            for client in started:
                reply, peak_mb = _train(setting, client)
                if reply.get("out_of_memory"):
                    out_of_memory = 1  # the GPU is full: the next ones would fail in the same way
                    break
                checked(reply, client)
                highest.append(round(peak_mb, 1))
                back_mb = start_mb + _BACK_MB if way == "ours" else None
                after.append(round(_settled(setting, back_mb), 1))
    except TimeLimitError as error:
        print(f"memory: {way}: {error}; what was measured before counts", flush=True)
        cut_short = True
    above = [used - start_mb for used in after]
    return {
        **row,
        "used_after_mb": after,
        "highest_during_mb": highest,
        "trained": len(after),
        "out_of_memory": out_of_memory,
        "cut_short": cut_short,
        "kept_per_client_mb": round(above[-1] / len(above), 1) if above else None,
        "back_at_start": bool(above) and all(abs(extra) <= _BACK_MB for extra in above),
    }


def _train(setting: Setting, client: Client) -> tuple[dict[str, Any], float]:
    peak_mb = 0.0

    def look() -> None:
        nonlocal peak_mb
        peak_mb = max(peak_mb, setting.used_mb())

    folder, sizes = setting.folder, setting.sizes
    config = {
        "model": setting.model, "folder": str(folder), "partition": client.number,
        "partitions": sizes.clients, "batch": sizes.batch, "steps": sizes.steps, "seed": client.number,
    }  # fmt: skip
    request = {
        "do": "fit",
        "config": config,
        "weights": str(folder / "weights.pkl"),
        "result": str(folder / "result.pkl"),
        "options": {} if client.name.startswith("article") else {"name": str(client.number)},
    }
    reply = ask(client, request, setting.deadline, look)
    return reply, peak_mb


def _settled(setting: Setting, back_mb: float | None) -> float:
    """Return the used memory a moment later; as soon as it is back at a level, where it should be."""
    time.sleep(_SETTLE_S)
    deadline = time.monotonic() + _BACK_S
    while back_mb is not None and setting.used_mb() > back_mb and time.monotonic() < deadline:
        time.sleep(0.02)
    return setting.used_mb()


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError where ours did not do what it promises."""
    for row in result["ways"]:
        if row["way"] == "ours" and not row["back_at_start"]:
            raise BenchmarkError("memory: with ours the GPU's memory was not back at its level at the start")


def show(result: dict[str, Any]) -> None:
    ways = result["ways"]
    count = max((len(row["used_after_mb"]) for row in ways), default=0)

    def cell(row: dict[str, Any], number: int) -> str:
        used = row["used_after_mb"]
        return f"{used[number] - row['start_mb']:.0f}" if number < len(used) else ""

    table.show(
        f"used memory after each client, MB above the start (GPU: {result['gpu_mb']:.0f} MB)",
        ("after client", *(row["way"] for row in ways)),
        [(number + 1, *(cell(row, number) for row in ways)) for number in range(count)],
    )
    table.show(
        "",
        ("way", "trained", "out of memory", "kept per client MB", "highest MB", "back at start"),
        [
            (
                row["way"],
                row["trained"],
                row["out_of_memory"],
                "" if row["kept_per_client_mb"] is None else f"{row['kept_per_client_mb']:.0f}",
                f"{max(row['highest_during_mb'], default=0):.0f}",
                "yes" if row["back_at_start"] else "no",
            )
            for row in ways
        ],
    )
