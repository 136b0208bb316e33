"""What a user's own data, model and loss can do wrong in a run: one line and exit code 2."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipeline.cli import main

X, Y = torch.randn(8, 3), torch.arange(8) % 4


class Endless(IterableDataset):
    def __len__(self):
        return 8

    def __iter__(self):
        return iter(X)


class TwoImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, left, right):
        return self.layer(left - right)


DATA = {
    "good": lambda split: TensorDataset(X, Y),
    "uneven": lambda split: [(torch.zeros(3 + i), 0) for i in range(8)],
    "nothing": lambda split: [None] * 8,
    "too_large": lambda split: TensorDataset(X, Y + 1),
    "too_large_to_evaluate": lambda split: TensorDataset(X, Y + (split == "eval")),
    "negative": lambda split: TensorDataset(X, Y - 1),
    "floats": lambda split: TensorDataset(X, Y.float()),
    "columns": lambda split: TensorDataset(X, Y[:, None]),
    "names": lambda split: [(x, "cat") for x in X],
    "unlabelled": lambda split: list(X),
    "integers": lambda split: TensorDataset(X.long(), Y),
    "narrow": lambda split: TensorDataset(X[:, :2], Y),
    "pairs": lambda split: [{"first": x, "second": x, "labels": y} for x, y in zip(X, Y, strict=True)],
    "one_in_ten": lambda split: TensorDataset(X, torch.tensor([0, 1, 2, 3, 0, 1, 2, 9])),
    "endless": lambda split: Endless(),
    "loaders": lambda split: DataLoader(TensorDataset(X, Y)),
    "arrays": lambda split: (X, Y),
    "sets": lambda split: {"train": X},
    "broken": lambda split: {}["not there"],
}


def data(split, name):
    return DATA[name](split)


def linear():
    return nn.Linear(3, 4)


def two_images():
    return TwoImages()


made = nn.Linear(3, 4)


def packed(samples):
    return pack_sequence([x for x, _ in samples])


def left_out(samples):
    return torch.stack([x for x, y in samples if y > 9] or [torch.zeros(0)])[:0]


def of_two(samples, more):
    return samples


def detached(outputs, batch):
    return F.cross_entropy(outputs, batch["targets"], reduction="sum").detach()


def misnamed(outputs, batch):
    return F.cross_entropy(outputs, batch["target"], reduction="sum")


def own_cross_entropy(outputs, batch):
    return F.cross_entropy(outputs, batch["targets"], reduction="sum")


def of_one(outputs):
    return outputs.sum()


def raising(outputs, batch):
    return {}["mine"]


@pytest.fixture
def ends(tmp_path, capfd, monkeypatch):
    """`ends(code, "key=value", ...)` -> what the run wrote on stderr."""
    monkeypatch.chdir(tmp_path)
    tree = {
        "max_steps": 3,
        "model": {"kind": "test_bad_code:linear"},
        "data": {"kind": "test_bad_code:data", "args": {"name": "good"}},
        "objective": {"kind": "classification"},
        "batch": {"global_batch_size": 4},
        "wandb": {"mode": "disabled"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))

    def function(code, *overrides):
        assert main(["--config", "recipe.yaml", *overrides]) == code
        return capfd.readouterr().err

    return function


def own(section, name):
    return f"data.args.name={name}" if section == "data" else f"{section}.kind=test_bad_code:{name}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([own("data", "uneven")], "inputs of one batch cannot be stacked: ("),
        ([own("data", "uneven"), "loader.num_workers=1"], "inputs of one batch cannot be stacked: ("),
        ([own("data", "nothing")], "the data set gave None for a sample"),
        ([own("data", "too_large")], "'targets' has 4, and the model has 4 outputs: expected 0 to 3"),
        ([own("data", "too_large_to_evaluate")], "'targets' has 4, and the model has 4 outputs"),
        ([own("data", "one_in_ten"), "eval.max_samples=4"], "'targets' has 9, and the model has 4 outputs"),
        ([own("data", "negative")], "'targets' has -1, and the model has 4 outputs"),
        ([own("data", "floats")], "reads class numbers (integers from 0) from 'targets'"),
        ([own("data", "columns")], "returned (4, 4), and 'targets' has (4, 1)"),
        ([own("data", "names")], "reads class numbers (integers from 0) from 'targets'"),
        ([own("data", "unlabelled")], "reads 'labels', and the batch has inputs (4, 3) float32"),
        ([own("data", "integers")], "is given int64 of shape (4, 3); expected floating-point"),
        ([own("data", "narrow")], "is given float32 of shape (4, 2); expected a last dimension of 3"),
        ([own("data", "pairs")], "Linear.forward(input) does not fit the batch: missing"),
        ([own("data", "pairs"), "model.inputs=[third]"], "model.inputs: the batch has no 'third'"),
        ([own("model", "two_images")], "TwoImages.forward(left, right) does not fit the batch: missing"),
        ([own("data", "endless")], "returned a Endless for \"train\", which can only be iterated over"),
        ([own("data", "loaders")], "return the data set, and the batches are made for you"),
        ([own("data", "arrays")], "returned a tuple for \"train\"; expected one map-style"),
        ([own("data", "sets")], "returned a dict for \"train\" of train; expected one map-style"),
        (["data.collate_fn=test_bad_code:packed"], "the batch holds a PackedSequence"),
        (["data.collate_fn=test_bad_code:left_out"], "a batch without a sample: inputs (0,"),
        (["data.collate_fn=test_bad_code:of_two"], "missing a required argument: 'more'"),
        (["data.collate_fn=test_bad_code:no_such"], "has no 'no_such'"),
        ([own("model", "made")], "is a module; name a function or a class that makes it"),
        ([own("objective", "detached")], "the loss does not depend on any parameter that is trained"),
        ([own("objective", "misnamed")], "'target' was asked of a batch that has no such entry: inputs"),
        ([own("objective", "of_one")], "of_one(outputs) cannot be called with (outputs, batch)"),
        ([own("objective", "own_cross_entropy"), own("data", "too_large")], "labels of a cross entropy are"),
        (["objective.kind=causal_lm"], "reads 'labels', and the batch has inputs"),
        (["objective.kind=model_loss"], "objective.kind is model_loss, and the model returned a tensor of"),
    ],
)  # fmt: skip
def test_it_is_one_line(ends, overrides, message):
    told = ends(2, *overrides)
    assert "Traceback" not in told
    (line,) = [line for line in told.splitlines() if line.startswith("error:")]
    assert message in line


@pytest.mark.parametrize(
    ("override", "last"),
    [(own("data", "broken"), "KeyError: 'not there'"), (own("objective", "raising"), "KeyError: 'mine'")],
)
def test_the_users_own_error_keeps_its_traceback(ends, override, last):
    told = ends(1, override)
    assert "Traceback" in told
    assert last in told
    assert "test_bad_code.py" in told
