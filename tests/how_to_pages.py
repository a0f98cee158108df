"""The commands of the pages below docs/how-to."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[1] / "docs" / "how-to"


def commands(page: str) -> list[str]:
    """Return the lines of the first block of commands of a page, without comments."""
    block = re.search(r"```bash\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    lines = block[1].splitlines() if block else []
    return [command for line in lines if (command := re.sub(r"(^|\s)# ?.*", "", line).rstrip())]


def first_command(page: str, **instead: str) -> str:
    """Return the first command of a page with something else for some of its words.

    ``superlink`` stands for its address, ``port`` for the number of a port, ``ca`` for the certificate,
    ``data`` for the folder of data; where there is no ``ca``, the connection is insecure.
    """
    line = commands(page)[0]
    patterns = {
        "superlink": r"(?<=--superlink )\S+",
        "port": r"(?<=--port )\d+",
        "data": r"(?<=--data-dir )\S+",
        "ca": r"(?<=--root-certificates )\S+",
    }
    for name, word in instead.items():
        line = re.sub(patterns[name], word, line)
    return line if "ca" in instead else re.sub(r"--root-certificates \S+", "--insecure", line)
