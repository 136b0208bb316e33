"""What runs took corrects the next plan of their kind, and no other."""

from __future__ import annotations

import pytest
from planner.test_states import whole_of
from support.tiny import deepspeed_json, recipe, resolve

from pipeline.planner.place import LIMITS, MOST_LINES, Correction, History, Kind, Measured

KIND = Kind("H100 SXM 80GB", "llama", "DeepSpeed, ZeRO stage 2, bf16", True)
OTHER = Kind("H100 SXM 80GB", "gpt2", "DeepSpeed, ZeRO stage 2, bf16", True)


def test_without_a_run_of_its_kind_nothing_is_corrected(tmp_path):
    history = History(tmp_path)
    assert history.correction(KIND) == Correction()
    history.add(Measured(OTHER, 1.1, 0.9, 1e12))
    assert history.correction(KIND) == Correction()
    assert history.flops("H100 SXM 80GB") == 1e12


def test_the_newest_runs_are_averaged(tmp_path):
    history = History(tmp_path)
    for memory, speed in [(9.0, None), *[(1.1, 0.8), (1.1, None)] * 3]:
        history.add(Measured(KIND, memory, speed, None))
    found = History(tmp_path).correction(KIND)
    assert found.memory == pytest.approx(1.1)
    assert found.speed == pytest.approx(0.8)
    history.add(Measured(OTHER, 9.0, 0.01, None))
    assert (history.correction(OTHER).memory, history.correction(OTHER).speed) == LIMITS[::-1]


def test_a_damaged_file_and_one_that_cannot_be_written_do_no_harm(tmp_path):
    history = History(tmp_path)
    history.add(Measured(KIND, 1.1, 1.0, None))
    path = tmp_path / "plans.jsonl"
    path.write_text(path.read_text() + '{"kind": 3}\nnot JSON\n{"kind": {}, "memory": NaN}\n')
    assert history.correction(KIND).runs == 1
    (line,) = [line for line in path.read_text().splitlines() if KIND.family in line]
    path.write_text(f"{line}\n" * (MOST_LINES + 3))
    history.add(Measured(OTHER, 1.2, 1.0, None))
    assert len(path.read_text().splitlines()) == MOST_LINES
    assert history.correction(OTHER).runs == 1
    blocked = tmp_path / "file"
    blocked.write_text("")
    History(blocked / "below").add(Measured(KIND, 1.0, 1.0, None))


def test_a_small_model_or_batch_or_another_offload_is_another_kind():
    def kind(rows=8, **changes):
        tree = recipe(batch={"micro_batch_size": rows}, **changes)
        config, resolved = resolve(tree, deepspeed_json(2), 1)
        return Kind.of("2 CPU cores", whole_of(tree), config, resolved)

    def offloaded():
        tree = recipe(batch={"micro_batch_size": 8})
        config, resolved = resolve(tree, deepspeed_json(2, offload_optimizer={"device": "cpu"}), 1)
        return Kind.of("2 CPU cores", whole_of(tree), config, resolved)

    wide = {"model": recipe()["model"] | {"intermediate_size": 4096}}
    assert kind() == kind()
    assert len({kind(), kind(rows=32), kind(**wide), offloaded()}) == 4
