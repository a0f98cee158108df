"""Which libraries and which other modules of this package each module may import.

A room is a subpackage or a top-level module of the package. The rooms have an order, and a module may import
only its own room and lower ones.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from run_programs import run

import flower_gpu

PACKAGE = Path(flower_gpu.__file__).parent

#: The rooms that import Flower.
WITH_FLOWER = ("flower", "strategies", "programs", "launch", "simulation")
#: Program that imports each group of modules in a fork of its own, and prints the libraries that this
#: imports. To save time, it first imports a heavy library that all groups may import.
IMPORT = """
import importlib, json, os, sys
parent_import, *groups = sys.argv[1:]
if parent_import:
    importlib.import_module(parent_import)
for group in groups:
    child = os.fork()
    if not child:
        try:
            for name in group.split():
                importlib.import_module(name)
            libraries = ("torch", "flwr", "numpy", "tqdm", "rich", "psutil")
            libraries += ("tensorflow", "keras", "jax", "tensorboard", "wandb", "mlflow")
            imported = [name for name in libraries if name in sys.modules]
            print(json.dumps([group, imported]), flush=True)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, group
"""
#: The library that the program imports before it forks, by room.
PARENT_IMPORTS = {"pytorch": "torch", **dict.fromkeys(WITH_FLOWER, "flwr")}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def test_class_names_are_unique() -> None:
    """Each class name of the package stands for one class, with or without a leading underscore."""
    places: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = run(command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def room_of(name: str) -> str:
    """Return the room of a module, or "" for the package itself."""
    return name.split(".")[1] if "." in name else ""


def imports_of(path: Path) -> set[str]:
    """Return all modules that a file imports, also inside functions."""
    modules = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            modules |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


#: The rooms of the package from top to bottom, as the map in its README lists them.
ROOMS = re.findall(
    r"\[(\w+)(?:/|\.py)\]\(\1", (PACKAGE / "README.md").read_text().partition("\n## How a message travels")[0]
)
#: Pairs of a module and a higher module that it may name in a string. The function of a rank names the task
#: that handles a message of Flower.
TASKS_BY_NAME = {("flower_gpu.ranks.function", "flower_gpu.flower.rank_messages")}


def modules_in_strings(path: Path) -> set[str]:
    """Return the modules of this package that a file names in strings, such as "flower_gpu.module:task"."""
    modules = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            while "." in name and name not in FILES:
                name = name.rpartition(".")[0]
            if name in FILES and name != "flower_gpu":
                modules.add(name)
    return modules


def higher_rooms_used(name: str, path: Path) -> set[str]:
    """Return the rooms above a module's own room that its file imports, or names in strings."""
    ours = {other for other in imports_of(path) if other.split(".")[0] == "flower_gpu"}
    used = {room_of(other) for other in ours | modules_in_strings(path) if (name, other) not in TASKS_BY_NAME}
    return used & set(ROOMS[: ROOMS.index(room_of(name))])


def test_every_room_is_in_the_order() -> None:
    assert sorted(ROOMS) == sorted({room_of(name) for name in FILES} - {""})


def test_no_room_refers_to_a_higher_room(tmp_path: Path) -> None:
    assert not {
        name: rooms
        for name, path in FILES.items()
        if "." in name and (rooms := higher_rooms_used(name, path))
    }
    # Each kind of reference to a higher room is detected.
    for number, text in enumerate(
        (
            "import flower_gpu.watch.waits",
            "from flower_gpu import watch",
            "def function():\n    from flower_gpu.watch.waits import main",
            "TASK = 'flower_gpu.watch.waits:main'",
        )
    ):
        path = tmp_path / f"module{number}.py"
        path.write_text(text)
        assert higher_rooms_used("flower_gpu.flower.module", path) == {"watch"}, text
        assert not higher_rooms_used("flower_gpu.simulation.module", path), text


