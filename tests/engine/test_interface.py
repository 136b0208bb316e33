"""Copies of a batch on the device, and the division of loss sums of docs/explanation/exact-loss.md."""

from __future__ import annotations

import json
import re

import pytest
import torch
from support.launch import ROOT
from support.tiny import TOLERANCES

from pipeline.engine.interface import backward_scale, mean_loss, to_device


def test_inputs_with_fractions_are_of_the_models_type_and_targets_stay_as_they_are():
    batch = {
        "inputs": torch.rand(2, 3),
        "input_ids": torch.arange(3),
        "targets": torch.rand(2),
        "weights": torch.rand(2),
    }
    inputs = {"inputs", "input_ids", "targets"}
    moved = to_device(batch, torch.device("cpu"), torch.bfloat16, inputs)
    assert {key: value.dtype for key, value in moved.items()} == {
        "inputs": torch.bfloat16,
        "input_ids": torch.int64,
        "targets": torch.float32,
        "weights": torch.float32,
    }
    assert to_device(batch, torch.device("cpu"), None, inputs)["inputs"].dtype == torch.float32


PAGE = (ROOT / "docs" / "explanation" / "exact-loss.md").read_text()


def test_the_example_of_the_page():
    """Its micro-batches as an engine divides them: on one rank, and on one rank for each."""
    rows = re.findall(r"^\| (.*\[.*\].*) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
    assert len(rows) == 2
    for split, mean_of_means, exact in rows:
        parts = [torch.tensor(json.loads(part)) for part in re.findall(r"\[.*?\]", split)]
        means = torch.stack([part.double().mean() for part in parts])
        assert float(means.mean()) == float(mean_of_means)
        count = torch.tensor(float(sum(map(len, parts))))
        assert float(mean_loss(sum(part.sum() for part in parts), count)) == float(exact)
        accumulated = sum(part.sum() * backward_scale(count, 1) for part in parts)
        averaged = torch.stack([part.sum() * backward_scale(count, len(parts)) for part in parts]).mean()
        assert float(accumulated) == float(averaged) == float(exact)


def test_the_page_has_the_limits_of_the_curves():
    for precision, (loss, norm) in TOLERANCES.items():
        assert [
            float(cell) for cell in re.findall(rf"^\| {precision} \| (.*?) \| (.*?) \|$", PAGE, re.M)[0]
        ] == [
            pytest.approx(loss),
            pytest.approx(norm),
        ]
