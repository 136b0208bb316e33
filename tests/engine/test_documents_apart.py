"""Every engine keeps the documents of a row apart, and none makes a mask or looks for documents to do so."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from support.tiny import deepspeed_json, make_engine, recipe, token_bundle
from transformers import masking_utils

from pipeline.distributed.process_group import Job
from pipeline.objectives import CausalLM

SPLITS = {
    "zero1": deepspeed_json(1, "fp32"),
    "zero3": deepspeed_json(3, "fp32"),
    "tensor": deepspeed_json(1, "fp32") | {"tensor_parallel": {"autotp_size": 2}},
    "sequence": deepspeed_json(1, "fp32") | {"sequence_parallel_size": 2},
    "stages": deepspeed_json(1, "fp32") | {"pipeline": {"stages": 2}},
    "ddp": None,
}
CUT = 9  # inside a rank's part of a divided sequence


@contextmanager
def no_masks():
    """transformers has no mask to give, and may not look at positions for one."""

    def refuse(*_, **__):
        raise AssertionError("a mask was asked for")

    masks, looked = (
        masking_utils.AttentionMaskInterface._global_mapping,
        masking_utils.find_packed_sequence_indices,
    )
    kept = dict(masks)
    masks.update(dict.fromkeys(masks, refuse))
    masking_utils.find_packed_sequence_indices = refuse
    try:
        yield
    finally:
        masks.update(kept)
        masking_utils.find_packed_sequence_indices = looked


def losses(job: Job, deepspeed) -> list[float]:
    """The second documents' loss over all ranks: as they are, after another first document, and behind it."""
    tree = recipe(batch={"micro_batch_size": 2, "gradient_accumulation_steps": 1})
    engine = make_engine(job, tree, deepspeed, token_bundle())
    ids = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, :CUT] = (other[:, :CUT] + 1) % 64
    labels = ids.roll(-1, 1)
    labels[:, :CUT] = labels[:, -1] = -100
    apart = torch.cat([torch.arange(CUT), torch.arange(24 - CUT)]).repeat(2, 1)
    found = []
    for tokens, positions in [(ids, apart), (other, apart), (ids, None), (other, None)]:
        batch = {"input_ids": tokens, "shift_labels": labels}
        batch |= {} if positions is None else {"position_ids": positions}
        with no_masks():
            loss = engine.eval_step(batch, CausalLM()).loss_sum.double()
        found.append(float(job.all_reduce_sum(loss.clone())))
    with no_masks():
        batch |= {"position_ids": apart}
        engine.train_step([batch], CausalLM(), 1e-3, 0)
    engine.close()
    return found


@pytest.mark.daily("sequence", "stages")
@pytest.mark.parametrize("split", SPLITS)
def test_a_document_does_not_see_the_one_before_it_and_no_mask_is_made(ranks, split):
    for alone, behind_another, seen, seen_another in ranks(2).run(losses, SPLITS[split]):
        assert alone == pytest.approx(behind_another, rel=1e-6)
        assert abs(seen - seen_another) > 1e-4 * abs(seen), "the test cannot fail"
