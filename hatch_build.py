"""Metadata that name where the repository is, which only who builds the package knows.

With ``FLOWER_GPU_REPOSITORY=https://HOST/OWNER/NAME`` links and pictures of the README lead there, so that
they work on a package index, and the package has links to its project. ``@REVISION`` after it, as for pip,
names a branch, a tag or a commit. Without the variable the README stays as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_VARIABLE = "FLOWER_GPU_REPOSITORY"
_PICTURES = (".png", ".svg", ".jpg", ".gif", ".webp")


def absolute(text: str, repository: str, revision: str) -> str:
    """Return Markdown whose links and pictures lead to a repository.

    Parameters
    ----------
    text : str
        Markdown of the topmost folder.
    repository : str
        Address, as in ``https://github.com/OWNER/flower-gpu``.
    revision : str
        Branch, tag or commit; ``HEAD`` is the newest commit.
    """

    def replaced(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if re.match(r"[a-z]+:|#|//", target):
            return match[0]
        kind = "raw" if target.endswith(_PICTURES) else "blob"
        return f"{before}{repository}/{kind}/{revision}/{target}{after}"

    blocks = re.split(r"(?ms)(^```.*?^```)", text)
    for number in range(0, len(blocks), 2):  # the others are code, which has no links
        for link in (r"(\]\()([^)\s]+)(\))", r'((?:src|srcset|href)=")([^"\s]+)(")'):
            blocks[number] = re.sub(link, replaced, blocks[number])
    return "".join(blocks)


class CustomMetadataHook(MetadataHookInterface):
    """Reads ``README.md``, and the address of the repository from the environment."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add what ``pyproject.toml`` calls dynamic."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if address := os.environ.get(_VARIABLE):
            parts = re.fullmatch(r"(https://[^\s/@]+/[^\s@]+?)/?(?:@([^\s@]+))?", address)
            if not parts:
                raise ValueError(
                    f"{_VARIABLE} is {address!r}, not an address as https://github.com/OWNER/NAME"
                )
            repository, revision = parts[1], parts[2] or "HEAD"
            text = absolute(text, repository, revision)
            blob = f"{repository}/blob/{revision}"
            metadata["urls"] = {
                "Documentation": f"{repository}/tree/{revision}/docs",
                "Changelog": f"{blob}/CHANGELOG.md",
                "Source": repository,
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