def modules_imported_by(name: str, tree: ast.AST) -> set[str]:
    """Return the modules of this package that a module imports, also inside functions and for type checkers.

    The package itself does not count: it imports its public names when they are first used.
    """
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {full if full in FILES else str(node.module) for full in names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules & FILES.keys() - {name, "flower_gpu"}


def modules_in_cycles(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that are part of an import cycle."""

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        todo = [name]
        while todo:
            new = graph.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    return {name for name in graph if name in reached(name)}


def test_no_files_import_each_other_in_a_cycle() -> None:
    graph = {name: modules_imported_by(name, tree_of(path)) for name, path in FILES.items()}
    assert modules_in_cycles(graph) == set()
    for text in (
        "from flower_gpu.gpu import device_files",
        "def function():\n    import flower_gpu.gpu.device_files",
        "if TYPE_CHECKING:\n    from flower_gpu.gpu.device_files import exclusive",
    ):
        # The module device_files imports drivers. So the import of device_files by drivers completes a cycle.
        graph["flower_gpu.gpu.drivers"] = modules_imported_by("module", ast.parse(text))
        assert modules_in_cycles(graph) == {"flower_gpu.gpu.device_files", "flower_gpu.gpu.drivers"}, text


#: Libraries that a single module may import although the rest of its room may not.
MORE = {
    "flower_gpu.frameworks.array_checks": {"numpy"},
}


#: Rooms that may import none of the heavy libraries below, because every worker and client imports them.
LIGHT = {"", *ROOMS[ROOMS.index("ranks") :]} - {"pytorch", "keras", "jax"}

#: Libraries that all rooms except those in LIGHT may import.
USUAL = {"numpy", "tqdm", "rich", "psutil", "tensorboard", "wandb", "mlflow"}


def forbidden(name: str, imported: set[str]) -> set[str]:
    """Return the libraries that a module has imported although it may not."""
    allowed = set(MORE.get(name, ()))
    if room_of(name) not in LIGHT:
        allowed |= USUAL
    if room_of(name) == "pytorch":
        allowed.add("torch")
    if room_of(name) in WITH_FLOWER:
        allowed.add("flwr")
    return imported - allowed


@pytest.mark.parametrize("parent_import", ["", "torch", "flwr"])
def test_modules_import_only_the_libraries_that_their_room_may(parent_import: str) -> None:
    """One process imports all modules of a room. A module in MORE is imported by a process of its own."""
    groups = {
        room: [name for name in FILES if room_of(name) == room and name not in MORE]
        for room in ("", *ROOMS)
        if PARENT_IMPORTS.get(room, "") == parent_import
    }
    groups |= {
        name: [name] for name in MORE.keys() & FILES if PARENT_IMPORTS.get(room_of(name), "") == parent_import
    }
    lines = run_python(IMPORT, parent_import, *(" ".join(names) for names in groups.values())).splitlines()
    for line in lines:
        group, imported = json.loads(line)
        name = group.split()[0]
        assert not forbidden(name, set(imported)), name
        if name in MORE:
            assert set(imported) >= MORE[name], "remove this module or library from MORE"


def misplaced_imports(name: str, path: Path) -> set[str]:
    """Return the libraries that a file imports but may not.

    Only the rooms in WITH_FLOWER may import Flower, and only one module may import NVIDIA's library.
    """
    imported = {module.split(".")[0] for module in imports_of(path)}
    is_allowed = {"flwr": room_of(name) in WITH_FLOWER, "pynvml": name == "flower_gpu.gpu.nvml"}
    return {library for library, may_import in is_allowed.items() if library in imported and not may_import}


def test_libraries_are_imported_in_one_place(tmp_path: Path) -> None:
    assert not {
        name: libraries for name, path in FILES.items() if (libraries := misplaced_imports(name, path))
    }
    path = tmp_path / "module.py"
    path.write_text("import pynvml\ndef function():\n    from flwr.app import Message")
    assert misplaced_imports("flower_gpu.gpu.module", path) == {"flwr", "pynvml"}
    assert misplaced_imports("flower_gpu.gpu.nvml", path) == {"flwr"}
    assert misplaced_imports("flower_gpu.flower.module", path) == {"pynvml"}


def test_building_a_client_imports_no_torch() -> None:
    code = """
import sys
import flower_gpu, flower_gpu.pytorch
client = flower_gpu.GPUClient("nowhere.task:train", "nowhere.task:test", initial_weights="nowhere.task:init")
client.to_client()
flower_gpu.gpu_client("nowhere.client:FlowerClient", 1, name="2")
flower_gpu.gpu_evaluate("nowhere.task:evaluate")
print([name for name in ("torch", "nowhere") if name in sys.modules])
"""
    assert run_python(code) == "[]\n"


def test_a_call_imports_no_heavy_library_into_the_caller_or_its_new_worker() -> None:
    """The options setup= and env= set the environment that heavy libraries read when they are imported."""
    code = """
import flower_gpu
def libraries():
    import sys
    return [name for name in ("torch", "flwr", "numpy", "tqdm", "rich", "psutil") if name in sys.modules]
for method in ("spawn", "fork"):
    assert flower_gpu.run_in_worker(libraries, start_method=method) == libraries() == []
"""
    assert run_python(code) == ""


def test_public_names_exist() -> None:
    assert sorted(flower_gpu.__all__) == flower_gpu.__all__
    for name in flower_gpu.__all__:
        assert getattr(flower_gpu, name) is not None
    assert set(flower_gpu.__all__) <= set(dir(flower_gpu))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flower_gpu.nothing
