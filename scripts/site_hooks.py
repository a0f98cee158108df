"""What mkdocs does not do by itself for the site.

- A Markdown file outside of docs/ is a page, if another page links to it: README.md is the home page. So is a
  JSON file with measured figures.
- The navigation is made from the folders, in the order in which a folder's README.md links to its pages, with
  its headings as groups. So a new file needs no entry anywhere.
- A link to a file that is no page leads to the repository, if FLOWER_GPU_REPOSITORY names one. Else its text
  stays.
- reference/python.md shows the docstring of each name in its tables.
- Mermaid comes from this site and from no other host. Where scripts/site.sh could not get it, diagrams stay
  text.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {
    "tutorial": "Tutorial",
    "how-to": "How-to",
    "explanation": "Explanation",
    "reference": "Reference",
    "examples": "Examples",
    "project": "Project",
}
STYLE = "assets/site.css"
MERMAID = Path(sys.prefix, "share", "mermaid")
outside_docs: dict[str, str] = {}  # {page: source}, found anew in each build of `mkdocs serve`
SCRIPT = "assets/mermaid/mermaid.tiny.js"

FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Of a table's first column, or the first name of a paragraph.
CELL = re.compile(r"^(?:\| (?P<cell>`.+?) \||(?P<first>`\w+`))", re.MULTILINE)


def page_of(source: str) -> str:
    """Return where the site has a file: `examples/jax/README.md` is `examples/jax.md`."""
    if source == "README.md":
        return "index.md"
    folder, _, rest = source.partition("/")
    if folder == "docs":
        return rest
    if folder != "examples":
        source = f"project/{source.lower() if folder == source else source}"
    return re.sub("(?<=/)([^/]+)/README.md$", r"\1.md", source)


def outside(root: Path = ROOT) -> dict[str, str]:
    """Return {page: source} of the files outside of docs/ that docs/ and the README lead to.

    These are Markdown files, and JSON files of measured figures, which a browser shows as they are.
    """
    todo = ["README.md", *(path.relative_to(root).as_posix() for path in root.glob("docs/**/*.md"))]
    seen: dict[str, str] = {}
    while todo:
        source = todo.pop()
        if page_of(source) in seen or not (root / source).is_file():
            continue
        seen[page_of(source)] = source
        if not source.endswith(".md"):
            continue
        for link in LINK.finditer(without_fences((root / source).read_text())):
            target = target_of(source, link["target"].partition("#")[0])
            if target.endswith((".md", ".json")):
                todo.append(target)
    return {page: source for page, source in seen.items() if not source.startswith("docs/")}


def without_fences(text: str) -> str:
    """Return a text without its blocks of code."""
    return FENCE.sub("", text)


def target_of(source: str, link: str) -> str:
    """Return the file of the repository that a link in a file leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link)) if link else source


def links_of_the_site(text: str, source: str, pages: dict[str, str], address: str, root: Path = ROOT) -> str:
    """Return a text with links as the site has them. Those that lead nowhere stay: mkdocs reports them."""
    here = posixpath.dirname(page_of(source)) or "."

    def changed(link: re.Match[str]) -> str:
        path, hash_, anchor = link["target"].partition("#")
        if not path or ":" in path or path.startswith("/"):
            return link[0]
        target = target_of(source, path)
        page = page_of(target)
        if (target.startswith("docs/") and (root / target).is_file()) or page in pages:
            return f"{link['image']}[{link['text']}]({posixpath.relpath(page, here)}{hash_}{anchor})"
        if not (root / target).exists():
            return link[0]
        return f"[{link['text']}]({address}/{target})" if address else link["text"]

    parts = FENCE.split(text)  # every second one is a fence
    return "".join(part if number % 2 else LINK.sub(changed, part) for number, part in enumerate(parts))


