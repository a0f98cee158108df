"""The imports of an app, as read from its source, match those at its actual import."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from run_programs import run_python

from flower_gpu.apps.app_imports import libraries_of, libraries_used

REPOSITORY = Path(__file__).parents[2]

# Imports an app, and prints the modules that it requests.
ASKED = """
import builtins, sys
folder, module = sys.argv[1:]
sys.path.insert(0, folder)
asked, real = [], builtins.__import__
def note(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and str((globals or {}).get("__file__", "")).startswith(folder):
        asked.append(name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = note
__import__(module)
print(*asked)
"""


def app(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return folder


def test_libraries_come_in_the_order_of_their_import_and_own_modules_are_followed(tmp_path: Path) -> None:
    app(
        tmp_path,
        mine__client_app="""
            import first.inner as f, second
            from mine.task import train
            from .more import *
            from . import models
            import last
            """,
        mine__task="from third import something\nfrom .models import Net\n",
        mine__more="import fourth\n",
        mine__models__init="",
        mine__unused="import never\n",
    )
    (tmp_path / "mine" / "models" / "init.py").rename(tmp_path / "mine" / "models" / "__init__.py")
    (tmp_path / "mine" / "models" / "__init__.py").write_text("import fifth\nfrom .net import Net\n")
    (tmp_path / "mine" / "models" / "net.py").write_text("import sixth\nfrom ..more import x\n")
    assert libraries_of(tmp_path, "mine.client_app") == [
        *("first", "first.inner", "second", "third", "third.something"),
        *("fifth", "sixth", "fourth", "last"),
    ]


def test_imports_at_module_level_come_before_imports_in_functions(tmp_path: Path) -> None:
    app(
        tmp_path,
        client="""
            from __future__ import annotations
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                import for_types
            else:
                import not_for_types
            try:
                import wanted
            except ImportError:
                import instead
            with open("x"):
                import inside
            class Net:
                import of_class
                def forward(self):
                    import at_call
            async def train():
                from lazily import loaded
                def inner():
                    if TYPE_CHECKING:
                        import for_types
                    match 1:
                        case 1:
                            import innermost
            import at_the_end
            """,
        lazily="def late():\n    from late_library import something\n",
    )
    libraries = libraries_of(tmp_path, "client")
    at_import = ["wanted", "instead", "inside", "of_class", "at_the_end"]
    assert [name for name in libraries if name in at_import] == at_import
    assert "not_for_types" in libraries and "for_types" not in libraries
    late = ["at_call", "late_library", "late_library.something", "innermost"]
    assert [name for name in libraries if name in late] == late
    assert libraries.index("at_the_end") < libraries.index("at_call")


@pytest.mark.parametrize(
    "text",
    ["import (", "\0", "import client", "from . import client", "from ... import x", "from .... import y"],
)
def test_source_that_cannot_be_imported_names_nothing(tmp_path: Path, text: str) -> None:
    app(tmp_path, client=text)
    assert libraries_of(tmp_path, "client") == []


def test_the_result_matches_the_actual_imports() -> None:
    folder, _, package = (REPOSITORY / "examples/scaffold/scaffold").as_posix().rpartition("/")
    done = run_python(ASKED, folder, f"{package}.client_app", check=True)
    asked = {each for each in done.stdout.split() if each.split(".")[0] != package}
    assert asked
    assert asked <= set(libraries_of(Path(folder), f"{package}.client_app"))


NOTEBOOK = """
import json as text
from functools import partial, wraps
from queue import Queue

class Base:
    def load(self):
        import wave

class Net(Base):
    pass

def logged(function):
    @wraps(function)
    def run(*args):
        import zipfile
        return function(*args)
    return run

TABLE = {"net": [Net]}

@logged
def train(message, number=Queue()):
    from xml import sax
    def inner():
        import csv
        train(TABLE)
    text.dumps(0)

unused = partial
"""


def test_libraries_used_by_functions_of_a_notebook() -> None:
    """Functions may be decorated, nested, or used by classes and tables. A cell of a notebook has no file."""
    cells: dict[str, object] = {"__name__": "__main__"}
    exec(NOTEBOOK, cells)
    libraries = libraries_used({"train": cells["train"]})
    assert {"csv", "json", "queue", "wave", "xml", "xml.sax", "zipfile"} <= set(libraries)
    assert not {"functools", "__main__"} & set(libraries)
    assert libraries.index("xml") < libraries.index("xml.sax")
    assert libraries_used(libraries_used) == ["flower_gpu", "flower_gpu.apps", "flower_gpu.apps.app_imports"]
