"""Preference losses equal TRL's for the same batch: value, gradient norm and rewards; see make_values.py."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from trl_values.model import margin_of, small_model

from pipeline.config.objective_schema import ObjectiveConfig
from pipeline.models.huggingface import get_reward_model_class
from pipeline.objectives import OBJECTIVES, GlobalBatch, LogprobRecorder

TRL = json.loads(Path(__file__).with_name("values.json").read_text())
SECTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"kind": "dpo"},
    "dpo hinge": {"kind": "dpo", "loss_type": "hinge"},
    "dpo ipo": {"kind": "dpo", "loss_type": "ipo"},
    "dpo robust": {"kind": "dpo", "loss_type": "robust", "label_smoothing": 0.1},
    "dpo of means": {"kind": "dpo", "length_normalised": True, "beta": 2.0},
    "dpo sft": {"kind": "dpo", "sft_weight": 0.3},
    "kto": {"kind": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.8},
    "orpo": {"kind": "orpo"},
    "cpo": {"kind": "cpo"},
    "cpo smoothed": {"kind": "cpo", "label_smoothing": 0.2},
    "cpo hinge": {"kind": "cpo", "loss_type": "hinge", "beta": 0.5},
    "cpo ipo": {"kind": "cpo", "loss_type": "ipo", "sft_weight": 0.5},
    "simpo": {"kind": "simpo", "beta": 2.0, "gamma": 1.0},
    "reward": {"kind": "reward"},
    "reward of margins, centred": {"kind": "reward", "center_weight": 0.01},
}
OURS = {
    "rewards/accuracies": "rewards/accuracy",
    "rewards/margins": "rewards/margin",
}


def answers(kind: str) -> list[list[tuple[int, list[int], list[int]]]]:
    """The segments of each example: (kind, prompt, answer)."""
    data = TRL["data"]
    if kind == "kto":
        return [
            [
                (1 if each["desirable"] else 2, each["prompt"], each["answer"]),
                (3, each["prompt"], each["mismatched"]),
            ]
            for each in data["examples"]
        ]
    pairs = data["short" if kind == "orpo" else "pairs"]
    return [[(1, each["prompt"], each["chosen"]), (2, each["prompt"], each["rejected"])] for each in pairs]


def batch_of(examples, in_row: int) -> dict[str, Tensor]:
    rows = [list(chain(*examples[at : at + in_row])) for at in range(0, len(examples), in_row)]
    length = max(sum(len(prompt) + len(answer) for _, prompt, answer in row) for row in rows)
    size = (len(rows), length)
    batch = {
        "input_ids": torch.zeros(size, dtype=torch.long),
        "labels": torch.full(size, -100),
        "position_ids": torch.zeros(size, dtype=torch.long),
        "segments": torch.full(size, -1),
        "segment_kinds": torch.zeros(len(rows), 2 * in_row, dtype=torch.long),
    }
    for row, segments in enumerate(rows):
        at = 0
        for number, (kind, prompt, answer) in enumerate(segments):
            end = at + len(prompt) + len(answer)
            batch["input_ids"][row, at:end] = torch.tensor(prompt + answer)
            batch["labels"][row, at + len(prompt) : end] = torch.tensor(answer)
            batch["position_ids"][row, at:end] = torch.arange(end - at)
            batch["segments"][row, at:end], batch["segment_kinds"][row, number] = number, kind
            at = end
        batch["position_ids"][row, at:] = torch.arange(length - at)
    return batch


@pytest.mark.parametrize("in_row", [1, 3], ids=["a row each", "packed"])
@pytest.mark.parametrize("name", SECTIONS)
def test_it_is_trls(name, in_row):
    section = TypeAdapter(ObjectiveConfig).validate_python(SECTIONS[name])
    objective = OBJECTIVES[section.kind](section, None, None)
    phases = (0.2, 0.0) if name == "kto" else (0.0, 0.2)
    model, reference = map(small_model, phases)
    batch = batch_of(answers(section.kind), in_row)
    if section.kind == "reward":
        model = small_model(0.0, lambda config: get_reward_model_class(config)(config))
    if "margins" in name:
        margins = [value for pair in TRL["data"]["pairs"] for value in (margin_of(pair), 0.0)]
        batch["margins"] = torch.tensor(margins).view(batch["segment_kinds"].shape)
    recorded = LogprobRecorder(objective)
    with torch.no_grad():
        recorded(reference, batch)
    batch["reference_logps"] = recorded.logps_BS.float()
    objective.prepare_step(GlobalBatch(model, [batch], dict, torch.clone, torch.device("cpu")))
    found = objective(model, batch)
    assert found.count == objective.count(batch)
    (found.loss_sum / found.count).backward()
    values = {
        name: found.extras[part] / found.extras[whole] for name, (part, whole) in objective.means.items()
    }
    norms = torch.stack([p.grad.double().norm() for p in model.parameters()])
    values |= {"loss": found.loss_sum / found.count, "grad_norm": norms.norm()}
    expected = dict(TRL["values"][name])
    if name == "kto":
        expected.pop("rewards/margins")  # a difference of two means, which nobody is told of
    for key, value in expected.items():
        # Rewards are small differences of sums of log-probabilities, which TRL takes in fp32. Ours are 7e-6
        # off where MKL multiplies without AVX-512.
        rounding = 1e-5 if key.startswith("rewards/") else 0.0
        assert float(values[OURS.get(key, key)].detach()) == pytest.approx(value, rel=1e-6, abs=rounding), key
