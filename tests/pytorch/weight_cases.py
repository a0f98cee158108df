"""Models and strategies for the tests of weights."""

from __future__ import annotations

import copy

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

FLOATS = [torch.float16, torch.float32, torch.float64]
INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
DTYPES = [*FLOATS, *INTEGERS, torch.bfloat16, torch.bool, torch.complex64, torch.complex128]
NUMPY = {dtype: np.dtype(str(dtype).split(".")[-1]) for dtype in DTYPES if dtype != torch.bfloat16}


class Bag(nn.Module):
    """A module with arbitrary tensors as the entries of its state_dict."""

    def __init__(self, tensors):
        super().__init__()
        for i, tensor in enumerate(tensors):
            if tensor.is_floating_point() and i % 2:
                self.register_parameter(f"entry{i}", nn.Parameter(tensor))
            else:
                self.register_buffer(f"entry{i}", tensor)


def bits(tensor):
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def same(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert ours[name].shape == theirs[name].shape, name
        assert bits(ours[name]) == bits(theirs[name]), name


def snapshot(model):
    return copy.deepcopy(model)


shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def tensors(draw, dtypes=DTYPES):
    """Draw a tensor of any bits, shape and memory layout. All kinds of NaN occur, except in bfloat16."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(shapes)
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    tensor = torch.empty(shape, dtype=dtype)
    if size:
        tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape).clone()
    # A cast in torch keeps a NaN, but not its bits.
    if dtype == torch.bfloat16:
        tensor = torch.where(tensor.isnan(), torch.ones_like(tensor), tensor)
    if tensor.ndim > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if tensor.ndim and draw(st.booleans()):
        tensor = torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.tensor([True, False]))

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean(dim=(2, 3))) * self.scale


def train(model, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    for _ in range(steps):
        x = torch.randn(8, 1, 6, 6, generator=generator)
        y = torch.randint(0, 3, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
