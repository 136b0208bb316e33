"""The loaders: groups of micro-batches, seeking, workers, and evaluation in step on every rank."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.token_store import Part, Store
from torch.utils.data import Dataset, Subset

from pipeline.data.batches import collate_items, raise_if_error, stack_samples
from pipeline.data.loader import BatchReader, EvalLoader, TrainLoader, read_batches
from pipeline.data.packing import pack_documents
from pipeline.data.sampler import BatchIndices, MixtureOrder, SourceShare
from pipeline.errors import DataError


class Words(Dataset):
    """Ids of which one, of sample 5, is 10."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"input_ids": torch.tensor([0, 9, 10 if index == 5 else 3])}


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"number": torch.tensor(index)}


class Random(Numbers):
    """Draws from every generator that a data set might use."""

    def __getitem__(self, index):
        drawn = [float(torch.rand(())), np.random.rand(), random.random()]
        return {"number": torch.tensor([index, *drawn], dtype=torch.float64)}


class Augmented(Numbers):
    def augmented(self, index, draw):
        return {"number": torch.tensor([index, draw % 2**62])}


def train_loader(dataset, **changes):
    settings = {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "dp_rank": 0,
        "dp_world_size": 1,
        "seed": 0,
        "num_workers": 0,
    }
    order = MixtureOrder((SourceShare("numbers", len(dataset)),), (settings | changes)["seed"])
    return TrainLoader(dataset, collate_items, order, torch.device("cpu"), **(settings | changes))


def eval_loader(dataset, **changes):
    settings = {
        "names_in_mean": (),
        "micro_batch_size": 2,
        "dp_rank": 0,
        "dp_world_size": 1,
        "max_samples": None,
        "num_workers": 0,
        "pin_memory": False,
    }
    datasets = dataset if isinstance(dataset, dict) else {"numbers": dataset}
    return EvalLoader(datasets, collate_items, **(settings | changes))


def numbers(groups):
    return [[batch["number"].tolist() for batch in group] for group in groups]


@pytest.fixture
def text():
    """Rows of 16 tokens, which count from 0 to 9,999."""
    tokens = np.arange(10_000, dtype=np.uint16)
    store = Store([Part(tokens, np.array([10_000]))])
    return pack_documents(store, "concatenate", 16, separate_documents=False, end_id=60_000)


def test_groups_and_counts():
    loader = train_loader(Numbers(20), dp_rank=1, dp_world_size=2)
    assert (loader.global_batch_size, loader.samples_seen) == (12, 0)
    group = loader.next_group()
    assert [batch["number"].shape for batch in group] == [(2,)] * 3
    assert loader.samples_seen == 12


@pytest.mark.slow
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


def test_a_data_set_smaller_than_a_batch_wraps():
    loader = train_loader(Numbers(1), micro_batch_size=4)
    assert numbers([loader.next_group()]) == [[[0] * 4] * 3]


def test_an_empty_data_set_is_an_error():
    with pytest.raises(DataError, match="training data is empty"):
        train_loader(Numbers(0))
    with pytest.raises(DataError, match=r"evaluation data set 'none' \(Numbers\) is empty"):
        eval_loader({"some": Numbers(3), "none": Numbers(0)})


def test_loading_leaves_the_global_random_state_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    train_loader(Random(9)).next_group()
    list(eval_loader(Random(9)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_data_set_draws_is_the_same_after_a_resume_and_in_workers(num_workers):
    straight = train_loader(Random(31))
    whole = numbers(straight.next_group() for _ in range(5))
    loader = train_loader(Random(31), num_workers=num_workers)
    loader.seek(6 * 3)
    torch.manual_seed(123)
    assert numbers(loader.next_group() for _ in range(2)) == whole[3:]
    loader.close()
    drawn = torch.tensor(whole).flatten(0, 2)[:, 1:]
    assert len(torch.unique(drawn)) == drawn.numel()  # no batch repeats another's


@pytest.mark.parametrize("data", [Random(50), Subset(Random(90), range(50))], ids=["whole", "subset"])
def test_what_a_sample_draws_is_the_same_at_any_number_of_ranks(data):
    (whole,) = numbers([train_loader(data, micro_batch_size=12, gradient_accumulation_steps=1).next_group()])
    groups = [
        numbers([train_loader(data, dp_rank=rank, dp_world_size=2).next_group()])[0] for rank in range(2)
    ]
    assert [s for micro in range(3) for rank in range(2) for s in groups[rank][micro]] == whole[0]


def test_an_augmented_sample_is_the_same_at_any_number_of_ranks():
    alone = train_loader(Augmented(50), micro_batch_size=12, gradient_accumulation_steps=1)
    whole = [sample for _ in range(5) for sample in numbers([alone.next_group()])[0][0]]
    ranks = [train_loader(Augmented(50), dp_rank=rank, dp_world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.seek(12)
    groups = [numbers([rank.next_group()])[0] for rank in ranks]
    assert [s for micro in range(3) for rank in range(2) for s in groups[rank][micro]] == whole[12:24]
    again = dict(whole[:50])
    assert all(again[index] != draw for index, draw in whole[50:])  # changed otherwise in the next epoch
    assert numbers([[batch for _, batch, _ in eval_loader(Augmented(4))]]) == [[[0, 1], [2, 3]]]


def test_a_batch_of_text_is_nobody_elses_memory(text):
    batch = text.__getitems__([3, 0])
    assert all(value.is_contiguous() for value in batch.values())  # transformers calls view(-1) on the labels
    batch["input_ids"].zero_()
    assert text[0]["input_ids"][1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_evaluation_gives_every_rank_as_many_batches(num_workers):
    loaders = [
        eval_loader(Numbers(7), dp_rank=rank, dp_world_size=3, num_workers=num_workers) for rank in range(3)
    ]
    for _ in range(2):  # a loader serves every evaluation of a run
        seen = [[(batch["number"].tolist(), is_real) for _, batch, is_real in loader] for loader in loaders]
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
            seen += [n for _, batch, is_real in loader if is_real for n in batch["number"].tolist()]
        assert sorted(seen) == [0, 1, 2, 3, 4]
    assert len(list(eval_loader(Numbers(3), max_samples=9))) == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_several_sets_come_one_behind_the_other(num_workers):
    sets = {"long": Numbers(9), "short": Numbers(1)}
    loader = eval_loader(sets, max_samples=5, num_workers=num_workers)
    assert (loader.names, loader.names_in_mean) == (("long", "short"), ("long", "short"))
    assert eval_loader(sets, names_in_mean=["short"]).names_in_mean == ("short",)
    for _ in range(2):
        seen = [(name, batch["number"].tolist()) for name, batch, _ in loader]
        assert seen == [("long", [0, 1]), ("long", [2, 3]), ("long", [4]), ("short", [0])]


def test_an_id_that_the_model_does_not_know_is_named_with_its_sample():
    """Wherever the batch is read, also by a worker: on a GPU the kernel would end the process."""
    for workers in (0, 1):
        sources = [[("one", 3), ("other", 9)]]
        fetch = BatchReader([Words()], stack_samples, 0, is_training=False, sources=sources, vocab_size=10)
        draws = [BatchIndices(0, 0, [0, 1]), BatchIndices(0, 2, [4, 5])]
        right, wrong = read_batches(fetch, draws, workers, pin_memory=False, persistent=False)
        assert raise_if_error(right)["input_ids"].shape == (2, 3)
        assert raise_if_error(right).origin.value_ranges == {"input_ids": (0, 0, 9)}
        with pytest.raises(DataError, match=r"has 10 \(sample 2 of other\), and the model has 10 token ids"):
            raise_if_error(wrong)
