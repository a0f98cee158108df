"""A second distribution of Flower next to the first, as pip installs it: its metadata and its commands."""

from __future__ import annotations

from pathlib import Path

from flower_gpu.programs import commands


def installed_again(folder: Path, name: str, version: str = "1.99") -> Path:
    """Write the metadata of a distribution of Flower, and return the folder for ``sys.path``."""
    packages = folder / "packages"
    info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    scripts = "".join(f"{script} = {value}\n" for script, value in commands.flowers().items())
    (info / "entry_points.txt").write_text(f"[console_scripts]\n{scripts}")
    return packages
