"""Digits, data of the user's own, and the import paths that lead to it."""

from __future__ import annotations

import sys
import traceback

import pytest
import torch

from pipeline.config.data_schema import CustomDataConfig, DigitsDataConfig
from pipeline.config.import_paths import import_object
from pipeline.data import prepare_data
from pipeline.data.loader import TrainLoader
from pipeline.data.sampler import MixtureOrder
from pipeline.errors import DataError, ModelError

MODULE = """
import torch
from torch.utils.data import IterableDataset, TensorDataset

class Squares:
    num_classes = 4
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, index):
        return {"inputs": torch.tensor([index**2.0]), "labels": torch.tensor(index % 4)}

class Collating(Squares):
    def collate(self, items): return {"inputs": torch.stack([item["inputs"] for item in items]) * 10}

class Stream(IterableDataset):
    def __iter__(self): yield {}

def squares(split, *, length, with_eval=True):
    return Squares(length) if split == "train" or with_eval else None

def several(split, *, names, lengths=(4, 4)):
    sets = {name: Squares(length) for name, length in zip(names, lengths)}
    return Squares(4) if split == "train" else sets

def collating(split): return Collating(5)
def stream(split): return Stream()
def a_list_of_nothing(split): return []
def none(split): return None
def number(split): return 3
def broken(split): return {}["not there"]
def inner_type_error(split): return len(3)
not_callable = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current directory, which is not on sys.path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    (tmp_path / "own_data.py").write_text(MODULE)
    (tmp_path / "half_there.py").write_text("import a_module_that_is_not_there\n")
    return "own_data"


def prepare(path, **args):
    return prepare_data(CustomDataConfig(kind=path, args=args))


def error_of(path, **args):
    with pytest.raises(DataError) as caught:
        prepare(path, **args)
    message = str(caught.value)
    assert "\n" not in message
    assert path in message
    return message


@pytest.mark.slow
def test_digits_are_split_by_class():
    bundle = prepare_data(DigitsDataConfig(kind="digits"))
    (held_out,) = bundle.eval.values()
    assert (len(bundle.train), len(held_out), bundle.num_classes) == (1438, 359, 10)
    item = bundle.train[0]
    assert (item["inputs"].shape, item["inputs"].dtype, item["labels"].dtype) == (
        (1, 8, 8),
        torch.float32,
        torch.int64,
    )
    everything = bundle.train.__getitems__(range(len(bundle.train)))
    assert everything["inputs"].min() == 0
    assert everything["inputs"].max() == 1
    shares = torch.bincount(everything["labels"]) / (
        torch.bincount(everything["labels"]) + torch.bincount(held_out.labels)
    )
    assert (shares - 0.8).abs().max() < 0.01
    again = prepare_data(DigitsDataConfig(kind="digits"))
    assert torch.equal(again.eval["digits"].images, held_out.images)
    batch = bundle.collate([bundle.train[1], bundle.train[2]])
    assert torch.equal(batch["inputs"], bundle.train.__getitems__([1, 2])["inputs"])


@pytest.mark.slow
def test_digits_keep_every_class_on_both_sides():
    for fraction in (0.0001, 0.9999):
        bundle = prepare_data(DigitsDataConfig(kind="digits", eval_fraction=fraction))
        for split in (bundle.train, bundle.eval["digits"]):
            assert len(torch.unique(split.labels)) == 10


def test_data_of_ones_own(module):
    bundle = prepare(f"{module}:squares", length=6)
    assert (len(bundle.train), len(bundle.eval["eval"]), bundle.num_classes) == (6, 6, 4)
    loader = TrainLoader(
        bundle.train,
        bundle.collate,
        MixtureOrder(bundle.sources, 0),
        torch.device("cpu"),
        micro_batch_size=6,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_world_size=1,
        seed=0,
        num_workers=0,
    )
    (batch,) = loader.next_group()
    assert sorted(batch["inputs"].flatten().tolist()) == [0, 1, 4, 9, 16, 25]
    assert prepare(f"{module}:squares", length=6, with_eval=False).eval == {}


def test_several_sets_to_evaluate_on(module):
    bundle = prepare(f"{module}:several", names=["near", "far"])
    assert {name: len(dataset) for name, dataset in bundle.eval.items()} == {"near": 4, "far": 4}
    assert "called 'a/b'; a name may have letters" in error_of(f"{module}:several", names=["a/b"])
    assert 'the data set for "eval" (far) is empty' in error_of(
        f"{module}:several", names=["near", "far"], lengths=[3, 0]
    )


def test_its_own_collate(module):
    bundle = prepare(f"{module}:collating")
    assert bundle.collate([bundle.train[1]])["inputs"].tolist() == [[10.0]]


def test_what_cannot_be_called_is_named(module):
    assert "did you mean 'squares'?" in error_of(f"{module}:square")
    assert "change data.args" in error_of(f"{module}:squares", size=4)
    with pytest.raises(ModelError, match="no module"):
        import_object("own_dta:squares", ModelError)
    with pytest.raises(ModelError, match="is no import path"):
        import_object("own_data", ModelError)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("stream", 'returned a Stream for "train", which has no __len__'),
        ("number", "has no __len__ and no __getitem__"),
        ("none", 'returned None for "train"'),
        ("a_list_of_nothing", 'the data set for "train" is empty'),
    ],
)
def test_wrong_results(module, function, message):
    assert message in error_of(f"{module}:{function}")


def test_an_exception_of_the_users_keeps_its_traceback(module):
    for name, kind in (("broken", KeyError), ("inner_type_error", TypeError)):
        with pytest.raises(kind) as caught:
            prepare(f"{module}:{name}")
        assert traceback.extract_tb(caught.value.__traceback__)[-1].name == name
    missing = "half_there.py:1 imports 'a_module_that_is_not_there', which is not installed"
    assert missing in error_of("half_there:anything")
