"""Pages of the repository are converted for the site. `.ci/run` builds the site itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import flower_gpu

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site() -> object:
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    try:
        import site_hooks
    finally:
        sys.path.pop(0)
    return site_hooks


def test_markdown_files_outside_of_docs_are_pages(site) -> None:  # type: ignore[no-untyped-def]
    pages = site.outside()
    assert pages["index.md"] == "README.md"
    assert pages["examples/quickstart.md"] == "examples/quickstart/README.md"
    assert pages["project/changelog.md"] == "CHANGELOG.md"
    figures = "benchmarks/results/isolation-2-cores.json"
    assert pages[f"project/{figures}"] == figures
    assert len(set(pages.values())) == len(pages)
    assert not [page for page in pages if (REPOSITORY / "docs" / page).exists()], (
        "two pages have the same path"
    )


def test_links_point_to_pages_or_to_the_repository_or_become_text(site) -> None:  # type: ignore[no-untyped-def]
    pages = {"index.md": "README.md", "examples/jax.md": "examples/jax/README.md"}

    def changed(text: str, source: str, address: str = "") -> str:
        return str(site.links_of_the_site(text, source, pages, address))

    watch = "![memory](docs/how-to/images/report-memory.png), [watch](docs/how-to/watch.md#report)"
    assert changed(watch, "README.md") == watch.replace("docs/", "")
    assert (
        changed("[jax](../../examples/jax/README.md#a)", "docs/how-to/x.md") == "[jax](../examples/jax.md#a)"
    )
    assert changed("[home](../../README.md)", "examples/jax/README.md") == "[home](../index.md)"
    assert changed("see [the code](../../run.sh) there", "docs/how-to/x.md") == "see the code there"
    with_address = changed(
        "[the code](../../run.sh)", "docs/how-to/x.md", "https://git.example/us/flower-gpu/blob/HEAD"
    )
    assert with_address == "[the code](https://git.example/us/flower-gpu/blob/HEAD/run.sh)"
    kept = (
        "[gone](../nowhere.md), [web](https://flower.ai), [here](#gpus)\n```md\n[code](../../run.sh)\n```\n"
    )
    assert changed(kept, "docs/how-to/x.md") == kept


def test_a_new_page_is_added_to_the_navigation(site) -> None:  # type: ignore[no-untyped-def]
    pages = ["index.md", "how-to/README.md", "how-to/a.md", "how-to/b.md", "how-to/c.md", "new/x.md"]
    run = "\n## Run\n\n- [c](c.md#part)\n- [a](a.md), [c](c.md)\n"
    text = f"# How-to\n\nSee [d](d.md).\n{run}\n## No page\n\n## Again\n[c](c.md)\n"
    nav = site.navigation([*pages, "how-to/d.md"], {"how-to": text})
    in_groups = ["how-to/README.md", "how-to/d.md", {"Run": ["how-to/c.md", "how-to/a.md"]}, "how-to/b.md"]
    assert nav == [{"Home": "index.md"}, {"How-to": in_groups}, {"New": ["new/x.md"]}]


def test_command_lines_break_before_an_option_and_not_within(site) -> None:  # type: ignore[no-untyped-def]
    html = 'see :class:<code>X</code>, <code>top --once</code>, <b id="--once">--once</b>'
    converted = site.on_page_content(html, None, None, None)
    whole = '<span class="option">--once</span>'
    assert converted == f'see <code>X</code>, <code>top {whole}</code>, <b id="--once">--once</b>'
    style = (REPOSITORY / "scripts/site.css").read_text()
    assert ".option {" in style and "pre-wrap" in style


def test_pictures_have_a_white_background_because_the_site_inverts_them() -> None:
    # This import takes a while, which would also delay the mere collection of tests.
    from matplotlib.image import imread

    pictures = [*(REPOSITORY / "docs").glob("*/images/*.png")]
    assert pictures
    for picture in pictures:
        assert imread(picture)[..., :3].mean() > 0.5, picture


def test_the_site_has_the_docstring_of_every_public_name(site) -> None:  # type: ignore[no-untyped-def]
    names = site.public_names()
    assert names == set(flower_gpu.__all__)
    page = site.with_docstrings((REPOSITORY / "docs/reference/python.md").read_text(), names)
    shown = [line.removeprefix("::: ") for line in page.splitlines() if line.startswith("::: ")]
    assert len(shown) == len(set(shown))
    bases = {"FlowerGPUError", "WorkerError", "GPUError"}
    assert {f"flower_gpu.{name}" for name in names - bases} <= set(shown)
    assert "flower_gpu.jax.weights.set_weights" in shown, (
        "a second name of a row is of the first one's module"
    )
