"""Which libraries an app imports, read from its source or from its functions: nothing of it runs."""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Final

_TASK = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def libraries_of(folder: Path, module: str) -> list[str]:
    """Return the modules that an app imports and that are not its own, in the order of their import.

    ``module``, such as ``"quickstart.client_app"``, is imported first; then the modules that it imports, also
    in functions, and those of tasks that it names. There may be names among them that are no modules: whether
    ``b`` is one in ``from a import b`` only ``a`` can tell.
    """
    return [name for name, tree in _modules(folder, module) if tree is None]


def is_more_than_listed(folder: Path, module: str, name: str) -> bool:
    """Tell whether an app has a use for a name, other than in lists such as ``[name]``.

    ``module``: as of :func:`libraries_of`.
    """
    for _, tree in _modules(folder, module):
        nodes = [] if tree is None else list(ast.walk(tree))
        listed = {id(each) for node in nodes if isinstance(node, ast.List) for each in node.elts}
        for node in nodes:
            is_renamed = isinstance(node, ast.alias) and node.name == name and node.asname not in (None, name)
            used = getattr(node, "id", None) if isinstance(node, ast.Name) else getattr(node, "attr", None)
            if is_renamed or (used == name and id(node) not in listed):
                return True
    return False


def mentions(folder: Path, module: str, names: Collection[str]) -> bool:
    """Return True if the source of an app has one of these names, such as ``"gpu_mod"``, in its code.

    Strings and comments do not count. ``module``: as of :func:`libraries_of`.
    """
    return any(
        name in names for _, tree in _modules(folder, module) if tree is not None for name in _names(tree)
    )


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module imports, uses, or looks up as attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _modules(folder: Path, module: str) -> Iterator[tuple[str, ast.Module | None]]:
    """Yield the modules that an app imports, in the order of their import; its own with what is in them."""
    seen: set[str] = set()
    waiting = _with_parents(module)
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if not _is_own(folder, name):
            yield name, None
        elif (path := _file(folder, name)) is not None:
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            with suppress(SyntaxError, ValueError):  # its import will tell
                tree = ast.parse(path.read_bytes())
                named = [each for each in _named(tree) if _file(folder, each) is not None]
                imported = [each for each in (*_imported(tree, package), *named) if each not in seen]
                waiting[:0] = [part for each in imported for part in _with_parents(each)]
                yield name, tree


_MAIN: Final = "__main__"
_MOST_ITEMS: Final = 1000  # of a list or a table: there may be a whole data set


def libraries_used(*values: object) -> list[str]:
    """Return the modules that functions of a script or a notebook import or use, and classes of theirs.

    ``values``: such functions, or whatever holds them. What comes from other modules is not looked into.
    """
    found: dict[str, None] = {}
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(value, FunctionType) and module == _MAIN:
            codes = list(_codes(value.__code__))
            found.update((name, None) for code in codes for name in _imported_by(code))
            names = {name for code in codes for name in code.co_names}
            waiting += [value.__globals__[name] for name in names if name in value.__globals__]
            waiting += [value.__dict__, value.__defaults__, value.__kwdefaults__]
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    waiting.append(cell.cell_contents)
        elif isinstance(value, type) and module == _MAIN:
            waiting += [*value.__bases__, *vars(value).values()]
        elif isinstance(value, dict):
            waiting += islice(value.values(), _MOST_ITEMS)
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += islice(value, _MOST_ITEMS)
        elif isinstance(module, str) and module != _MAIN:
            found[module] = None
        elif not isinstance(value, type | FunctionType):
            waiting.append(type(value))
    return list(dict.fromkeys(part for name in found for part in _with_parents(name)))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _imported_by(code: CodeType) -> Iterable[str]:
    base = ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            base = str(step.argval)
            yield base
        elif step.opname == "IMPORT_FROM":
            yield f"{base}.{step.argval}"


def _with_parents(name: str) -> list[str]:
    """Return a module after the packages it is in, which are imported before it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _is_own(folder: Path, name: str) -> bool:
    top = folder / name.partition(".")[0]
    return top.is_dir() or top.with_suffix(".py").exists()


def _file(folder: Path, name: str) -> Path | None:
    """Return the file of one of the app's modules; None for a name in it that is no module."""
    place = folder.joinpath(*name.split("."))
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.exists()), None)


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the modules that a file imports: first those outside of functions, in their order."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        functions: list[ast.AST] = []
        for node in chain.from_iterable(_executed(each, functions) for each in waiting):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif base := _absolute(node, package):
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
        waiting = functions


def _executed(node: ast.AST, functions: list[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run with a node; of both branches where only running tells.

    Functions that are defined there are added to ``functions``.
    """
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        children = iter(node.orelse)
    for child in children:
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(child)
        elif not isinstance(child, ast.expr):
            yield from _executed(child, functions)


def _named(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of tasks that are given by name, as ``"package.module:function"``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _TASK.fullmatch(node.value):
            yield node.value.partition(":")[0]


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".") if package else []
    kept = parents[: len(parents) - node.level + 1]
    return ".".join([*kept, node.module] if node.module else kept)
