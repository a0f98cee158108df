"""The sockets of ranks: other hosts reach none of them, and other accounts no Unix socket."""

from __future__ import annotations

import socket
import threading
import uuid
from pathlib import Path
from typing import Any

from strangers import addresses_of, listening_on, needs_root, reached_by_a_stranger

from flower_gpu import run_in_worker
from flower_gpu.ranks import run
from flower_gpu.ranks.rank import remove_stale_nccl_sockets

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1, as /proc/net/tcp has them


@needs_root
def test_who_can_connect(tmp_path: Path) -> None:
    ready, go = tmp_path / "ready", tmp_path / "go"
    values: list[Any] = []
    thread = threading.Thread(
        target=lambda: values.append(run_in_worker("ranks_tasks:wait_for", str(ready), str(go), num_gpus=2))
    )
    thread.start()
    try:
        files = [Path(f"{ready}{rank}") for rank in (0, 1)]
        while not all(file.exists() and file.read_text() for file in files):
            assert thread.is_alive()
            thread.join(0.05)
        pids = [int(file.read_text()) for file in files]
        assert listening_on(pids) and listening_on(pids) <= LOOPBACK
        assert reached_by_a_stranger(addresses_of(pids)) == []
    finally:
        go.touch()
        thread.join()
    assert values == [0]


def test_nccls_sockets_have_files() -> None:
    network = run._network({})
    assert network == {
        "NCCL_IPC_USE_ABSTRACT_SOCKET": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    asked = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IPC_USE_ABSTRACT_SOCKET": "1"}
    assert run._network(asked) == {}


def test_files_of_sockets_that_killed_ranks_leave() -> None:
    used, dead, other = (Path(f"/tmp/nccl-socket-0-{uuid.uuid4().hex[:16]}") for _ in range(3))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(str(used))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
            gone.bind(str(dead))
        other.touch()
        try:
            remove_stale_nccl_sockets()
            left = [path.exists() for path in (used, dead, other)]
        finally:
            for path in (used, dead, other):
                path.unlink(missing_ok=True)
    assert left == [True, False, True]
