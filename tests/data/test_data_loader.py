"""The loaders: groups of micro-batches, seeking, workers, and evaluation in step on every rank."""

from __future__ import annotations

import pickle
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from pipeline.data.bundle import collate_items
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.data.text import TextDataset
from pipeline.errors import DataError


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"number": torch.tensor(index)}


def train_loader(dataset, **changes):
    settings = {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "dp_rank": 0,
        "dp_world_size": 1,
        "seed": 0,
        "num_workers": 0,
        "pin_memory": False,
    }
    return TrainLoader(dataset, collate_items, **(settings | changes))


def eval_loader(dataset, **changes):
    settings = {
        "micro_batch_size": 2,
        "dp_rank": 0,
        "dp_world_size": 1,
        "max_samples": None,
        "num_workers": 0,
        "pin_memory": False,
    }
    return EvalLoader(dataset, collate_items, **(settings | changes))


def numbers(groups):
    return [[batch["number"].tolist() for batch in group] for group in groups]


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "train.npy"
    np.save(path, np.arange(10_000).astype(np.uint16))
    return path


def test_groups_and_counts():
    loader = train_loader(Numbers(20), dp_rank=1, dp_world_size=2)
    assert (loader.global_batch_size, loader.samples_per_epoch, loader.samples_seen) == (12, 20, 0)
    group = loader.next_group()
    assert [batch["number"].shape for batch in group] == [(2,)] * 3
    assert loader.samples_seen == 12
    assert loader.epoch == pytest.approx(0.6)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_seek_goes_on_as_if_never_stopped(num_workers):
    straight = train_loader(Numbers(31))
    whole = numbers(straight.next_group() for _ in range(9))
    loader = train_loader(Numbers(31), num_workers=num_workers)
    assert numbers(loader.next_group() for _ in range(2)) == whole[:2]
    loader.seek(6 * 5)
    assert loader.samples_seen == 30
    assert numbers(loader.next_group() for _ in range(4)) == whole[5:]
    loader.seek(0)
    assert numbers([loader.next_group()]) == whole[:1]
    loader.close()


def test_seek_to_a_position_of_another_batch_size():
    small = train_loader(Numbers(50), micro_batch_size=1, gradient_accumulation_steps=1)
    stream = [loaded[0][0] for loaded in numbers(small.next_group() for _ in range(20))]
    large = train_loader(Numbers(50), micro_batch_size=3, gradient_accumulation_steps=2)
    large.seek(7)
    assert list(chain(*numbers([large.next_group()])[0])) == stream[7:13]


def test_a_data_set_smaller_than_a_batch_wraps():
    loader = train_loader(Numbers(1), micro_batch_size=4)
    assert numbers([loader.next_group()]) == [[[0] * 4] * 3]
    assert loader.epoch == 12


def test_an_empty_data_set_is_an_error():
    with pytest.raises(DataError, match=r"training data set \(Numbers\) is empty"):
        train_loader(Numbers(0))
    with pytest.raises(DataError, match="evaluation data set"):
        eval_loader(Numbers(0))


def test_loading_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    train_loader(Numbers(9)).next_group()
    list(eval_loader(Numbers(9)))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_text_of_a_step_is_the_same_on_any_number_of_ranks(token_file):
    dataset = TextDataset(token_file, 16)
    alone = train_loader(dataset, micro_batch_size=8, gradient_accumulation_steps=1).next_group()
    ranks = [
        train_loader(dataset, gradient_accumulation_steps=2, dp_rank=rank, dp_world_size=2).next_group()
        for rank in range(2)
    ]
    together = torch.cat([ranks[rank][micro]["input_ids"] for micro in range(2) for rank in range(2)])
    assert torch.equal(alone[0]["input_ids"], together)


def test_text_samples(token_file):
    dataset = TextDataset(token_file, 16)
    assert len(dataset) == 9_999 // 16
    batch = dataset.__getitems__([3, 0])
    assert batch["input_ids"].tolist() == [list(range(48, 64)), list(range(16))]
    assert torch.equal(batch["shift_labels"], batch["input_ids"] + 1)
    last = dataset[len(dataset) - 1]
    assert {key: (value.dtype, value.shape) for key, value in last.items()} == {
        "input_ids": (torch.int64, (16,)),
        "shift_labels": (torch.int64, (16,)),
    }
    assert collate_items([dataset[3], dataset[0]])["shift_labels"].equal(batch["shift_labels"])
    assert all(value.is_contiguous() for value in batch.values())  # transformers calls view(-1) on the labels
    batch["input_ids"].zero_()
    assert dataset[0]["input_ids"][1] == 1  # a batch is nobody else's memory
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_text_data_set_travels_as_a_path(token_file):
    dataset = TextDataset(token_file, 16)
    content = pickle.dumps(dataset)
    assert len(content) < 1000
    assert torch.equal(pickle.loads(content)[5]["input_ids"], dataset[5]["input_ids"])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_evaluation_gives_every_rank_as_many_batches(num_workers):
    loaders = [
        eval_loader(Numbers(7), dp_rank=rank, dp_world_size=3, num_workers=num_workers) for rank in range(3)
    ]
    for _ in range(2):  # a loader serves every evaluation of a run
        seen = [[(batch["number"].tolist(), is_real) for batch, is_real in loader] for loader in loaders]
        assert seen == [
            [([0, 1], True), ([6], True)],
            [([2, 3], True), ([0], False)],
            [([4, 5], True), ([0], False)],
        ]


def test_evaluation_stops_at_max_samples_whatever_the_number_of_ranks():
    for world in (1, 2, 3):
        seen = []
        for rank in range(world):
            loader = eval_loader(Numbers(100), max_samples=5, dp_rank=rank, dp_world_size=world)
            seen += [n for batch, is_real in loader if is_real for n in batch["number"].tolist()]
        assert sorted(seen) == [0, 1, 2, 3, 4]
    assert len(eval_loader(Numbers(3), max_samples=9)) == 2
