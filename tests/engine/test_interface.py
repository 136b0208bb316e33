"""Copies of a batch on the device: their types."""

from __future__ import annotations

import torch

from pipeline.engine.interface import to_device


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
