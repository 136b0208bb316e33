"""The cause of a step's NaN: the batch before any layer, one sample, one rank. Nothing of the run changes."""

from __future__ import annotations

import re

import pytest
import torch
from support.corrupted_data import ALONE
from support.nonfinite_sample import FAULT, make_bundle
from support.tiny import deepspeed_json, recipe, resolve

from pipeline.data.random_numbers import seed_step
from pipeline.engine.nonfinite_cause import NonFiniteCauseSearch
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_loader

ROW = 2
MICRO_BATCH = 1
SPLITS = {
    "single": (1, None),
    "ddp": (2, None),
    "zero2": (2, deepspeed_json(2)),
    "zero3": (2, deepspeed_json(3)),
    "zero2-fp16": (2, deepspeed_json(2, "fp16")),
}
CASES = {
    "input": r"input `x` of sample {0}, on {1}",
    "minus infinity": r"input `x` of sample {0}, on {1}",
    "nested": r"input `state` of sample {0}, on {1}",
    "target": r"input `targets` of sample {0}, on {1}",
    "layer": r"the output of root \(NanWhereMarked\), in forward, on {1}; samples: {0}",
    "between": r"the input of norm \(\w*BatchNorm\w*\), in forward, on {1}; samples: {0}",
    "loss": r"the loss of sample {0}, on {1}",
    "gradient": r"the gradient of head\.\w+, in backward, on {1}; samples: {0}",
    "unread": None,
}
OF_FP16 = {"overflow": r"input `x` of sample {0} \(overflows fp16\), on {1}"}


def kept(engine):
    everything = [*(shard.values for shard in engine.shards()), *engine.module.buffers()]
    return [each.detach().clone() for each in everything], engine.scalars()


def searched(job, deepspeed, spoilt_rank, cases):
    """The cause found in each case, its sample, and whether the searches leave the run unchanged."""
    model = {"kind": "support.nonfinite_sample:Model"}
    objective = {"kind": "support.nonfinite_sample:loss", "reduction": "sum"}
    batch = {"micro_batch_size": 4, "gradient_accumulation_steps": 2}
    tree = recipe(model=model, objective=objective, batch=batch)
    config, resolved = resolve(tree, deepspeed, job.ranks.world_size)

    def run(with_searches):
        FAULT.case = ""
        found = {}
        engine = build_engine(config, resolved, job, make_bundle())
        loader = build_loader(config, resolved.batch_plan, make_bundle(), engine)
        objective = build_objective(config)

        def step(number):
            seed_step(0, number, engine.seed_rank)
            engine.train_step(loader.next_group(), objective, 1e-2, 0)

        step(0)
        for case in cases if with_searches else ():
            indices = job.gather_object(list(loader.read_again(16)[MICRO_BATCH].origin.indices))
            FAULT.case = case
            FAULT.sample = indices[spoilt_rank][ROW]
            search = NonFiniteCauseSearch(
                engine, objective, job, resolved.batch_plan, lambda: seed_step(0, 9, engine.seed_rank)
            )
            cause = search.find(loader.read_again(16))
            found[case] = (
                f"train {FAULT.sample}",
                None if cause is None else cause.describe(f"rank {cause.rank}"),
            )
        FAULT.case = ""
        step(1)
        result = kept(engine)
        loader.close()
        engine.close()
        return found, result

    (found, (tensors, scalars)), (_, (clean, clean_scalars)) = run(True), run(False)
    is_equal = all(map(torch.equal, tensors, clean)) and scalars == clean_scalars
    return found, is_equal


@pytest.mark.slow
@pytest.mark.daily("single", "zero3")
@pytest.mark.parametrize("split", SPLITS)
def test_the_sample_and_the_rank_of_a_cause_are_found_and_nothing_changes(ranks, split):
    world_size, deepspeed = SPLITS[split]
    cases = CASES | (OF_FP16 if "fp16" in split else {})
    for spoilt_rank in range(world_size):
        if split == "single":
            answers = [searched(ALONE, deepspeed, spoilt_rank, cases)]
        else:
            answers = ranks(world_size).run(searched, deepspeed, spoilt_rank, cases, timeout=500)
        for found, is_equal in answers:
            assert is_equal
            assert found == answers[0][0], "ranks answer alike"
        for case, expected in cases.items():
            sample, told = answers[0][0][case]
            if expected is None:
                assert told is None, (case, told)
            else:
                assert re.fullmatch(expected.format(sample, f"rank {spoilt_rank}"), told), (case, told)
