"""The code of docs/how-to/multi-gpu.md: two ranks learn the same as one, and resume from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from how_to_pages import blocks
from weights_difference import difference

from flower_gpu import GPUClient, run_in_worker

CODE_BEFORE_PAGE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(x, x[:, :4].argmax(dim=1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.last(x)


def first_weights():
    torch.manual_seed(0)
    return get_weights(Net())

"""
CODE_AFTER_PAGE = """

@distributed
def stopped_and_continued(weights, path, has_checkpoint):
    model = Net()
    set_weights(model, weights)
SHARD
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done = load(path, model, optimizer)["done"] if has_checkpoint else 0
    for _ in range(done, 2 if has_checkpoint else 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(dataset.tensors[0]), dataset.tensors[1]).backward()
        optimizer.step()
        done += 1
    save(path, model, optimizer, done=done)
    return get_weights(model), done


def scaled():
    model = Net()
SCALED
    rates = []
    for _ in range(51):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        warm_up.step()
    return rates


scaled_in_ranks = distributed(scaled)
"""


def indented(code: str) -> str:
    return "".join(f"    {line}" for line in code.splitlines(keepends=True) if line.strip())


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the code of the page to a module that workers can import, and return its name."""
    first, _, scaled, shard, checkpoint = blocks("multi-gpu.md", "python")
    functions = CODE_AFTER_PAGE.replace("SHARD", indented(shard)).replace("SCALED", indented(scaled))
    (tmp_path / "page.py").write_text(f"{CODE_BEFORE_PAGE}{first}\n\n{checkpoint}{functions}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "page"


def test_the_functions_of_the_page_work(page: str, tmp_path: Path) -> None:
    weights = run_in_worker(f"{page}:first_weights")
    alone, in_ranks = (GPUClient(f"{page}:train", num_gpus=count).fit(weights, {}) for count in (1, 2))
    assert alone[1] == in_ranks[1] == 256
    assert difference(alone[0], weights) > 0.01 and difference(alone[0], in_ranks[0]) < 1e-5

    # One rank starts, and two ranks with a sharded model resume. The result is that of an uninterrupted run.
    name, path = f"{page}:stopped_and_continued", tmp_path / "checkpoint.pt"
    learned, _ = run_in_worker(name, weights, str(path), False)
    learned, done = run_in_worker(name, weights, str(path), True, num_gpus=2)
    again, _ = run_in_worker(name, weights, str(path), True)
    assert done == 2 and difference(learned, weights) > 0.01
    assert difference(learned, again) == 0

    rates = run_in_worker(f"{page}:scaled_in_ranks", num_gpus=2)
    assert rates[0] == pytest.approx(0.1) and rates[50] == pytest.approx(0.2)
