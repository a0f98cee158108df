"""Reads the tables of files in the docs."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def files_in_table(page: str, heading: str = "") -> set[str]:
    """Return the files in the first column of the first table of files below a heading."""
    text = (DOCS / page).read_text()
    text = text[text.index(f"{heading}\n") if heading else 0 :]
    table = text[text.index("| file |") :].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def files_in(folder: Path) -> set[str]:
    """Return the names in a folder as the tables write them, with a slash after folders."""
    return {path.name + "/" * path.is_dir() for path in folder.iterdir()}
