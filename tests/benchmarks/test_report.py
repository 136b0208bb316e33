"""What the throughput benchmark claims of the rows it measured, and that a kill loses none of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    return report


@pytest.fixture
def row(report):
    return report.Row(
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
        causal_flops_per_token=None,
        peak_memory_gib=1.0,
    )


def held(claims):
    return {claim.what: claim.holds for claim in claims}


@pytest.mark.parametrize(("theirs", "holds"), [(100.0, True), (106.0, False)])
def test_with_50k_words_ours_must_be_twice_the_trainer(report, row, theirs, holds):
    peer = replace(row, name="trainer", peer="trainer", round_tokens_per_second=[theirs] * 3)
    peer = replace(peer, peak_memory_gib=2.0 if holds else 1.9, first_step_seconds=5.0 if holds else 4.9)
    assert held(report.claims_of([row, peer], on_gpu=False)) == {
        "tokens/s, ours over trainer": holds,
        "peak memory, ours over trainer": holds,
        "first step, ours over trainer": holds,
    }


def test_what_is_wanted_depends_on_the_split_the_peer_and_the_device(report, row):
    def least(peer, on_gpu=False, **changes):
        ours = replace(row, **changes)
        return report.least_ratio(ours, replace(ours, peer=peer), on_gpu)

    assert least("trainer", split="2") == 1.7
    assert least("trainer", model="default") == least("trainer", model="default", split="2") == 1.35
    assert least("trainer", model="tiny") is None
    assert least("pytorch+our-loss") == least("deepspeed+our-loss", on_gpu=True) == 1.0
    assert least("pytorch") is None
    assert least("trainer", on_gpu=True) == 1.5
    assert least("pytorch-compiled", on_gpu=True) == 1.1


def test_an_adapter_is_held_to_peft_and_to_a_step_of_all_weights(report, row):
    ours = replace(row, adapter=True)
    trainer = replace(ours, name="trainer", peer="trainer", round_tokens_per_second=[150.0] * 3)
    full = replace(ours, name="ours-full", peer="ours-full", round_tokens_per_second=[160.0] * 3, loss=1.0)
    assert held(report.claims_of([ours, trainer, full], on_gpu=False)) == {
        "tokens/s, ours over trainer": True,
        "time of a step, ours over ours-full": False,
    }
    claims = report.claims_of([ours, trainer, replace(full, adapter=False)], on_gpu=False)
    assert [(claim.what, claim.wanted) for claim in claims] == [("tokens/s, ours over trainer", ">= 1.3")]
    assert report.disagreement([ours, trainer, full]) == 0.0  # it trains something else
    on_gpu = replace(ours, model="llama-8b", round_tokens_per_second=[1.6e4] * 3)
    unsloth = replace(on_gpu, name="trainer-unsloth", peer="trainer-unsloth")
    assert held(report.claims_of([on_gpu, unsloth], on_gpu=True)) == {
        "tokens/s, ours over trainer-unsloth": True,
        "tokens/s a GPU, ours": True,
    }


def test_rows_are_compared_within_their_group_alone(report, row):
    peer = replace(row, name="trainer", peer="trainer", ranks=2)
    assert report.ratios([row, peer, replace(peer, ranks=1, rows="packed")]) == []
    (ratio,) = report.ratios([row, replace(peer, ranks=1, round_tokens_per_second=[100.0] * 3)])
    assert (ratio["median"], ratio["min"], ratio["max"]) == (2.0, 1.9, 2.1)


def test_packed_rows_are_held_to_unpacked_ones_of_4096(report, row):
    unpacked = replace(row, sequence_length=4096)
    packed = replace(unpacked, rows="packed", round_tokens_per_second=[190.0] * 3)
    assert held(report.claims_of([unpacked, packed], on_gpu=False)) == {
        "time, packed rows over unpacked, ours": False
    }
    short = [replace(each, sequence_length=256) for each in (unpacked, packed)]
    assert report.claims_of(short, on_gpu=False) == []


def test_a_kill_loses_nothing_that_was_told(report, row, tmp_path):
    path = tmp_path / "made" / "rows.jsonl"
    report.append_line(path, {"machine": {}})
    report.append_line(path, {"burst": "ours", "tokens_per_second": 1.0})
    report.append_line(path, row.as_dict())
    with path.open("a") as file:
        file.write('{"name": "trainer", "lo')  # killed here
    assert report.read_rows(path) == [row]


def test_a_failure_is_on_the_disk_when_it_happens(report, tmp_path, capsys):
    import throughput

    failures = throughput.Failures(tmp_path / "all.jsonl")
    failures.add("trainer", "trainer, rank 0: died")
    assert json.loads((tmp_path / "all.jsonl").read_text()) == {
        "failed": "trainer",
        "why": "trainer, rank 0: died",
    }
    assert "rank 0: died" in capsys.readouterr().err
