"""The loop takes its rows from anything that keeps to BatchSource: here, from what the model itself says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity.measure import ALONE
from support.tiny import recipe, resolve, token_bundle

from pipeline.data.loader import BatchSource
from pipeline.training.assemble import assemble, restore_progress
from pipeline.training.loop import TrainLoop

pytestmark = pytest.mark.slow

ROWS = 8
LENGTH = 6


class Rollouts:
    """Rows that the model continues from prompts, as it is at that step: nothing is read ahead."""

    def __init__(self, model):
        self._model = model
        self.samples_seen = 0
        self.made = []

    @torch.no_grad()
    def next_group(self):
        tokens = torch.arange(self.samples_seen, self.samples_seen + ROWS)[:, None]
        self._model.eval()
        for _ in range(LENGTH):
            tokens = torch.cat([tokens, self._model(input_ids=tokens).logits[:, -1:].argmax(-1)], dim=1)
        self._model.train()
        self.samples_seen += ROWS
        self.made.append(tokens)
        return [{"input_ids": tokens[:, :-1], "shift_labels": tokens[:, 1:]}]

    def metrics(self):
        return {"train/samples_seen": self.samples_seen}

    def state_dict(self):
        return {"samples_seen": self.samples_seen}

    def load_state_dict(self, state):
        self.samples_seen = state["samples_seen"]

    def close(self):
        pass


def trained(folder: Path, max_steps: int) -> tuple[list[dict], list[torch.Tensor]]:
    """The rows of the record, and the rows of tokens that were made."""
    config, resolved = resolve(recipe(max_steps=max_steps, log={"every": 1}), None, 1)
    run = assemble(config, resolved, ALONE, token_bundle(), folder)
    run.loader.close()
    rollouts = Rollouts(run.engine.module)
    source: BatchSource = rollouts
    chosen = run.checkpoints.choose()
    start, _ = restore_progress(
        run.checkpoints, chosen, engine=run.engine, source=source, max_steps=max_steps
    )
    with run.trackers, TrainLoop(replace(run, loader=source, start=start)) as loop:
        while loop.step() is not None:
            pass
    record = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in record if "train/loss" in row], rollouts.made


def test_rows_made_while_training_are_trained_on_and_gone_on_with(tmp_path):
    unbroken, made = trained(tmp_path / "unbroken", 6)
    assert [row["train/samples_seen"] for row in unbroken] == [ROWS * step for step in range(1, 7)]
    assert unbroken[-1]["train/loss"] < unbroken[0]["train/loss"]
    trained(tmp_path / "broken", 3)
    resumed, rest = trained(tmp_path / "broken", 6)
    assert [row["train/loss"] for row in resumed] == [row["train/loss"] for row in unbroken]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rest, made[3:], strict=True))
