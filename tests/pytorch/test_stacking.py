"""Stacking the tensors of several clients, and training their models together in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from flower_gpu.pytorch import group_alike, stack, unstack

State = dict[str, torch.Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3)
    )


def step_of(network: nn.Module) -> Callable[[State, torch.Tensor, torch.Tensor], State]:
    """Return one step of SGD as a pure function of a state dict. The step updates buffers too."""
    trained = {name for name, _ in network.named_parameters()}

    def loss(
        parameters: State, buffers: State, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, State]:
        outputs = functional_call(network, (parameters, buffers), (images,))
        return nn.functional.cross_entropy(outputs, labels), buffers

    def step(state: State, images: torch.Tensor, labels: torch.Tensor) -> State:
        parameters = {name: state[name] for name in state if name in trained}
        buffers = {name: state[name] for name in state if name not in trained}
        gradients, buffers = grad(loss, has_aux=True)(parameters, buffers, images, labels)
        return {name: value - 0.1 * gradients[name] for name, value in parameters.items()} | buffers

    return step


def trained_alone(network: nn.Module, state: State, images: torch.Tensor, labels: torch.Tensor) -> State:
    """Do the same step with an ordinary optimizer, as most apps do."""
    network.load_state_dict(state)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    nn.functional.cross_entropy(network(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


@pytest.mark.parametrize("make", [mlp, cnn])
def test_a_stacked_step_gives_the_results_of_separate_steps(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    states = [make().state_dict() for _ in range(9)]
    sizes = [(4, 7, 12)[number % 3] for number in range(9)]
    data = [(torch.rand(size, 1, 8, 8), torch.randint(3, (size,))) for size in sizes]
    step = vmap(step_of(make()))
    stepped: dict[int, State] = {}
    for group in group_alike(data):
        together = step(stack([states[place] for place in group]), *stack([data[place] for place in group]))
        stepped |= zip(group, unstack(together), strict=True)
    assert [len(group) for group in group_alike(data)] == [3, 3, 3]
    for place, state in enumerate(states):
        for name, value in trained_alone(make(), state, *data[place]).items():
            torch.testing.assert_close(stepped[place][name], value, rtol=0, atol=1e-6)
            assert stepped[place][name].dtype == value.dtype
            assert not torch.equal(value, state[name]), f"the step did not change {name}"


def test_unstacking_returns_the_original_items() -> None:
    items = [
        {"w": torch.full((2, 3), float(number)), "n": torch.tensor(number), "more": [(torch.ones(1),)]}
        for number in range(4)
    ]
    stacked = stack(items)
    assert stacked["w"].shape == (4, 2, 3) and stacked["n"].tolist() == [0, 1, 2, 3]
    for item, same in zip(items, unstack(stacked), strict=True):
        assert torch.equal(item["w"], same["w"]) and item["n"].item() == same["n"].item()
        assert isinstance(same["more"], list) and isinstance(same["more"][0], tuple)
    stacked["w"].zero_()
    assert items[3]["w"].sum() == 18, "stack() must copy"


def test_clients_share_no_memory() -> None:
    """vmap has a single row in memory for values that do not depend on the client."""
    items = unstack(vmap(lambda x: (torch.ones(2), x + 1))(torch.zeros(3, 2)))
    items[0][0].fill_(7)
    items[1][1].fill_(8)
    assert [ones.tolist() for ones, _ in items] == [[7, 7], [1, 1], [1, 1]]
    assert [values.tolist() for _, values in items] == [[1, 1], [8, 8], [1, 1]]


@pytest.mark.parametrize(
    ("items", "error", "text"),
    [
        ([], ValueError, "the list of items is empty"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], ValueError, r"items 0 and 1 .*\['a'\] .* missing"),
        ([{"a": torch.ones(2)}] * 2 + [{"a": torch.ones(3)}], ValueError, r"items 0 and 2 .*\['a'\] is"),
        ([(torch.ones(2), torch.ones(2)), (torch.ones(2),)], ValueError, r"\[1\] .* missing"),
        ([torch.ones(2), torch.ones(2).double()], ValueError, "float64"),
        ([{"rate": 0.1}] * 2, TypeError, r"\['rate'\] is a float, and only tensors can be stacked"),
        ([np.ones(2)] * 2, TypeError, "ndarray"),
        ([nn.Linear(1, 1)] * 2, TypeError, "Linear"),
    ],
)  # fmt: skip
def test_items_that_cannot_be_stacked_are_named(items: list[Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        stack(items)


@pytest.mark.parametrize(
    ("item", "error", "text"),
    [
        ({"a": torch.ones(2, 3), "b": torch.ones(3, 2)}, ValueError, r"\['a'\]\D+2, .*\['b'\]\D+3"),
        ({"a": torch.tensor(1.0)}, TypeError, "has no dimension"),
        ([0.5], TypeError, r"\[0\] is a float"),
        ({}, ValueError, "one size of the first dimension"),
    ],
)
def test_an_item_that_cannot_be_unstacked_is_named(item: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        unstack(item)


def test_groups_have_the_same_shapes_types_and_values() -> None:
    items: list[Any] = [
        (torch.zeros(3), 1),
        (torch.zeros(4), 1),
        (torch.ones(3), 1),
        (torch.ones(3), 2),
        (torch.ones(3), True),
        (torch.ones(3).double(), 1),
        (torch.ones(4), 1),
    ]
    assert group_alike(items) == [[0, 2], [1, 6], [3], [4], [5]]
    assert group_alike([{"a": torch.ones(1)}, {"b": torch.ones(1)}]) == [[0], [1]]
    assert group_alike([]) == []
    with pytest.raises(TypeError, match=r"\[0\] is a ndarray: give tensors"):
        group_alike([[np.ones(2)]])
