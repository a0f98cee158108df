"""Runs the commands of docs/how-to/federation.md in three shells, as a user does.

Arguments: the page, and the SuperLink's port.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from waiting import until

from flower_gpu.launch import ports

#: Seconds for the third shell. It must end before the test's limit, which would kill this program and leave
#: the SuperLink and the SuperNodes running.
LIMIT_S = 220.0


def main() -> int:
    page, port = Path(sys.argv[1]), int(sys.argv[2])
    superlink, supernodes, *third = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    shell = ["bash", "-ec"]
    with subprocess.Popen([*shell, f"exec {superlink}"]) as link:
        nodes = None
        try:
            until(lambda: link.poll() is not None or ports.is_healthy(port), "the SuperLink answers")
            nodes = subprocess.Popen([*shell, f"exec {supernodes}"])
            return subprocess.run([*shell, "\n".join(third)], check=False, timeout=LIMIT_S).returncode
        finally:
            for process in filter(None, (nodes, link)):
                process.terminate()
                process.wait(60)
            subprocess.run(["flower-gpu", "workers", "stop"], check=True)


if __name__ == "__main__":
    sys.exit(main())
