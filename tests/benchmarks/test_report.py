"""The throughput benchmark's tables and ratios, from rows that it measured."""

from __future__ import annotations

from dataclasses import replace

from support.benchmarks import import_benchmark

report = import_benchmark("report")

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


def test_rows_are_compared_within_their_group_alone():
    trainer = peer_of(ROW, "trainer", 100.0)
    assert report.ratios([ROW, replace(trainer, ranks=2), replace(trainer, rows="packed")]) == []
    (ratio,) = report.ratios([ROW, trainer])
    assert (ratio["median"], ratio["min"], ratio["max"]) == (2.0, 1.9, 2.1)


def test_a_loss_that_is_not_a_number_agrees_with_none():
    full = peer_of(ROW, "ours-full", 1.0, loss=1.0)
    assert report.disagreement([ROW, full]) == 0.0, "it trains something else"
    assert report.disagreement([ROW, peer_of(ROW, "trainer", 1.0, loss=float("nan"))]) == float("inf")
