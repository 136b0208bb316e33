"""Ulysses: sequences divided over ranks give the oracle's curve and norm, whatever a batch has besides."""

from __future__ import annotations

import pytest
import torch
from support.tiny import MaskedTokens, deepspeed_json, make_engine, token_bundle
from test_tensor_parallel import (
    ALONE,
    hold_to_the_oracle,
    one_micro_batch,
)

from pipeline.distributed.process_group import Job
from pipeline.errors import DataError
from pipeline.objectives import CausalLM

pytestmark = pytest.mark.slow


def divided_json(stage: int, precision: str = "fp32", degree: int = 2, **zero):
    return deepspeed_json(stage, precision, **zero) | {"sequence_parallel_size": degree}


@pytest.mark.daily("mistral-window")
@pytest.mark.parametrize("model", ["gpt2", "qwen2-grouped", "mistral-window", "gemma2", "gpt_oss"])
def test_other_models_give_their_oracles_curve(ranks, model):
    hold_to_the_oracle(ranks(2), divided_json(2), model, steps=4)


def step_on(job: Job, tree, json, changes):
    """The loss and norm of a step on one batch with `changes`, or the error it gives."""
    engine = make_engine(job, tree, json, token_bundle())
    data = MaskedTokens(2)
    batch = {key: torch.stack([data[0][key], data[1][key]]) for key in data[0]} | changes
    batch = {key: value for key, value in batch.items() if value is not None}
    try:
        result = engine.train_step([batch], CausalLM(), 1e-3, False)
    except DataError as error:
        return str(error)
    return float(job.all_reduce_sum(result.loss_sum.double())), float(result.grad_norm)


def test_a_label_at_the_border_belongs_to_the_token_before_it(ranks):
    """`labels` as transformers has them, aligned with the inputs."""
    labels = torch.full((2, 24), -100)
    labels[:, 12] = 3  # predicted by position 11, on the other rank
    changes = {"shift_labels": None, "labels": labels}
    expected = step_on(ALONE, one_micro_batch("llama"), None, changes)
    assert (
        ranks(2).run(step_on, one_micro_batch("llama"), divided_json(1), changes)
        == [pytest.approx(expected, rel=1e-5)] * 2
    )


def test_padding_on_the_right_may_be_masked(ranks):
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[:, 20:] = 0
    tokens = torch.stack([MaskedTokens(2)[i]["shift_labels"] for i in range(2)])
    tokens[:, 20:] = -100
    changes = {"attention_mask": mask, "shift_labels": tokens}
    expected = step_on(ALONE, one_micro_batch("llama"), None, changes)
    assert ranks(2).run(step_on, one_micro_batch("llama"), divided_json(1), changes)[0] == pytest.approx(
        expected, rel=1e-5
    )


def test_documents_of_a_row_do_not_see_each_other_across_the_ranks(ranks):
    """The border between the ranks, at 12, lies inside a document."""
    changes = {"position_ids": torch.cat([torch.arange(9), torch.arange(11), torch.arange(4)]).expand(2, -1)}
    expected = step_on(ALONE, one_micro_batch("llama"), None, changes)
    assert expected != pytest.approx(step_on(ALONE, one_micro_batch("llama"), None, {}), rel=1e-5)
    for answer in ranks(2).run(step_on, one_micro_batch("llama"), divided_json(1), changes):
        assert answer == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.zeros(2, 23, dtype=torch.long)}, "does not divide sequences of 23 tokens"),
        ({"attention_mask": torch.arange(24).expand(2, -1) > 3}, "pad sequences on the right"),
        (
            {"position_ids": torch.arange(24)[None]},
            "position_ids of shape (1, 24) for input_ids of shape (2, 24)",
        ),
    ],
)
def test_batches_that_cannot_be_divided_are_refused_in_one_line(ranks, changes, message):
    for answer in ranks(2).run(step_on, one_micro_batch("llama"), divided_json(1), changes):
        assert message in answer
