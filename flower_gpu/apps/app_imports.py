"""The libraries that an app imports, found in its source or in its functions without running any of it."""

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
    """Return the names of all modules from outside the app that the app imports, in import order.

    ``module``: the module of the app to start with, such as ``"quickstart.client_app"``. The search follows
    its imports, including imports inside functions, and the modules of tasks that it names as strings.
    Some of the names may not be modules: after ``from a import b``, only ``a`` knows if ``b`` is a module.
    """
    return [name for name, tree in _modules(folder, module) if tree is None]


def is_more_than_listed(folder: Path, module: str, name: str) -> bool:
    """Return True if an app uses a name in any other way than as an item of a list such as ``[name]``.

    ``module``: module of the app to start with, as in :func:`libraries_of`.
    """
    for _, tree in _modules(folder, module):
        nodes = [] if tree is None else list(ast.walk(tree))
        listed = {id(item) for node in nodes if isinstance(node, ast.List) for item in node.elts}
        for node in nodes:
            is_renamed = isinstance(node, ast.alias) and node.name == name and node.asname not in (None, name)
            used = getattr(node, "id", None) if isinstance(node, ast.Name) else getattr(node, "attr", None)
            if is_renamed or (used == name and id(node) not in listed):
                return True
    return False


def mentions(folder: Path, module: str, names: Collection[str]) -> bool:
    """Return True if the code of an app contains any of these names, such as ``"gpu_mod"``.

    Strings and comments do not count. ``module``: module of the app to start with, as in
    :func:`libraries_of`.
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
    """Yield the modules that an app imports, in import order. The app's own modules have a syntax tree."""
    seen: set[str] = set()
    pending = _with_parents(module)
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if not _is_own(folder, name):
            yield name, None
        elif (path := _file(folder, name)) is not None:
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            # Skip a file with invalid syntax. The app reports that error when it imports the file.
            with suppress(SyntaxError, ValueError):
                tree = ast.parse(path.read_bytes())
                tasks = [task for task in _task_modules(tree) if _file(folder, task) is not None]
                new = [other for other in (*_imported(tree, package), *tasks) if other not in seen]
                pending[:0] = [part for other in new for part in _with_parents(other)]
                yield name, tree


_MAIN: Final = "__main__"
#: Number of items of a list or dict that are searched, because it may hold a whole data set.
_MAX_ITEMS: Final = 1000


def libraries_used(*values: object) -> list[str]:
    """Return the modules that functions and classes of a script or a notebook import or use.

    ``values``: such functions and classes, or containers and objects that hold them. The search does not
    enter functions and classes from other modules.
    """
    libraries: dict[str, None] = {}
    seen: set[int] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(value, FunctionType) and module == _MAIN:
            codes = list(_codes(value.__code__))
            libraries.update((name, None) for code in codes for name in _imported_by(code))
            names = {name for code in codes for name in code.co_names}
            pending += [value.__globals__[name] for name in names if name in value.__globals__]
            pending += [value.__dict__, value.__defaults__, value.__kwdefaults__]
            for cell in value.__closure__ or ():
                # Reading an empty cell raises ValueError.
                with suppress(ValueError):
                    pending.append(cell.cell_contents)
        elif isinstance(value, type) and module == _MAIN:
            pending += [*value.__bases__, *vars(value).values()]
        elif isinstance(value, dict):
            pending += islice(value.values(), _MAX_ITEMS)
        elif isinstance(value, list | tuple | set | frozenset):
            pending += islice(value, _MAX_ITEMS)
        elif isinstance(module, str) and module != _MAIN:
            libraries[module] = None
        elif not isinstance(value, type | FunctionType):
            pending.append(type(value))
    return list(dict.fromkeys(part for name in libraries for part in _with_parents(name)))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code object of a function and of all functions nested in it."""
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
    """Return the names of a module's parent packages, which Python imports first, and then its own name."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _is_own(folder: Path, name: str) -> bool:
    top = folder / name.partition(".")[0]
    return top.is_dir() or top.with_suffix(".py").exists()


def _file(folder: Path, name: str) -> Path | None:
    """Return the file of a module of the app, or None if the name does not stand for a module."""
    base = folder.joinpath(*name.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.exists()), None)


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the modules that a file imports, in order. Imports inside functions come last."""
    pending: list[ast.AST] = [tree]
    while pending:
        functions: list[ast.AST] = []
        for node in chain.from_iterable(_executed(parent, functions) for parent in pending):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif base := _absolute(node, package):
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
        pending = functions


def _executed(node: ast.AST, functions: list[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when a node is executed.

    Both branches of an ``if`` count as executed, except for the body of ``if TYPE_CHECKING``. Function
    definitions in the node are appended to ``functions`` and not searched.
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


def _task_modules(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of tasks that are given as strings such as ``"package.module:function"``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _TASK.fullmatch(node.value):
            yield node.value.partition(":")[0]


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".") if package else []
    kept = parents[: len(parents) - node.level + 1]
    return ".".join([*kept, node.module] if node.module else kept)
