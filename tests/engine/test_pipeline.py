"""Pipeline stages give the whole model's curve, skip together, and leave a checkpoint it can go on from."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from parity.splits import GPT2, zero
from support.resume_across_splits import SPLITS as RESUMED
from support.resume_across_splits import Split, check_resume, make_recipe
from support.tiny import CPU, deepspeed_json, make_engine, recipe, settings, token_bundle

from pipeline.config.deepspeed_json import load_deepspeed_json
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError, ModelError
from pipeline.objectives import CausalLM

pytestmark = pytest.mark.slow

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"architecture": "gpt2", "extra": NO_DROPOUT},  # tied embeddings, learned positions
}


def recipe_for(model: str, micro_batch_size: int = 2, num_layers: int = 2, **extra: Any) -> dict[str, Any]:
    tree = recipe(batch={"micro_batch_size": micro_batch_size, "global_batch_size": 8})
    tree["model"] = tree["model"] | MODELS[model] | {"num_layers": num_layers} | extra
    return tree


def staged(stage: int, precision: str = "fp32", stages: int = 2, **pipeline: Any) -> dict[str, Any]:
    return deepspeed_json(stage, precision) | {"pipeline": {"stages": stages, **pipeline}}


def cut(job: Job, tree: dict[str, Any], deepspeed_tree: dict[str, Any]):
    """The layers each stage begins with, and the parameters of stage and model."""
    engine = make_engine(job, tree, deepspeed_tree, token_bundle())
    held = sum(p.numel() for p in engine.module.parameters())
    return list(engine.module.parts), held, engine.num_parameters


def test_partition_by_blocks_and_parameters(ranks):
    tree = recipe_for("llama", num_layers=4, vocab_size=4096)  # embedding and head outweigh the blocks
    for how in ("uniform", "parameters"):
        (parts, first, whole), (others, second, _) = ranks(2).run(cut, tree, staged(0, partition=how))
        assert parts == others == [0, 3, 7]
        assert first + second == whole
    lopsided = recipe_for("gpt2", num_layers=6, vocab_size=512)
    (uniform, *_), _ = ranks(2).run(cut, lopsided, staged(0, partition="uniform"))
    assert uniform == [0, 6, 11]  # embedding, positions, dropout, three blocks


def test_a_tied_weight_is_held_twice_and_counted_once(ranks):
    (_, first, whole), (_, second, _) = ranks(2).run(cut, recipe_for("gpt2"), staged(0))
    assert first + second - whole == 257 * 32


def bad_first_stage(job: Job, tree, deepspeed_tree):
    """A gradient that is not finite on the first stage alone: does the last one step?"""
    data = token_bundle()
    engine = make_engine(job, tree, deepspeed_tree, data)
    batch = {key: value[None].repeat(2, 1) for key, value in data.train[0].items()}
    engine.train_step([batch], CausalLM(), 1e-2, False)
    before = [p.detach().clone() for p in engine.module.parameters()]
    first = next(engine.module.parameters())
    handle = first.register_hook(lambda g: g * math.nan) if job.ranks.rank == 0 else None
    result = engine.train_step([batch], CausalLM(), 1e-2, False)
    if handle is not None:
        handle.remove()
    same = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    return same, float(result.skipped)


@pytest.mark.daily("1-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1])
def test_stages_skip_together(ranks, stage, precision):
    tree = recipe_for("llama")
    tree["batch"] = {"micro_batch_size": 2, "gradient_accumulation_steps": 1}
    answers = ranks(2).run(bad_first_stage, tree, staged(stage, precision))
    assert answers == [(True, 1.0), (True, 1.0)]


def test_a_run_goes_on_in_stages_that_are_cut_elsewhere(ranks):
    model = GPT2 | {"num_layers": 5, "vocab_size": 2048}
    uniform = Split(zero(1) | {"pipeline": {"stages": 2, "partition": "uniform"}})
    cuts = [
        ranks(2).run(cut, make_recipe(model), split.json)[0][0]
        for split in (RESUMED["pipeline-zero1"], uniform)
    ]
    assert cuts[0] != cuts[1]
    check_resume(ranks, RESUMED["pipeline-zero1"], uniform, model)


def test_uneven_shapes_within_and_across_steps(ranks):
    """Micro-batches of other lengths, with position ids: stages tell each other what is coming."""
    results = ranks(2).run(uneven, recipe_for("llama"), staged(0))
    expected = uneven(ALONE, recipe_for("llama"), None)
    for step, answer in enumerate(expected):
        total = sum(result[step][0] for result in results)
        assert total == pytest.approx(answer[0], rel=1e-5)
        assert results[0][step][1] == pytest.approx(answer[1], rel=1e-5)


def uneven(job: Job, tree, deepspeed_tree):
    tree = tree | {"batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 2}}
    data = token_bundle()
    engine = make_engine(job, tree, deepspeed_tree, data)
    answers = []
    for lengths, has_positions in [((24, 24), False), ((24, 11), False), ((9, 9), True), ((24, 24), False)]:
        micro_batches = []
        for index, length in enumerate(lengths):
            batch = {k: v[None, :length].repeat(2, 1) for k, v in data.train[index].items()}
            if has_positions:  # two documents packed into one sequence
                batch["position_ids"] = torch.cat([torch.arange(4), torch.arange(length - 4)])[None].repeat(
                    2, 1
                )
            micro_batches.append(batch)
        result = engine.train_step(micro_batches, CausalLM(), 1e-3, False)
        evaluated = engine.eval_step(micro_batches[1], CausalLM())
        answers.append((float(result.loss_sum) + float(evaluated.loss_sum), float(result.grad_norm)))
    return answers


def test_a_wrong_word_is_refused_with_the_right_ones(tmp_path):
    file = tmp_path / "stages.json"
    file.write_text(json.dumps(staged(0, partition="layers")))
    with pytest.raises(ConfigError, match=r"pipeline\.partition: expected parameters or uniform, given"):
        load_deepspeed_json(file, [])


def refusal(job: Job, tree, deepspeed_tree) -> str:
    try:
        make_engine(job, tree, deepspeed_tree, token_bundle())
    except ModelError as error:
        return str(error)
    return "nothing raised"


def test_a_model_that_cannot_be_cut_is_one_line(ranks):
    tree = recipe_for("llama")
    tree["model"] |= {"architecture": "opt", "extra": {"word_embed_proj_dim": 32}}
    for answer in ranks(2).run(refusal, tree, staged(0)):
        assert answer == (
            "model: a opt cannot be cut into pipeline stages, since its part embed_positions is unknown; "
            "use zero_optimization.stage 3"
        )


def test_more_stages_than_blocks_is_refused_before_any_rank_starts():
    with pytest.raises(ConfigError, match="more pipeline stages than `num_layers`"):
        settings(recipe_for("llama"), staged(0, stages=4)).resolve(4, CPU)
