"""Intersections of regions of a tensor, against plain indexing; a huge one costs no more than its rows."""

from __future__ import annotations

import math

import pytest
import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.layers import _build_param_uc_restore_meta, _partition_logical_tensor
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.shards import Region, copy_runs, overlap
from pipeline.engine.state import TensorPlacement, split_among_ranks
from pipeline.engine.tensor_parallel import locate_part


@st.composite
def regions_of(draw, shape):
    box = None
    if draw(st.booleans()) and shape:
        limits = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        box = tuple((a, b) for a, b in limits)
    size = math.prod(shape if box is None else [b - a for a, b in box])
    start, stop = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    return Region(shape, box, start, stop - start)


@st.composite
def pairs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    return draw(regions_of(shape)), draw(regions_of(shape))


def values_of(region: Region) -> torch.Tensor:
    """The region's values, where the whole tensor counts from 0."""
    whole = torch.arange(math.prod(region.shape)).reshape(region.shape)
    if region.box is not None:
        whole = whole[tuple(slice(*limits) for limits in region.box)]
    return whole.flatten()[region.start : region.start + region.length]


@given(pairs())
def test_regions_meet_where_indexing_says(pair):
    a, b = pair
    runs = overlap(a, b).tolist()
    places = [(i + k, j + k) for i, j, length in runs for k in range(length)]
    in_b = {value: place for place, value in enumerate(values_of(b).tolist())}
    expected = [(i, in_b[value]) for i, value in enumerate(values_of(a).tolist()) if value in in_b]
    assert places == expected
    assert all(length > 0 for *_, length in runs)


@given(pairs())
def test_copied_runs_are_the_values(pair):
    a, b = pair
    source = values_of(a)
    target = torch.full((b.length,), -1)
    copy_runs(source, target, overlap(a, b))
    expected = torch.where(torch.isin(values_of(b), source), values_of(b), -1)
    assert torch.equal(target, expected)


def test_a_huge_tensor_cut_in_boxes_costs_its_rows():
    shape = (30_000, 40_000)
    left = Region(shape, ((0, 30_000), (0, 20_000)), 5, 30_000 * 20_000 - 5)
    flat = Region(shape, None, 40_000 * 100 - 7, 40_000 * 1_000)
    runs = overlap(left, flat)
    assert len(runs) == 1_000
    assert runs[:, 2].sum() == 1_000 * 20_000
    assert runs[0].tolist() == [100 * 20_000 - 5, 7, 20_000]


@given(st.data())
def test_what_a_cut_holds_is_written_once(data):
    """Two matrices in one, each cut over three ranks, in either dimension: shards are the whole."""
    dim = data.draw(st.integers(0, 1))
    widths = [[3, 2, 2], [1, 1, 2]]
    shape = (11, 4) if dim == 0 else (4, 11)
    whole = torch.arange(44, dtype=torch.float32).reshape(shape)
    seen = torch.zeros(44)
    for rank in range(3):
        picks = []
        boxes = []
        own_start = 0
        start = 0
        for each in widths:
            first = start + sum(each[:rank])
            width = each[rank]
            picks.append(whole.narrow(dim, first, width))
            rest = (0, 4)
            limits = [(own_start, own_start + width), (first, first + width)]
            boxes.append(tuple((at, rest) if dim == 0 else (rest, at) for at in limits))
            own_start = own_start + width
            start = start + sum(each)
        own = torch.cat(picks, dim)
        place = TensorPlacement("w", shape, tuple(own.shape), tuple(boxes))
        cut = data.draw(st.integers(0, own.numel()))
        for begin, end in ((0, cut), (cut, own.numel())):
            for shard in place.shards("weight", begin, own.flatten()[begin:end], to_fill=False):
                region = shard.region
                assert torch.equal(shard.values, values_of(region).float())
                seen[values_of(region)] += 1
        filled = torch.zeros_like(own)
        for shard in place.shards("weight", 0, filled, to_fill=True):
            shard.values.copy_(values_of(shard.region))
        assert torch.equal(filled, own)
    assert torch.equal(seen, torch.ones(44))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_copies_are_shared_out_evenly(sizes, count):
    held = [
        (TensorPlacement.whole(str(i), (n,)), "weight", torch.arange(float(n))) for i, n in enumerate(sizes)
    ]
    written = [
        sum(shard.region.length for shard in split_among_ranks(held, (rank, count), to_fill=False))
        for rank in range(count)
    ]
    assert sum(written) == sum(sizes)
    assert max(written) - min(written) <= 1


@pytest.mark.parametrize(
    ("shape", "view", "dim", "sizes"),
    [
        ((14, 3), (14, 3), 0, (8, 6)),
        ((3, 14), (3, 14), 1, (8, 6)),
        ((30, 4), (3, 10, 4), 1, None),
        ((30, 4), (3, 10, 4), 0, None),
        ((24, 5), (2, 4, 3, 5), 1, None),
        ((30,), (3, 10), 1, None),
        ((9,), (9,), 0, (4, 5)),
    ],
)
def test_a_cut_is_deepspeeds(shape, view, dim, sizes):
    """AutoTP's notes beside a parameter describe what it does to it: own values, over three ranks."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    widths = [[n // 3 + (rank < n % 3) for rank in range(3)] for n in sizes or (view[dim],)]
    seen = torch.zeros(whole.numel())
    for rank in range(3):
        cut = _partition_logical_tensor(whole.reshape(view), dim, 3, rank, widths, sizes)
        own = cut.reshape(-1, *cut.shape[-1:]) if len(shape) == 2 else cut.flatten()
        parameter = torch.nn.Parameter(own.float())
        told = _build_param_uc_restore_meta(
            partition_type="column",
            partition_dim=dim,
            logical_shape=view,
            original_shape=shape,
            sub_param_shard_widths=widths if sizes else None,
            partition_sizes=None if sizes else widths[0],
        )
        setattr(parameter, DS_AUTOTP_UC_META, told)
        place = locate_part("w", parameter, tuple(own.shape), rank, 3)
        for shard in place.shards("weight", 0, own, to_fill=False):
            assert torch.equal(shard.values, values_of(shard.region))
            seen[shard.values] += 1
    assert torch.equal(seen, torch.ones_like(seen))
