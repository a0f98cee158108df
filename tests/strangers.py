"""Checks which sockets a process of another account can reach. Needs Linux, and root to switch accounts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from run_programs import run

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

_ACCEPTS = 0x10000  # __SO_ACCEPTCON in linux/net.h
_LISTENS = "0A"  # TCP_LISTEN in net/tcp_states.h

_STRANGER = """
import json, os, socket, sys
os.setgroups([])
os.setresgid(54321, 54321, 54321)
os.setresuid(54321, 54321, 54321)
asked = json.loads(sys.argv[1])
reached = []
for kind, address in asked["sockets"]:
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.settimeout(20)
    try:
        connection.connect(address)
        reached.append(address)
    except OSError:
        pass
for folder in asked["folders"]:
    try:
        os.stat(os.path.join(folder, "."))
        reached.append(folder)
    except PermissionError:
        pass
print(json.dumps(reached))
"""


def addresses_of(pids: Iterable[int]) -> list[tuple[int, str]]:
    """Return kind and address of each Unix socket of these processes that accepts connections."""
    inodes = _socket_inodes(pids)
    addresses = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, kind, _, inode, *name = line.split(maxsplit=7)
        if inode in inodes and name and (int(flags, 16) & _ACCEPTS or int(kind, 16) == 2):
            addresses.append((int(kind, 16), name[0].replace("@", "\0")))
    return sorted(set(addresses))


def listening_on(pids: Iterable[int]) -> set[str]:
    """Return the addresses, in the kernel's notation, on which these processes accept TCP connections."""
    inodes = _socket_inodes(pids)
    text = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    sockets = [line.split() for line in text.splitlines()]
    return {
        fields[1].partition(":")[0] for fields in sockets if fields[3] == _LISTENS and fields[9] in inodes
    }


def reached_by_a_stranger(sockets: Iterable[tuple[int, str]], folders: Iterable[Path] = ()) -> list[str]:
    """Return the addresses that a process of another account can connect to, and the folders it can enter."""
    asked = json.dumps({"sockets": list(sockets), "folders": list(map(str, folders))})
    program = [sys.executable, "-S", "-c", _STRANGER, asked]
    # The current folder must be one that the stranger can enter, or the program would fail for that reason.
    done = run(program, check=True, cwd="/")
    reached: list[str] = json.loads(done.stdout)
    return reached


def _socket_inodes(pids: Iterable[int]) -> set[str]:
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # A descriptor may have been closed meanwhile.
            with suppress(FileNotFoundError):
                target = str(link.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    return inodes
