"""Part ``memory``: memory of the GPU after each of several clients has trained once.

The article's clients train in their own processes and stay, as Flower's clients do between rounds. Our
clients stay, too, but each training runs in a worker that exits.
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
#: The driver or a display may take some memory meanwhile.
_TOLERANCE_MB = 64.0
#: The driver frees the memory of a process some time after its exit.
_FREE_AGAIN_S = 5.0
_SETTLE_S = 0.3


def measure(setting: Setting) -> dict[str, Any]:
    images = prepare_images(setting)
    with clients("ours", 1) as (client,):
        setting.make_initial_weights(client)
    start = setting.memory()
    rows = []
    for way in _WAYS:
        start_mb = _settled_mb(setting, start.used_bytes / MB)
        row = _measure(setting, way, start_mb)
        row["after_all_exited_mb"] = round(_settled_mb(setting, start_mb), 1)
        rows.append(row)
    return {
        "model": setting.model,
        "images": images,
        "batch": setting.sizes.batch,
        "gpu_mb": round(start.total_bytes / MB, 1),
        "clients": setting.sizes.clients,
        "ways": rows,
    }


def _measure(setting: Setting, way: str, start_mb: float) -> dict[str, Any]:
    used_mb: list[float] = []
    peaks_mb: list[float] = []
    is_full = is_cut_short = False
    try:
        with clients(way, setting.sizes.clients) as started:
            for client in started:
                reply, peak_mb = _train(setting, client)
                if is_full := bool(reply.get("out_of_memory")):
                    # The next clients would fail in the same way.
                    break
                checked(reply, client)
                peaks_mb.append(round(peak_mb, 1))
                expected_mb = start_mb + _TOLERANCE_MB if way == "ours" else None
                used_mb.append(round(_settled_mb(setting, expected_mb), 1))
    except TimeLimitError as error:
        print(f"memory: {way}: {error}; the earlier figures count", flush=True)
        is_cut_short = True
    above_mb = [used - start_mb for used in used_mb]
    return {
        "way": way,
        "start_mb": round(start_mb, 1),
        "used_after_mb": used_mb,
        "peak_during_mb": peaks_mb,
        "trained": len(used_mb),
        "out_of_memory": is_full,
        "cut_short": is_cut_short,
        "kept_per_client_mb": round(above_mb[-1] / len(above_mb), 1) if above_mb else None,
        "back_at_start": bool(above_mb) and all(abs(extra) <= _TOLERANCE_MB for extra in above_mb),
    }


def _train(setting: Setting, client: Client) -> tuple[dict[str, Any], float]:
    """Return the reply of a client and the highest memory of the GPU meanwhile."""
    peak_mb = 0.0

    def look() -> None:
        nonlocal peak_mb
        peak_mb = max(peak_mb, setting.used_mb())

    request = setting.fit_request(client, setting.sizes.clients, client.number)
    return ask(client, request, setting.deadline, look), peak_mb


def _settled_mb(setting: Setting, expected_mb: float | None) -> float:
    """Return the memory in use after a pause, or earlier if it is back at the expected level."""
    time.sleep(_SETTLE_S)
    deadline = time.monotonic() + _FREE_AGAIN_S
    while expected_mb is not None and setting.used_mb() > expected_mb and time.monotonic() < deadline:
        time.sleep(0.02)
    return setting.used_mb()


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError if ours has kept memory."""
    for row in result["ways"]:
        if row["way"] == "ours" and not row["back_at_start"]:
            raise BenchmarkError("memory: with ours, the GPU's memory was not free again")


def show(result: dict[str, Any]) -> None:
    title = f"memory in use after each client (GPU: {result['gpu_mb']:.0f} MB)"
    table.show(title, result["ways"], "way start_mb used_after_mb")
    table.show("clients", result["ways"], "way trained out_of_memory kept_per_client_mb back_at_start")
