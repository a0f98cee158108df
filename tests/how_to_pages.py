"""Reads commands and code from pages of the docs, mainly docs/how-to."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[1] / "docs" / "how-to"


def blocks(page: str | Path, language: str) -> list[str]:
    """Return the code blocks of a page in a language. A name stands for a page below docs/how-to."""
    texts: list[str] = re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    return texts


def block(page: str | Path, language: str, having: str) -> str:
    """Return the only code block of a page that contains the text `having`."""
    (matching,) = (text for text in blocks(page, language) if having in text)
    return matching


def commands(page: str, having: str = "") -> list[str]:
    """Return the commands of a page's first block that contains `having`, without comments."""
    lines = next((text for text in blocks(page, "bash") if having in text), "").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s)# ?.*", "", line).rstrip())]


def first_command(page: str, having: str = "", **instead: str) -> str:
    """Return the first command of a page's first block that contains `having`, with some words replaced.

    ``superlink`` replaces the address, ``port`` the number of a port, ``ca`` the certificate, and ``data``
    the folder of data. Without ``ca``, the connection is insecure.
    """
    line = commands(page, having)[0]
    patterns = {
        "superlink": r"(?<=--superlink )\S+",
        "port": r"(?<=--port )\d+",
        "data": r"(?<=--data-dir )\S+",
        "ca": r"(?<=--root-certificates )\S+",
    }
    for name, word in instead.items():
        line = re.sub(patterns[name], word, line)
    return line if "ca" in instead else re.sub(r"--root-certificates \S+", "--insecure", line)
