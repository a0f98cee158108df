"""A framework is one class in the registry: every room gets its answers from there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flower_gpu import frameworks
from flower_gpu.frameworks import Cap, Framework, Hold, Rule, out_of_memory
from flower_gpu.frameworks.framework import Setting
from flower_gpu.simulation.in_worker import ProcessState, seed_all


class Toy(Framework):
    """A framework that is not known yet."""

    name, module, last, native = "Toy", "toy_framework", "ready", "toy_framework"
    read_by_native = ("TOY_LOGGING",)
    comes_after = "toy_base"
    set_by_modules = ("TOY_CAP",)

    def __init__(self) -> None:
        self.held: list[tuple[list[Cap], bool]] = []
        self.seeds: list[int | None] = []

    def says_out_of_memory(self, error: BaseException, text: str) -> bool:
        return text == "the toy box is full"

    def has_threads(self) -> bool:
        return getattr(sys.modules.get(self.module), "threads", 0) > 0

    def cap_variables(self, fraction: str, environ: Mapping[str, str]) -> dict[str, str]:
        return {"TOY_CAP": fraction}

    def cap_rules(self, fraction: str, fixed: Container[str]) -> dict[str, Rule]:
        return {"TOY_CAP": lambda text: min(text, fraction)}

    def hold(self, caps: Sequence[Cap], on_start: Callable[[], None], *, is_new: bool) -> Hold:
        self.held.append((list(caps), is_new))
        held = self.held

        class ToyHold(Hold):
            def release(self) -> None:
                held.clear()

        return ToyHold()

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def seed_fork(self) -> None:
        self.seeds.append(None)

    def settings(self) -> Iterator[Setting]:
        toy = sys.modules[self.module]
        yield Setting(lambda: toy.flag, lambda value: setattr(toy, "flag", value))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Toy]:
    (tmp_path / "toy_framework.py").write_text("flag = 1\nthreads = 0\nready = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Toy()
    # Alone: PyTorch, held in this process, would leave its settings in the environment.
    monkeypatch.setattr(frameworks, "ALL", (found,))
    monkeypatch.setattr(out_of_memory, "ALL", frameworks.ALL)
    yield found
    sys.modules.pop("toy_framework", None)


def test_the_answers_of_a_new_framework_are_asked_for_everywhere(toy: Toy) -> None:
    caps = [Cap(4, 16)]
    assert frameworks.environment(caps, {})["TOY_CAP"] == "0.250000000000"
    assert frameworks.rules(caps, ())["TOY_CAP"]("0.9") == "0.250000000000"
    assert "TOY_LOGGING" in frameworks.read_at_import({"toy_framework"})
    assert frameworks.comes_before("toy_framework") == "toy_base"
    assert "TOY_CAP" in frameworks.set_by_modules()
    assert out_of_memory.out_of_memory_in(ValueError("the toy box is full"))
    assert toy not in frameworks.loaded()

    module: Any = import_module("toy_framework")
    assert toy in frameworks.loaded()
    seed_all(7)
    frameworks.seed_fork()
    assert toy.seeds == [7, None]
    found = ProcessState()
    module.flag = 2
    found.restore()
    assert module.flag == 1
    assert frameworks.with_threads() is None
    module.threads = 3
    assert frameworks.with_threads() == "Toy"


@pytest.mark.parametrize("is_new", [False, True], ids=["imported-before", "imported-in-the-block"])
def test_a_framework_is_held_for_a_block_whenever_it_is_imported(toy: Toy, is_new: bool) -> None:
    if not is_new:
        import_module("toy_framework")
    with frameworks.held_to([Cap(4, 16)], lambda: None):
        assert bool(toy.held) is not is_new
        import_module("toy_framework")
        assert toy.held == [([Cap(4, 16)], is_new)]
    assert toy.held == []
    sys.modules.pop("toy_framework")
    import_module("toy_framework")
    assert toy.held == []  # nothing waits for it any more
