"""Traces of complete runs for the tests of reports: calls that wait, run and fail, and GPU samples."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvml_stub import GIB

from flower_gpu import trace
from flower_gpu.watch.history import History

START = 1_790_000_000.0
ERROR = "ValueError: no"
TRACEBACK = 'Traceback (most recent call last):\n  File "task.py", line 3, in train\n    <b>\x1b[2J'
Event = dict[str, Any]


def write(folder: Path, events: list[Event]) -> Path:
    """Create a folder and write events into its trace, as processes of a run do."""
    folder.mkdir(parents=True, exist_ok=True)
    for event in events:
        trace.write_to(folder, event["event"], **{k: v for k, v in event.items() if k != "event"})
    return folder / trace.FILE_NAME


def history_of(events: list[Event]) -> History:
    history = History()
    history.feed(events)
    return history


def at(when: float, event: str, /, **fields: Any) -> Event:
    return {"event": event, "time": START + when, **fields}


def on_hosts(events: list[Event], hosts: int, lost_at: float | None = None) -> list[Event]:
    """Distribute the GPUs of a run and their events over hosts of a Ray cluster.

    With ``lost_at``, the last host is lost that many seconds after the start.
    """
    uuids = [gpu["uuid"] for gpu in events[0]["gpus"]]
    host_of = {uuid: f"node{number % hosts}" for number, uuid in enumerate(uuids)}
    granted = [event for event in events if event["event"] == "lease_granted"]
    host_of_call = {event["call"]: host_of[event["gpus"][0]["uuid"]] for event in granted}
    host_events = [{**events[0], "host": "driver", "gpus": []}]
    for number in range(hosts):
        gpus = [{**gpu, "index": index // hosts} for index, gpu in enumerate(events[0]["gpus"])]
        host_gpus = [gpu for gpu in gpus if host_of[gpu["uuid"]] == f"node{number}"]
        host_events.append(joined(0.5, f"node{number}", concurrency=8, cores=16, gpus=host_gpus))
    for event in events[1:]:
        if event["event"] == "gpu_sample":
            for host in sorted(set(host_of.values())):
                host_gpus = [gpu for gpu in event["gpus"] if host_of[gpu["uuid"]] == host]
                host_events.append({**event, "gpus": host_gpus, "host": host})
            continue
        for gpu in event.get("gpus", []):
            if "index" in gpu:
                gpu["index"] = uuids.index(gpu["uuid"]) // hosts
        host = host_of_call.get(event.get("call", ""))
        host_events.append(event if host is None else {**event, "host": host})
    if lost_at is None:
        return host_events
    last = f"node{hosts - 1}"
    kept = [event for event in host_events if event.get("host") != last or event["time"] < START + lost_at]
    return sorted([*kept, lost(lost_at, last)], key=lambda event: event["time"])


def joined(when: float, host: str, **more: Any) -> Event:
    return at(when, "host_joined", host=host, host_id=f"id of {host}", **more)


def lost(when: float, host: str) -> Event:
    return at(when, "host_lost", host=host, host_id=f"id of {host}", reason="The <actor> died\nmore")


@dataclass
class Run:
    """A run of clients that share GPUs. Leases have the same size, and are granted first come, first served.

    A release is written ``late_s`` seconds after it happens, as by a busy process. Meanwhile another process
    may get a lease and write its grant.
    """

    clients: int = 8
    gpus: int = 1
    rounds: int = 1
    lease_gib: float = 4.0
    capacity_gib: float = 15.75
    base_gib: float = 0.5
    late_s: float = 0.05
    failing: float = 0.0
    lost: float = 0.0
    seed: int = 0
    names: list[str] = field(default_factory=list)

    @property
    def uuids(self) -> list[str]:
        return [f"GPU-{number:08d}-0000" for number in range(self.gpus)]

    def events(self) -> list[Event]:
        """Return all events in the order of their times."""
        self._random = random.Random(self.seed)
        self._events = [self._started()]
        # Time, GPU and change of the used memory in bytes, for each allocation and release.
        self._samples: list[tuple[float, str, float]] = []
        now = 1.0
        for number in range(1, self.rounds + 1):
            self._add(now, "round_started", round=number, task="train", messages=self.clients)
            end, failed = self._round(number, now + 0.01)
            metrics = {"train_loss": 2.0 / number, "num-examples": 100}
            self._add(
                end, "round_finished", round=number, task="train", messages=self.clients, failed=failed,
                seconds=end - now, metrics=metrics,
            )  # fmt: skip
            metrics = {"loss": 2.1 / number, "accuracy": 1 - 0.9 / number, "f1": 1 - 0.95 / number}
            self._add(end + 0.1, "round", round=number, num_rounds=self.rounds, metrics=metrics)
            now = end + 0.5
        self._look(now + 0.5)
        self._add(now + 0.6, "run_finished", outcome="completed", seconds=now + 0.6)
        return sorted(self._events, key=lambda event: event["time"])

    def _started(self) -> Event:
        sizes = {"total_bytes": 16 * GIB, "capacity_bytes": int(self.capacity_gib * GIB)}
        gpus = [
            {"uuid": uuid, "index": number, "name": "NVIDIA A100", **sizes}
            for number, uuid in enumerate(self.uuids)
        ]
        return at(
            0, "run_started", kind="simulate", name="digits", clients=self.clients, num_rounds=self.rounds,
            pid=100, host="node7", cores=16, version="0.1.0", gpus=gpus,
        )  # fmt: skip

    def _add(self, when: float, event: str, /, **fields: Any) -> None:
        self._events.append(at(when, event, **fields))

    def _round(self, number: int, now: float) -> tuple[float, int]:
        """Let each client make one call. Return the end of the last call and the number of failed calls."""
        clients = self.names or [str(client) for client in range(self.clients)]
        free = dict.fromkeys(self.uuids, int(self.capacity_gib * GIB))
        running: list[tuple[float, str, int]] = []
        ends, failed = [now], 0
        nbytes = int(self.lease_gib * GIB)
        for index, client in enumerate(clients):
            call = {"call": f"{number}-{index}", "client": client, "task": "train", "round": number}
            self._add(now, "lease_requested", **call, caller_pid=7, count=1, memory_bytes=nbytes)
        granted = now
        for index, client in enumerate(clients):
            call = {"call": f"{number}-{index}", "client": client, "task": "train", "round": number}
            uuid = next((uuid for uuid in self.uuids if free[uuid] >= nbytes), None)
            while uuid is None:
                end, released, size = heapq.heappop(running)
                granted, free[released] = max(granted, end), free[released] + size
                uuid = next((uuid for uuid in self.uuids if free[uuid] >= nbytes), None)
            free[uuid] -= nbytes
            end, is_ok = self._call(call, uuid, nbytes, granted + 0.002)
            heapq.heappush(running, (end, uuid, nbytes))
            ends.append(end)
            failed += not is_ok
        return max(ends), failed

    def _call(self, call: Event, uuid: str, nbytes: int, granted: float) -> tuple[float, bool]:
        """Write the events of a call after its request. Return the time of its release and its success."""
        draw = self._random
        lease, pid = f"lease-{call['call']}", draw.randrange(1000, 9999)
        gpus = [
            {"uuid": uuid, "index": self.uuids.index(uuid), "name": "NVIDIA A100", "memory_bytes": nbytes}
        ]
        started = granted + draw.uniform(0.01, 0.1)
        task, result = started + draw.uniform(0.1, 1.0), started + draw.uniform(1.5, 4.0)
        finished = result + draw.uniform(0.05, 0.4)
        self._add(granted, "lease_granted", **call, lease=lease, gpus=gpus, alone=False, waited_s=0.1)
        self._add(started, "worker_started", **call, lease=lease, pid=pid, start_method="spawn", threads=2)
        self._add(task, "task_started", call=call["call"], client=call["client"], pid=pid)
        self._samples += [(task, uuid, 0.8 * nbytes), (finished, uuid, -0.8 * nbytes)]
        outcome = "ok"
        if draw.random() < self.failing:
            outcome = draw.choice(["error", "died", "out of memory"])
        # The worker and its caller were killed, so the trace has no further events of this call.
        if draw.random() < self.lost:
            return finished, False
        if outcome == "out of memory":
            self._add(
                result, "out_of_memory", call=call["call"], client=call["client"], task="train", lease=lease,
                uuid=uuid, kind="over_cap", then="failed",
            )  # fmt: skip
        if outcome == "ok":
            self._add(result, "worker_result", call=call["call"], client=call["client"], pid=pid)
        used = [{"uuid": uuid, "peak_bytes": int(0.8 * nbytes), "cap_bytes": nbytes - GIB // 2}]
        self._add(
            finished, "worker_finished", **call, lease=lease, pid=pid, start_method="spawn", gpus=used,
            task_at=START + task, result_at=START + result if outcome == "ok" else None,
            seconds=finished - granted, outcome=outcome,
            error=None if outcome == "ok" else f"train of client {call['client']}: {ERROR} <i>{outcome}</i>",
            traceback=TRACEBACK if outcome == "error" else "",
        )  # fmt: skip
        self._add(finished + 0.01 + self.late_s, "lease_released", **call, lease=lease, held_s=1.0)
        return finished + 0.01, outcome == "ok"

    def _look(self, end: float) -> None:
        """Write a GPU sample every half second, as the driver would report it."""
        for number in range(int(end / 0.5) + 1):
            gpus = []
            for uuid in self.uuids:
                used = sum(size for when, of, size in self._samples if of == uuid and when <= number * 0.5)
                busy = {"utilization_percent": 90 if used else 0, "temperature_c": 60 if used else 40}
                gpus.append({"uuid": uuid, "used_bytes": int(self.base_gib * GIB + used), **busy})
            self._add(number * 0.5, "gpu_sample", gpus=gpus)
