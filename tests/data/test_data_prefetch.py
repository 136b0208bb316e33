"""Groups fetched ahead: the same ones, and a cursor that knows only what was handed out.

The copying stream is torch.cpu's, which does nothing: the code is a GPU's but for the memory.
"""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from pipeline.data.batches import collate_items
from pipeline.data.loader import TrainLoader
from pipeline.data.sampler import MixtureOrder, SourceShare
from pipeline.training.banner import describe_data_shortage

SOURCES = (SourceShare("web", 40, weight=3.0), SourceShare("code", 23, weight=1.0))


class Numbers(Dataset):
    """Sample i is the number i; counts how often it was read."""

    reads = 0

    def __len__(self):
        return 63

    def __getitem__(self, index):
        self.reads += 1
        return {"number": torch.tensor(index), "share": torch.tensor(index / 63)}


def prefetcher(is_prefetching=True, rank=0, world=1, micro=2, accumulation=3, dataset=None, num_workers=0):
    return TrainLoader(
        dataset or Numbers(),
        collate_items,
        MixtureOrder(SOURCES, 0),
        torch.device("cpu"),
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        dp_rank=rank,
        dp_world_size=world,
        seed=0,
        num_workers=num_workers,
        is_prefetching=is_prefetching,
    )


def numbers(group):
    return [batch["number"].tolist() for batch in group]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_fetched_ahead_is_what_would_have_come(num_workers):
    plain = prefetcher(False)
    ahead = prefetcher(True, num_workers=num_workers)
    for step in range(1, 8):
        expected = plain.next_group()
        group = ahead.next_group()
        assert numbers(group) == numbers(expected)
        assert all(torch.equal(a["share"], b["share"]) for a, b in zip(group, expected, strict=True))
        if step % 3:
            ahead.prefetch()
            ahead.prefetch()  # one group ahead, no more
        assert ahead.state_dict() == plain.state_dict()
        row = ahead.metrics()
        assert (row["train/samples_seen"], row["train/epoch"]) == (6 * step, 6 * step / 63)
    ahead.close()


def test_on_a_cpu_nothing_is_read_before_it_is_needed():
    dataset = Numbers()
    loader = prefetcher(None, dataset=dataset)
    loader.next_group()
    loader.prefetch()
    assert dataset.reads == 6


def test_closing_drops_what_was_fetched_ahead_and_goes_on():
    plain = prefetcher(False)
    ahead = prefetcher()
    assert numbers(ahead.next_group()) == numbers(plain.next_group())
    ahead.prefetch()
    ahead.close()
    assert numbers(ahead.next_group()) == numbers(plain.next_group())
    ahead.prefetch()
    ahead.seek(0)
    assert (ahead.samples_seen, numbers(ahead.next_group())) == (0, numbers(prefetcher().next_group()))


def collected(loaders, accumulation, steps):
    """The samples of some steps in their global order, put together from all ranks."""
    samples = []
    for _ in range(steps):
        groups = [numbers(loader.next_group()) for loader in loaders]
        for loader in loaders:
            loader.prefetch()
        samples += [s for m in range(accumulation) for group in groups for s in group[m]]
    return samples


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    splits=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4)),
        min_size=1,
        max_size=4,
    )
)
def test_stopped_and_resumed_at_other_splits_equals_never_having_stopped(splits):
    """Each split trains some steps, writes a checkpoint, and the next goes on from it."""
    together = []
    state = {"samples_seen": 0}
    for world, micro, accumulation, steps in splits:
        loaders = [prefetcher(True, rank, world, micro, accumulation) for rank in range(world)]
        for loader in loaders:
            loader.load_state_dict(state)
        together += collected(loaders, accumulation, steps)
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))  # as a checkpoint keeps it
    straight = prefetcher(False, micro=1, accumulation=1)
    assert together == [numbers(straight.next_group())[0][0] for _ in together]
    web = sum(sample < 40 for sample in together)
    assert state.get("source_samples", {}) == {"web": web, "code": len(together) - web}


def test_less_data_than_a_step_is_said():
    assert describe_data_shortage(prefetcher(micro=21)) is None
    assert "has 63 samples and a step takes 66" in (describe_data_shortage(prefetcher(micro=22)) or "")
