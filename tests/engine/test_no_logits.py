"""No engine's step makes the logits of a micro-batch, in training or evaluation."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from support.preferences import make_micro_batches, make_recipe, preference_bundle
from support.tiny import VOCABULARY, deepspeed_json, recipe, resolve, token_bundle
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pipeline.distributed.process_group import Job
from pipeline.objectives import build_objective
from pipeline.planner import model as chunks
from pipeline.training.assemble import build_engine, build_loader

pytestmark = pytest.mark.slow

ROWS = 16  # of a chunk; a micro-batch has 48 tokens, some 25 of which count


class Rows(TorchDispatchMode):
    """The most tokens that an operator returned values for the whole vocabulary of."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_iter(result):
            # A weight's transpose has 32 rows.
            if isinstance(each, torch.Tensor) and each.dim() and each.shape[-1] == VOCABULARY:
                rows = each.numel() // VOCABULARY
                self.most = max(self.most, rows if rows != 32 else 0)
        return result


def most_rows(job: Job, splits) -> dict[str, int]:
    """Most rows of logits of each split, in a step and in an evaluation, on this rank."""
    data = token_bundle(packed=True)
    found = {}
    for name, split in splits.items():
        config, resolved = resolve(recipe(), split, job.ranks.world_size)
        engine = build_engine(config, resolved, job, data)
        objective = build_objective(config)
        loader = build_loader(config, resolved.batch_plan, data, engine)
        group = loader.next_group()
        chunk = ROWS * VOCABULARY * (4 if resolved.split.precision == "fp32" else 2)
        with patch.object(chunks, "CPU_LOGITS_CHUNK", (chunk, 1)), Rows() as rows:
            engine.train_step(group, objective, 1e-3, 0)
            engine.eval_step(group[0], objective)
        found[name] = rows.most
        loader.close()
        engine.close()
    return found


TENSOR_2 = {"tensor_parallel": {"autotp_size": 2}}
SPLITS = {
    "ddp": {"torch": {"parallel": "ddp"}},
    **{f"ZeRO {stage}": deepspeed_json(stage, "bf16") for stage in (2, 3)},
    "ZeRO 0, fp16": deepspeed_json(0, "fp16"),
    "stages": deepspeed_json(1, "bf16") | {"pipeline": {"stages": 2}},
    "tensor": deepspeed_json(1, "bf16") | TENSOR_2,
    "sequence": deepspeed_json(2, "bf16") | {"sequence_parallel_size": 2},
}


def most_rows_of_answers(job: Job, splits) -> dict[str, int]:
    """The same as most_rows, for a loss of each token's log-probability over a frozen head."""
    tree = make_recipe("dpo", 4)
    tree["model"] = tree["model"] | {"freeze": ["lm_head.*"]}
    data = preference_bundle()
    found = {}
    for name, split in splits.items():
        config, resolved = resolve(tree, split, job.ranks.world_size)
        engine = build_engine(config, resolved, job, data)
        objective = build_objective(config)
        group = make_micro_batches(data.train, 0, resolved.batch_plan, engine.dp_rank, engine.dp_world_size)
        with patch.object(chunks, "CPU_LOGITS_CHUNK", (ROWS * VOCABULARY * 2, 1)), Rows() as rows:
            engine.train_step(group, objective, 1e-3, 0)
            engine.eval_step(group[0], objective)
        found[name] = rows.most
        engine.close()
    return found


def test_no_logits_of_answers_on_two_ranks(ranks):
    names = ("ZeRO 3", "stages")
    by_rank = ranks(2).run(most_rows_of_answers, {name: SPLITS[name] for name in names})
    for name in names:
        assert 0 < max(found[name] for found in by_rank) <= ROWS, name


def test_no_logits_on_two_ranks(ranks):
    by_rank = ranks(2).run(most_rows, SPLITS)
    for name in SPLITS:
        # Stages: only the last one has any.
        # Tensors: no rank has any of all words.
        least, most = (-1, 0) if "tensor" in name else (ROWS / 2, ROWS)
        assert least < max(found[name] for found in by_rank) <= most, name
