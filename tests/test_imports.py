"""What importing a module brings in, and which layers know of each other."""

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
WITH_FLOWER = ("flower", "launch", "simulation")
#: Imports modules in children, a group in each. What all of a room may import is there already in the parent.
IMPORT = """
import importlib, json, os, sys
there, *groups = sys.argv[1:]
if there:
    importlib.import_module(there)
for group in groups:
    child = os.fork()
    if not child:
        try:
            for name in group.split():
                importlib.import_module(name)
            looked_for = ("torch", "flwr", "numpy", "tqdm", "rich", "psutil")
            looked_for += ("tensorflow", "keras", "jax", "tensorboard", "wandb", "mlflow")
            found = [name for name in looked_for if name in sys.modules]
            print(json.dumps([group, found]), flush=True)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, group
"""
THERE = {"pytorch": "torch", **dict.fromkeys(WITH_FLOWER, "flwr")}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def test_class_names_are_unique() -> None:
    """One word for one thing: whoever reads a name need not ask which one it is."""
    places: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = run(command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def layer(name: str) -> str:
    """Return the subpackage of a module, or the module itself where it is at the top."""
    return name.split(".")[1] if "." in name else ""


def imports_of(path: Path) -> set[str]:
    """Return every module that a file imports, also inside of functions."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


#: The rooms of the package, from top to bottom, as its map has them. Each may import itself and what stands
#: below it.
ROOMS = re.findall(
    r"\[(\w+)(?:/|\.py)\]\(\1", (PACKAGE / "README.md").read_text().partition("\n## How a message travels")[0]
)
#: Tasks of workers are given by name, upward too: the task of a rank that handles one of Flower's messages.
TASKS_BY_NAME = {("flower_gpu.ranks.function", "flower_gpu.flower.rank_messages")}


def strings_of(path: Path) -> set[str]:
    """Return the modules of this package that a file names in its strings."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            while "." in name and name not in FILES:
                name = name.rpartition(".")[0]
            if name in FILES and name != "flower_gpu":
                found.add(name)
    return found


def upward(name: str, path: Path) -> set[str]:
    """Return the higher rooms that a file knows of: by its imports, or by names of modules in its strings."""
    ours = {other for other in imports_of(path) if other.split(".")[0] == "flower_gpu"}
    used = {layer(other) for other in ours | strings_of(path) if (name, other) not in TASKS_BY_NAME}
    return used & set(ROOMS[: ROOMS.index(layer(name))])


def test_every_room_is_in_the_order() -> None:
    assert sorted(ROOMS) == sorted({layer(name) for name in FILES} - {""})


def test_no_room_knows_of_a_higher_one(tmp_path: Path) -> None:
    assert not {name: found for name, path in FILES.items() if "." in name and (found := upward(name, path))}
    # Each way to know of one is seen.
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
        assert upward("flower_gpu.flower.module", path) == {"watch"}, text
        assert not upward("flower_gpu.simulation.module", path), text


def imports_of_ours(name: str, tree: ast.AST) -> set[str]:
    """Return the files that a file imports; inside of functions, only those of its own room.

    A function may import a higher file late, that of a command for example: no circle of what is loaded.
    """
    late = {id(node) for function in functions_of(tree) for node in ast.walk(function)}
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            for other in {each if each in FILES else str(node.module) for each in names} & {*FILES}:
                if id(node) not in late or layer(other) == layer(name):
                    found.add(other)
    return found - {name, "flower_gpu"}


def functions_of(tree: ast.AST) -> list[ast.AST]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def circles(graph: dict[str, set[str]]) -> set[str]:
    """Return the files from which imports lead back to themselves."""

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        todo = [name]
        while todo:
            new = graph.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    return {name for name in graph if name in reached(name)}


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {name: imports_of_ours(name, tree_of(path)) for name, path in FILES.items()}
    assert circles(graph) == set()
    late = ast.parse("def function():\n    from flower_gpu.gpu import policy")
    assert imports_of_ours("flower_gpu.gpu.nvml", late) == {"flower_gpu.gpu.policy"}
    assert imports_of_ours("flower_gpu.cli.main", late) == set()
    graph["flower_gpu.gpu.nvml"] = {"flower_gpu.gpu.policy"}  # which imports it
    assert circles(graph) == {"flower_gpu.gpu.nvml", "flower_gpu.gpu.policy"}


#: What single modules bring in beyond what their room may.
MORE = {
    "flower_gpu.frameworks.array_checks": {"numpy"},
}


#: The rooms of a worker's and a client's minimum, and what every other module builds on.
LIGHT = {"", *ROOMS[ROOMS.index("ranks") :]} - {"pytorch", "keras", "jax"}

#: What all others may bring in.
USUAL = {"numpy", "tqdm", "rich", "psutil", "tensorboard", "wandb", "mlflow"}


def too_much(name: str, found: set[str]) -> set[str]:
    """Return which of the libraries that came with a module it may not bring in."""
    allowed = set(MORE.get(name, ()))
    if layer(name) not in LIGHT:
        allowed |= USUAL
    if layer(name) == "pytorch":
        allowed.add("torch")
    if layer(name) in WITH_FLOWER:
        allowed.add("flwr")
    return found - allowed


@pytest.mark.parametrize("there", ["", "torch", "flwr"])
def test_imports(there: str) -> None:
    """The modules of a room in one process, but for those that bring in more."""
    groups = {
        room: [name for name in FILES if layer(name) == room and name not in MORE]
        for room in ("", *ROOMS)
        if THERE.get(room, "") == there
    }
    groups |= {name: [name] for name in MORE.keys() & FILES if THERE.get(layer(name), "") == there}
    for line in run_python(IMPORT, there, *(" ".join(names) for names in groups.values())).splitlines():
        group, told = json.loads(line)
        name = group.split()[0]
        assert not too_much(name, set(told)), name
        if name in MORE:
            assert set(told) >= MORE[name], "it is in MORE without need"


def in_a_wrong_place(name: str, path: Path) -> set[str]:
    """Return the libraries that only other files may import: those of Flower's rooms, one for NVIDIA's."""
    found = {each.split(".")[0] for each in imports_of(path)}
    is_allowed = {"flwr": layer(name) in WITH_FLOWER, "pynvml": name == "flower_gpu.gpu.nvml"}
    return {library for library, is_here in is_allowed.items() if library in found and not is_here}


def test_libraries_are_imported_in_one_place(tmp_path: Path) -> None:
    assert not {name: found for name, path in FILES.items() if (found := in_a_wrong_place(name, path))}
    path = tmp_path / "module.py"
    path.write_text("import pynvml\ndef function():\n    from flwr.app import Message")
    assert in_a_wrong_place("flower_gpu.gpu.module", path) == {"flwr", "pynvml"}
    assert in_a_wrong_place("flower_gpu.gpu.nvml", path) == {"flwr"}
    assert in_a_wrong_place("flower_gpu.flower.module", path) == {"pynvml"}


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


def test_a_call_brings_nothing_into_the_caller_and_its_worker_begins_with_as_little() -> None:
    """The worker's environment is set before anything heavy is imported: setup= and env= rely on that."""
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
