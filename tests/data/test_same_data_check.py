"""A data set of the user's own that is another one on one rank is told before anything is trained."""

from __future__ import annotations

import platform
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tiny import MaskedTokens, token_bundle

from pipeline.data.same_data_check import check_same_data, digest_samples, find_first_difference
from pipeline.distributed.process_group import Job
from pipeline.errors import DataError

pytestmark = pytest.mark.slow


class Samples:
    """A data set of what a function makes of an index."""

    def __init__(self, make, size=40):
        self.make = make
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.make(index)


def looks(make, size=40, **eval_sets):
    return digest_samples(replace(token_bundle(), train=Samples(make, size), eval={}, eval_sets=eval_sets))


def image(index):
    return np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def half(index):
    return torch.full((3,), index / 7).bfloat16()


SAMPLES = [
    lambda i: {"x": torch.arange(3) + i, "y": i % 2},
    lambda i: (torch.full((4,), i / 7), i),
    lambda i: [image(i), f"text {i}"],
    torch.tensor,
    half,
    lambda i: np.float32(i / 3),
    lambda i: torch.tensor([1.0, float("nan"), i]),
    lambda i: {"at random": torch.rand(2), "too": random.random(), "and": np.random.rand()},
]


@pytest.mark.parametrize("make", SAMPLES)
def test_the_same_is_the_same_and_one_other_sample_is_another(make):
    assert find_first_difference(looks(make), looks(make)) is None
    assert find_first_difference(looks(make), looks(make, 41)) == "the number of samples"
    if make is not SAMPLES[-1]:
        assert (
            find_first_difference(looks(make), looks(lambda i: make(i + (i == 0)))) == "sample 0 of 'train'"
        )
    other = {"held out": Samples(make, 7)}
    assert find_first_difference(looks(make), looks(make, **other)) == "the number of samples"


def test_rounding_is_no_difference():
    def nearly(scale):
        return looks(lambda i: torch.full((4,), i / 7) * scale)

    assert find_first_difference(nearly(1.0), nearly(1.0 + 1e-6)) is None
    assert find_first_difference(nearly(1.0), nearly(1.01)) is not None


def check(job: Job, kind: str):
    data = token_bundle()
    if job.ranks.rank == 1 and kind == "other":
        data = replace(data, train=MaskedTokens(seed=7))
    if job.ranks.rank == 1 and kind == "held out":
        data = replace(data, eval={"tiny": MaskedTokens(19, seed=7)})
    if kind == "augmented":
        generator = np.random.default_rng(job.ranks.rank)  # its own: nothing here can seed it
        data = replace(data, train=Samples(lambda i: {"x": generator.random(3)}))
    if job.ranks.rank == 1 and kind == "prepared":
        data = replace(data, fingerprint="other")
    try:
        check_same_data(job, data, is_custom=kind != "prepared")
    except DataError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("same", None),
        ("augmented", None),
        ("other", "sample 0 of 'train'"),
        ("held out", "sample 0 of 'tiny'"),
        ("prepared", "its content"),
    ],
)
def test_the_rank_that_has_other_data_is_named_by_all(ranks, kind, where):
    said = ranks(2).run(check, kind)
    assert said[0] == said[1]
    if where is None:
        assert said[0] is None
    else:
        assert said[0].startswith("rank 1 on ")
        assert f"prepared other data than rank 0 on {platform.node()} ({where} differs)" in said[0]
