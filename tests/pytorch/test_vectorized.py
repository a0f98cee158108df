"""Functions that run for several clients at once: the same results as one by one, and clear errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import flower_gpu
from flower_gpu.errors import ConfigError
from flower_gpu.pytorch.vectorized import FunctionCall, meeting, run_together

Parameters = dict[str, torch.Tensor]


@cache
def network(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Flatten(), nn.Linear(4 * 6 * 6, 3))


def parameters(model: nn.Module, client: int = 0) -> Parameters:
    return {name: value.detach() + 0.01 * client for name, value in model.named_parameters()}


def steps_of(model: nn.Module) -> Callable[..., Any]:
    def loss(parameters: Parameters, images: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (images,)).square().mean()

    def steps(parameters: Parameters, images: torch.Tensor, *, rate: float) -> dict[str, Any]:
        for _ in range(3):
            gradients = grad(loss)(parameters, images)
            parameters = {name: value - rate * gradients[name] for name, value in parameters.items()}
        ones = torch.ones(2)
        return {
            "parameters": parameters,
            "images": len(images),
            "loss": loss(parameters, images),
            "ones": ones,
        }

    return steps


def together(function: Callable[..., Any], *arguments: tuple[Any, ...], **kwargs: Any) -> list[Any]:
    return run_together([FunctionCall(function, 64, (each, kwargs)) for each in arguments])


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.BatchNorm2d(4, track_running_stats=False)])
def test_results_are_those_of_one_by_one(norm: nn.Module) -> None:
    steps = steps_of(network(norm))
    clients = [(parameters(network(norm), number), torch.rand(5, 1, 8, 8)) for number in range(7)]
    found = together(steps, *clients, rate=0.01)
    for result, client in zip(found, clients, strict=True):
        alone = steps(*client, rate=0.01)
        for name, value in alone["parameters"].items():
            torch.testing.assert_close(result["parameters"][name], value, rtol=1e-4, atol=1e-5)
            assert not result["parameters"][name].requires_grad
        assert result["images"] == 5
        torch.testing.assert_close(result["loss"], alone["loss"], rtol=1e-3, atol=1e-4)
    found[0]["ones"].fill_(7)  # a client's own
    assert found[1]["ones"].tolist() == [1, 1]


def _draws(parameters: Parameters, images: torch.Tensor) -> torch.Tensor:
    return images[torch.randperm(len(images))]


def _looks(parameters: Parameters, images: torch.Tensor) -> torch.Tensor:
    return images if images.sum() > 0 else -images


def _as_number(parameters: Parameters, images: torch.Tensor) -> Any:
    return images.sum().item()


def _backward(parameters: Parameters, images: torch.Tensor) -> None:
    (parameters["0.weight"].requires_grad_() * images.sum()).sum().backward()


def _in_place(parameters: Parameters, images: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(1)
    total += images.sum()
    return total


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (steps_of(network(nn.BatchNorm2d(4))), "because of BatchNorm2d: it changes a tensor in place"),
        (steps_of(network(nn.Dropout(0.5))), "because of Dropout: it draws random numbers"),
        (_draws, "at once: it draws random numbers"),
        (_looks, "data-dependent control flow"),
        (_as_number, "item()"),
        (_in_place, "torch.func cannot do what it does"),
        (_backward, "use torch.func.grad"),
    ],
)
def test_what_torch_cannot_do_is_named(function: Callable[..., Any], expected: str) -> None:
    client = parameters(network()), torch.rand(2, 1, 8, 8)
    kwargs = {"rate": 0.1} if function.__name__ == "steps" else {}
    with pytest.raises(ConfigError, match="is vectorized, but cannot run for several clients") as found:
        together(function, client, client, **kwargs)
    assert expected in str(found.value)
    assert "remove the decorator" in str(found.value)


def test_errors_of_the_function_itself_are_as_they_are() -> None:
    def function(images: torch.Tensor) -> torch.Tensor:
        return images @ torch.ones(3, 3)

    with pytest.raises(RuntimeError, match="shapes"):
        together(function, (torch.ones(2, 2),))
    with pytest.raises(KeyError):
        together(lambda images: {}["no"], (torch.ones(2),))


@pytest.mark.parametrize("argument", [nn.Linear(2, 2), np.zeros(3)])
def test_what_cannot_be_an_argument(argument: Any) -> None:
    with pytest.raises(ConfigError, match=f"{type(argument).__name__} is among its arguments"):
        FunctionCall(_looks, 64, ((argument,), {}))


def test_likeness_is_all_but_the_values() -> None:
    def likeness(*args: Any) -> Any:
        return FunctionCall(_looks, 64, (args, {})).likeness

    assert likeness(torch.zeros(3), 1) == likeness(torch.ones(3), 1)
    others = [(torch.ones(4), 1), (torch.ones(3), 2), (torch.ones(3), True), (torch.ones(3).double(), 1)]
    assert all(likeness(*other) != likeness(torch.ones(3), 1) for other in others)
    assert likeness({"a": torch.ones(3)}) != likeness({"b": torch.ones(3)})


def test_it_is_called_as_it_is_where_nothing_meets() -> None:
    @flower_gpu.vectorized(batch=3)
    def drawn(values: torch.Tensor) -> float:
        return float(torch.rand(1)) + values.sum().item()

    assert drawn(torch.ones(2)) >= 2
    assert drawn.__name__ == "drawn"
    with meeting(lambda call: call.most):
        assert drawn(torch.ones(2)) == 3
    again = cloudpickle.loads(cloudpickle.dumps(drawn))  # as an app of a notebook travels
    with meeting(lambda call: call.most):
        assert again(torch.ones(2)) == 3
    with pytest.raises(ConfigError, match="batch of a vectorized function"):
        flower_gpu.vectorized(batch=0)
