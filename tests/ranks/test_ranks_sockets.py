"""Other hosts cannot reach the sockets of ranks, and other accounts cannot reach their Unix sockets."""

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

# 127.0.0.1 and ::1 in the format of /proc/net/tcp
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@needs_root
def test_other_hosts_and_accounts_cannot_connect_to_ranks(tmp_path: Path) -> None:
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


def test_nccl_uses_sockets_with_files_on_the_loopback_interface() -> None:
    network = run._network({})
    assert network == {
        "NCCL_IPC_USE_ABSTRACT_SOCKET": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    user_settings = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IPC_USE_ABSTRACT_SOCKET": "1",
    }
    assert run._network(user_settings) == {}


def test_socket_files_of_killed_ranks_are_removed() -> None:
    used, dead, other = (Path(f"/tmp/nccl-socket-0-{uuid.uuid4().hex[:16]}") for _ in range(3))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as open_socket:
        open_socket.bind(str(used))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as closed_socket:
            closed_socket.bind(str(dead))
        other.touch()
        try:
            remove_stale_nccl_sockets()
            exists = [path.exists() for path in (used, dead, other)]
        finally:
            for path in (used, dead, other):
                path.unlink(missing_ok=True)
    assert exists == [True, False, True]