def navigation(pages: list[str], read: dict[str, str]) -> list[object]:
    """Return what mkdocs calls `nav`: home, and a section for each folder.

    Parameters
    ----------
    pages : list of str
        All pages of the site.
    read : dict of str to str
        The text of each section's first page, by the section's folder.
    """
    nav: list[object] = [{"Home": "index.md"}]
    folders = {page.partition("/")[0] for page in pages if "/" in page}
    for folder in [*SECTIONS, *sorted(folders - SECTIONS.keys())]:
        left = sorted(page for page in pages if page.startswith(f"{folder}/"))
        entries: list[object] = [page for page in left if page == f"{folder}/README.md"]
        left = [page for page in left if page not in entries]
        texts = re.split(r"(?m)^## (.+)$", read.get(folder, ""))
        for heading, text in zip(["", *texts[1::2]], texts[::2], strict=True):
            linked = [link["target"].partition("#")[0] for link in LINK.finditer(text)]
            named = dict.fromkeys(posixpath.normpath(posixpath.join(folder, target)) for target in linked)
            group = [page for page in named if page in left]
            left = [page for page in left if page not in group]
            entries += [{heading: group}] if heading and group else group
        if entries or left:
            nav.append({SECTIONS.get(folder, folder.capitalize()): entries + left})
    return nav


def with_docstrings(text: str, public: set[str]) -> str:
    """Return a page of tables with the docstrings of the names in each section below it."""
    sections = re.split(r"(?m)^(?=## )", text)
    done: list[str] = []
    for number, section in enumerate(sections):
        for cells in CELL.finditer(section):
            module = ""
            for name in re.findall(r"`([\w.]+)[(`]", cells["cell"] or cells["first"]):
                if "." in name:
                    module = name.rpartition(".")[0]
                elif not module and name not in public:
                    continue
                else:
                    name = f"{module or 'flower_gpu'}.{name}"
                if name not in done:
                    done.append(name)
                    sections[number] = f"{sections[number].rstrip()}\n\n::: {name}\n\n"
    return "".join(sections)


def public_names() -> set[str]:
    """Return `flower_gpu.__all__` without an import: torch and Flower are not installed here."""
    for statement in ast.parse((ROOT / "flower_gpu" / "__init__.py").read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "_HOMES":
            return {name for names in ast.literal_eval(statement.value).values() for name in names.split()}
    raise ValueError("flower_gpu/__init__.py has no _HOMES")


def blobs() -> str:
    """Return the address below which the repository has its files, or nothing."""
    repository, _, revision = os.environ.get("FLOWER_GPU_REPOSITORY", "").partition("@")
    return repository and f"{repository.rstrip('/')}/blob/{revision or 'HEAD'}"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Draw diagrams, if Mermaid is there, and link to the repository, if it has an address."""
    if blobs():  # and not repo_url, for which pages would ask GitHub how many stars there are
        repository = blobs().partition("/blob/")[0]
        config.extra["social"] = [
            {"icon": "fontawesome/brands/git-alt", "link": repository, "name": "Repository"}
        ]
    config.extra_css.append(STYLE)
    if (MERMAID / "mermaid.tiny.js").exists():
        from pymdownx.superfences import fence_code_format

        fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
        config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/, and make the navigation."""
    from mkdocs.structure.files import File

    outside_docs.clear()
    outside_docs.update(outside())
    for page, source in outside_docs.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, STYLE, abs_src_path=str(ROOT / "scripts" / "site.css")))
    for path in MERMAID.glob("*"):
        files.append(File.generated(config, f"assets/mermaid/{path.name}", abs_src_path=str(path)))
    pages = [file.src_uri for file in files.documentation_pages()]
    first = {
        file.src_uri.partition("/")[0]: file.content_string
        for file in files
        if file.src_uri.endswith("/README.md")
    }
    config.nav = navigation(pages, first)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change a page's links, and add docstrings."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]  # nothing beside it in its section
    source = outside_docs.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    text = links_of_the_site(markdown, source, outside_docs, blobs())
    return with_docstrings(text, public_names()) if page.file.src_uri == "reference/python.md" else text


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out roles of docstrings, as in :class:`X`, which Markdown does not know; keep options whole."""
    html = re.sub(r":(?:class|func|meth|mod|data|attr|exc):(?=<code>)", "", html)
    return CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load Mermaid in the pages that need it."""
    if 'class="mermaid"' not in output:
        return output
    # Before the theme's own script, which asks another host for Mermaid if it is not there by then.
    script = posixpath.relpath(SCRIPT, posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("</head>", f'<script src="{script}"></script></head>', 1)
