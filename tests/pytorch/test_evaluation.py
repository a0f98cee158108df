"""Classification metrics against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flower_gpu.errors import ConfigError
from flower_gpu.pytorch.device import device
from flower_gpu.pytorch.evaluation import classification_metrics

pytestmark = pytest.mark.filterwarnings("error")


def reference(logits, labels):
    from sklearn import metrics  # takes seconds, also where tests are only collected

    predictions = logits.argmax(dim=1).numpy()
    probabilities = logits.double().softmax(dim=1).numpy()
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        labels.numpy(), predictions, average="macro", zero_division=0
    )
    return {
        "loss": metrics.log_loss(labels.numpy(), probabilities, labels=range(logits.shape[1])),
        "accuracy": metrics.accuracy_score(labels.numpy(), predictions),
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "num_examples": len(labels),
    }


@st.composite
def outputs(draw):
    classes = draw(st.integers(2, 7))
    examples = draw(st.integers(1, 40))
    # Few distinct labels and predictions, so that classes are missing on either side, or on both.
    pool = st.integers(0, draw(st.integers(0, classes - 1)))
    labels = torch.tensor(draw(st.lists(pool, min_size=examples, max_size=examples)))
    chosen = torch.tensor(draw(st.lists(st.integers(0, classes - 1), min_size=examples, max_size=examples)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(examples, classes, generator=generator)
    logits[torch.arange(examples), chosen] += draw(st.sampled_from([0.0, 2.0, 10.0]))
    return logits, labels


@settings(max_examples=examples(60))
@given(outputs(), st.integers(1, 12), st.booleans())
def test_equals_scikit_learn(data, batch_size, mapping):
    logits, labels = data
    loader = DataLoader(TensorDataset(logits, labels), batch_size=batch_size)
    if mapping:
        loader = [{"img": x, "label": y} for x, y in loader]
    got = classification_metrics(nn.Identity(), loader, device="cpu")
    want = reference(logits, labels)
    assert list(got) == list(want)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert {key: type(value) for key, value in got.items()} == {
        **dict.fromkeys(want, float),
        "num_examples": int,
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.BatchNorm1d(4).eval()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        self.modes = (self.training, self.norm.training, self.dropout.training)
        self.inference = torch.is_inference_mode_enabled()
        return self.head(self.dropout(self.norm(self.frozen(x))))


def test_model_is_evaluated_in_eval_mode_and_left_as_it_was():
    torch.manual_seed(0)
    model = Net()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = [(torch.randn(6, 4), torch.randint(0, 3, (6,)))]
    first = classification_metrics(model, batches, "cpu")
    assert model.modes == (False, False, False) and model.inference
    assert classification_metrics(model, batches, "cpu") == first
    assert model.training and model.norm.training and not model.frozen.training
    assert not torch.is_inference_mode_enabled()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    model(batches[0][0]).sum().backward()  # training goes on
    model.eval()
    classification_metrics(model, batches, "cpu")
    assert not any(module.training for module in model.modules())


def test_mode_is_restored_after_an_error():
    model = Net()
    with pytest.raises(RuntimeError):
        classification_metrics(model, [(torch.zeros(2, 5), torch.zeros(2).long())], "cpu")
    assert model.training and not model.frozen.training


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integer_labels_of_any_width(dtype):
    batch = (torch.eye(3), torch.tensor([0, 1, 1], dtype=dtype))
    assert classification_metrics(nn.Identity(), [batch], "cpu")["accuracy"] == pytest.approx(2 / 3)


def test_half_precision_outputs_are_summed_in_more():
    logits = torch.zeros(4096, 10, dtype=torch.bfloat16)
    batch = (logits, torch.zeros(4096, dtype=torch.long))
    got = classification_metrics(nn.Identity(), [batch], "cpu")
    assert got["loss"] == pytest.approx(np.log(10), rel=1e-6)


X, Y = torch.eye(3), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([], "no examples"),
        ([(X[:0], Y[:0])], "no examples"),
        ([(X, Y, Y)], "two parts, inputs and labels, got 3 parts"),
        ([X], "got Tensor"),
        ([(X, [0, 1, 2])], "as tensors, got list"),
        ([(X[0], Y)], r"logits of shape \(examples, classes\).*got shape \(3,\)"),
        ([(X[:, :1], Y)], r"got shape \(3, 1\)"),
        ([(X, Y[:2])], r"labels of shape \(3,\), got shape \(2,\)"),
        ([(X, X)], r"labels of shape \(3,\), got shape \(3, 3\)"),
        ([(X, Y.float())], "torch.float32"),
        ([(X, Y), (X[:, :2], Y)], "3 classes for one batch and 2"),
        ([(X, Y), (X, Y + 1)], "1 of 6 labels are not classes of the model, which are 0 to 2"),
        ([(X, Y - 1), (X, Y * 50)], "3 of 6 labels"),
    ],
)
def test_what_cannot_be_evaluated(batches, text):
    model = nn.Identity()
    with pytest.raises(ConfigError, match=text):
        classification_metrics(model, batches, "cpu")
    assert model.training


def test_a_model_that_gives_no_tensor():
    class Odd(nn.Module):
        def forward(self, x):
            return {"logits": x}

    with pytest.raises(ConfigError, match="got dict"):
        classification_metrics(Odd(), [(X, Y)], "cpu")


def test_default_device():
    want = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert device() == torch.device(want)

    class Seen(nn.Linear):
        def forward(self, x):
            self.device = x.device
            return super().forward(x)

    model = Seen(3, 3)
    classification_metrics(model, [(X, Y)])
    assert model.device == model.weight.device == device()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_gpu_gives_the_same_and_survives_bad_labels():
    torch.manual_seed(0)
    logits, labels = torch.randn(100, 5), torch.randint(0, 5, (100,))
    loader = DataLoader(TensorDataset(logits, labels), batch_size=16, pin_memory=True)
    got = classification_metrics(nn.Identity(), loader, "cuda:0")
    assert got == pytest.approx(reference(logits, labels), rel=1e-5)
    with pytest.raises(ConfigError, match="100 of 100 labels"):
        classification_metrics(nn.Identity(), [(logits, labels + 5)], "cuda:0")
    assert torch.ones(1, device="cuda:0").item() == 1
