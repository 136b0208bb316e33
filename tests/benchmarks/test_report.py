"""What the throughput benchmark claims of the rows it measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.benchmarks import imported

report = imported("report")

ROW = report.Row(
    name="ours",
    peer="ours",
    split="plain",
    precision="bf16",
    ranks=1,
    model="llama-50k",
    rows="unpacked",
    sequence_length=256,
    micro_batch_size=4,
    round_tokens_per_second=[200.0, 210.0, 190.0],
    first_step_seconds=4.0,
    loss=10.0,
    flops_per_token=None,
    peak_memory_gib=1.0,
)


def peer_of(row, name, rate, **changes):
    return replace(row, name=name, peer=name, round_tokens_per_second=[rate] * 3, **changes)


def held(rows, on_gpu=False):
    return {claim.what: claim.holds for claim in report.claims_of(rows, on_gpu)}


@pytest.mark.parametrize(
    ("rate", "memory", "first", "holds"), [(100.0, 2.0, 5.0, True), (106.0, 1.9, 4.9, False)]
)
def test_with_50k_words_ours_must_be_twice_the_trainer(rate, memory, first, holds):
    trainer = peer_of(ROW, "trainer", rate, peak_memory_gib=memory, first_step_seconds=first)
    assert held([ROW, trainer]) == {
        "tokens/s, ours over trainer": holds,
        "peak memory, ours over trainer": holds,
        "first step, ours over trainer": holds,
    }


@pytest.mark.parametrize(
    ("peer", "on_gpu", "changes", "wanted"),
    [
        ("trainer", False, {"split": "2"}, 1.7),
        ("trainer", False, {"model": "default"}, 1.35),
        ("trainer", False, {"model": "default", "split": "2"}, 1.35),
        ("trainer", False, {"adapter": True}, 1.3),
        ("trainer", False, {"model": "tiny"}, None),
        ("trainer", True, {}, 1.5),
        ("pytorch+our-loss", False, {}, 1.0),
        ("deepspeed+our-loss", True, {}, 1.0),
        ("pytorch", False, {}, None),
        ("pytorch-compiled", False, {}, None),
        ("pytorch-compiled", True, {}, 1.1),
    ],
)
def test_what_is_wanted_depends_on_the_split_the_peer_and_the_device(peer, on_gpu, changes, wanted):
    ours = replace(ROW, **changes)
    assert report.least_ratio(ours, replace(ours, peer=peer), on_gpu) == wanted


def test_an_adapter_is_held_to_peft_and_to_a_step_of_all_weights():
    ours = replace(ROW, adapter=True)
    trainer, full = peer_of(ours, "trainer", 150.0), peer_of(ours, "ours-full", 160.0, loss=1.0)
    assert held([ours, trainer, full]) == {
        "tokens/s, ours over trainer": True,
        "time of a step, ours over ours-full": False,
    }
    assert held([ours, trainer, replace(full, adapter=False)]) == {"tokens/s, ours over trainer": True}
    assert report.disagreement([ours, trainer, full]) == 0.0  # it trains something else
    on_gpu = replace(ours, model="llama-8b", round_tokens_per_second=[1.6e4] * 3)
    assert held([on_gpu], on_gpu=True) == {"tokens/s a GPU, ours": True}


def test_rows_are_compared_within_their_group_alone():
    trainer = peer_of(ROW, "trainer", 100.0)
    assert report.ratios([ROW, replace(trainer, ranks=2), replace(trainer, rows="packed")]) == []
    (ratio,) = report.ratios([ROW, trainer])
    assert (ratio["median"], ratio["min"], ratio["max"]) == (2.0, 1.9, 2.1)


def test_packed_rows_are_held_to_unpacked_ones_of_4096():
    unpacked = replace(ROW, sequence_length=4096)
    packed = replace(unpacked, rows="packed", round_tokens_per_second=[190.0] * 3)
    assert held([unpacked, packed]) == {"time, packed rows over unpacked, ours": False}
    assert held([replace(each, sequence_length=256) for each in (unpacked, packed)]) == {}


def test_a_loss_that_is_not_a_number_agrees_with_none():
    assert report.disagreement([ROW, peer_of(ROW, "trainer", 1.0, loss=float("nan"))]) == float("inf")
