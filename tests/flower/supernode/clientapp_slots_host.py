"""Processes that want a slot each, and do what their parent is told (JSON lines on its stdin)."""

from __future__ import annotations

import json
import os
import signal
import sys

from flower_gpu.flower import node_slots as slots


def be_a_message(go: int) -> None:
    """Wait for a slot, hold it until told to let go of it, and end."""
    with slots.held(os.environ):
        print(json.dumps({"holds": os.getpid()}), flush=True)
        os.read(go, 1)
    print(json.dumps({"done": os.getpid()}), flush=True)


def main() -> None:
    """Start, release and kill them."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gates: dict[int, int] = {}
    for line in sys.stdin:
        what, pid = json.loads(line)
        if what == "start":
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                for gate in [write, *gates.values()]:
                    os.close(gate)
                try:
                    be_a_message(read)
                finally:
                    os._exit(0)
            os.close(read)
            gates[pid] = write
            print(json.dumps({"started": pid}), flush=True)
        elif what == "release":
            os.write(gates[pid], b"x")
        elif what == "kill":
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
