"""The metadata for a package index, built with and without the address of the repository."""

from __future__ import annotations

import re
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Protocol

import pytest

REPOSITORY = Path(__file__).parents[1]
ADDRESS = "https://github.com/OWNER/flower-gpu"
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Metadata(Protocol):
    """Builds the metadata of a wheel with ``FLOWER_GPU_REPOSITORY`` set to an address."""

    def __call__(self, address: str | None) -> Message: ...


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Metadata:
    def built(address: str | None) -> Message:
        from hatchling import build

        monkeypatch.delenv("FLOWER_GPU_REPOSITORY", raising=False)
        if address is not None:
            monkeypatch.setenv("FLOWER_GPU_REPOSITORY", address)
        monkeypatch.chdir(REPOSITORY)
        folder = build.prepare_metadata_for_build_wheel(str(tmp_path))
        return message_from_string((tmp_path / folder / "METADATA").read_text())

    return built


def readme() -> str:
    return (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("address", [None, ""])
def test_without_an_address_the_readme_is_unchanged(metadata: Metadata, address: str | None) -> None:
    message = metadata(address)
    assert message.get_payload().strip() == readme().strip()
    assert message["Project-URL"] is None and message["Author"] == "The flower-gpu authors"


@pytest.mark.parametrize(
    ("address", "revision"), [(f"{ADDRESS}@v0.1.0", "v0.1.0"), (ADDRESS, "HEAD"), (f"{ADDRESS}/", "HEAD")]
)
def test_with_an_address_each_link_points_to_the_repository(
    metadata: Metadata, address: str, revision: str
) -> None:
    message = metadata(address)
    before, after = LINK.findall(readme()), LINK.findall(message.get_payload())
    assert len(after) == len(before) > 10
    for old, new in zip(before, after, strict=True):
        if old.startswith("https:") or old.startswith("#"):
            assert new == old
            continue
        kind = "raw" if old.endswith(".png") else "blob"
        assert new == f"{ADDRESS}/{kind}/{revision}/{old}"
    assert f"/raw/{revision}/docs/" in message.get_payload()
    urls = dict(url.split(", ") for url in message.get_all("Project-URL", []))
    assert urls["Source"] == ADDRESS and urls["Issues"] == f"{ADDRESS}/issues"
    for name, folder in (("Documentation", "tree"), ("Changelog", "blob")):
        kind, at, path = urls[name].removeprefix(f"{ADDRESS}/").split("/", 2)
        assert (kind, at) == (folder, revision) and (REPOSITORY / path).exists()


@pytest.mark.parametrize("address", ["git@github.com:OWNER/flower-gpu", "flower-gpu", "https://github.com"])
def test_another_kind_of_address_is_refused(metadata: Metadata, address: str) -> None:
    with pytest.raises(ValueError, match=f"FLOWER_GPU_REPOSITORY is '{address}'"):
        metadata(address)


def test_links_in_code_stay_and_pictures_that_are_links_are_rewritten() -> None:
    import runpy

    pytest.importorskip("hatchling")
    absolute = runpy.run_path(str(REPOSITORY / "hatch_build.py"))["absolute"]
    text = '[![a](x.png)](b.md#c) [d](#d) <img src="y.svg">\n```python\n[e](f.md)\n```\n[g](h.md)'
    assert absolute(text, "R", "V") == (
        '[![a](R/raw/V/x.png)](R/blob/V/b.md#c) [d](#d) <img src="R/raw/V/y.svg">\n'
        "```python\n[e](f.md)\n```\n[g](R/blob/V/h.md)"
    )
