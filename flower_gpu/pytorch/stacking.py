"""Stacks of tensors of several clients, for ``torch.func.vmap`` in a handler of ``flower_gpu.train_many``.

An item holds the tensors of one client. It is a tensor, or a dict, list or tuple of items, such as a state
dict or a pair of images and labels. :func:`stack` combines several items into a single item. Its tensors have
an additional first dimension, with an index for each client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def stack(items: Sequence[T]) -> T:
    """Return a single item with the stacked tensors of several items.

    Parameters
    ----------
    items : sequence of items
        Tensors of the same shape, or dicts, lists or tuples of such tensors, for example the clients' state
        dicts.

    Returns
    -------
    item
        An item of the same structure, with tensors of shape ``(len(items), *shape)``. The tensors are copies.

    Raises
    ------
    ValueError
        If there are no items, or they differ in their keys, lengths, shapes, dtypes or devices. The message
        names the entry. :func:`group_alike` finds items that can be stacked.
    TypeError
        If a value in an item is not a tensor.

    Examples
    --------
    >>> parameters = stack([message.content["arrays"].to_torch_state_dict() for message in messages])
    >>> images, labels = stack([load_data(context.node_config["partition-id"]) for context in contexts])
    """
    if not items:
        raise ValueError("there is nothing to stack: the list of items is empty")
    expected = _layout(items[0])
    for place, leaf in _leaves(items[0]):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{place} is a {type(leaf).__name__}, and only tensors can be stacked")
    for number, item in enumerate(items):
        layout = _layout(item)
        for place in {**expected, **layout}:
            if expected.get(place) != layout.get(place):
                raise ValueError(
                    f"items 0 and {number} cannot be stacked: {place} is {_text(expected.get(place))} in "
                    f"one and {_text(layout.get(place))} in the other. group_alike finds items that can be"
                )
    stacked: T = _map(lambda *tensors: torch.stack(tensors), *items)
    return stacked


def unstack(item: T) -> list[T]:
    """Return an item for each index of the first dimension. This reverses :func:`stack`.

    Parameters
    ----------
    item : item
        A tensor, or a dict, list or tuple of tensors, all with the same size of the first dimension.

    Returns
    -------
    list of items
        One item for each client. Clients share no memory: changing one item in place does not change others.

    Raises
    ------
    ValueError
        If tensors differ in the size of the first dimension, or have no dimension.
    TypeError
        If a value in the item is not a tensor, or if the item has no values.

    Examples
    --------
    >>> for message, parameters in zip(messages, unstack(trained), strict=True): ...
    """
    sizes: dict[str, int] = {}
    for place, leaf in _leaves(item):
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            what = "has no dimension" if isinstance(leaf, torch.Tensor) else f"is a {type(leaf).__name__}"
            raise TypeError(f"{place} {what}, and cannot be unstacked")
        sizes[place] = len(leaf)
    if len({*sizes.values()}) != 1:
        raise ValueError(f"tensors need one size of the first dimension, not {sizes}")
    # A result of vmap that is equal for all clients may have a single row in memory. Clients must not share
    # that row, so contiguous() copies it.
    rows = _map(lambda tensor: tensor.contiguous(), item)
    return [_map(itemgetter(number), rows) for number in range(min(sizes.values()))]


def group_alike(items: Sequence[Any]) -> list[list[int]]:
    """Return groups of items that can be stacked with each other.

    Parameters
    ----------
    items : sequence of items
        For each client a tensor, or a dict, list or tuple of tensors. Other values, such as a learning rate,
        must be equal within a group.

    Returns
    -------
    list of lists of int
        The positions of the items of each group. Items of a group have tensors of the same shapes, dtypes and
        devices. Groups are in the order of their first items.

    Raises
    ------
    TypeError
        If a value in an item is not a tensor, a number or a text.

    Examples
    --------
    >>> data = [load_data(context.node_config["partition-id"]) for context in contexts]
    >>> for group in group_alike(data):
    ...     images, labels = stack([data[place] for place in group])
    """
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for number, item in enumerate(items):
        layout = _layout(item)
        group = next((group for known, group in groups if known == layout), None)
        if group is None:
            group = []
            groups.append((layout, group))
        group.append(number)
    return [group for _, group in groups]


def _leaves(item: Any, place: str = "the item") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each leaf: a value in an item that is no mapping and no sequence."""
    if isinstance(item, Mapping):
        pairs: Any = item.items()
    elif isinstance(item, list | tuple):
        pairs = enumerate(item)
    else:
        yield place, item
        return
    for key, value in pairs:
        yield from _leaves(value, f"{place}[{key!r}]")


def _map(function: Callable[..., Any], *items: Any) -> Any:
    """Return an item of the results of ``function``, called once per leaf with that leaf of every item."""
    first = items[0]
    if isinstance(first, Mapping):
        return {key: _map(function, *(item[key] for item in items)) for key in first}
    if isinstance(first, list | tuple):
        values = [_map(function, *leaves) for leaves in zip(*items, strict=True)]
        return values if isinstance(first, list) else tuple(values)
    return function(*items)


def _layout(item: Any) -> dict[str, Any]:
    """Return the properties that must be equal in items that can be stacked, by the names of their leaves."""
    layout: dict[str, Any] = {}
    for place, leaf in _leaves(item):
        if isinstance(leaf, torch.Tensor):
            layout[place] = (tuple(leaf.shape), leaf.dtype, leaf.device)
        elif leaf is None or isinstance(leaf, int | float | str):
            layout[place] = (type(leaf), leaf)
        else:
            raise TypeError(f"{place} is a {type(leaf).__name__}: give tensors, numbers and texts")
    return layout


def _text(layout: Any) -> str:
    return "missing" if layout is None else str(layout)
