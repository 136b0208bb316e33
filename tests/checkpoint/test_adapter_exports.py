"""An adapter trained under any split, opened by peft over its base: the run's logits and evaluation loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity.adapters import WAYS
from parity.measure import ALONE
from peft import PeftModel
from support.checkpoint_stores import make_store
from support.resume_across_splits import Run, make_recipe, run_on_split
from support.resume_across_splits import Split as Division
from support.tiny import VOCABULARY, resolve, token_bundle
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pipeline
from pipeline.checkpoint.adapters import describe_adapter
from pipeline.checkpoint.initial_weights import open_checkpoint
from pipeline.evaluation.held_out import evaluate
from pipeline.models.transformers_facts import write_model_description
from pipeline.objectives import CausalLM
from pipeline.training.assemble import build_eval_loader

pytestmark = pytest.mark.slow

IDS = torch.arange(1, 25)[None]
SPLITS = {"plain": Division({"torch": {"parallel": "single"}}, 1)} | {
    name: Division(json) for name, json in WAYS.items()
}
IN_PARTS = ("sequence", "pipeline")  # whose module takes no whole row, or has no logits


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=24, **sizes)
    ).save_pretrained(folder)
    return folder


def made_run(job, recipe, json, folder, whole_rows):
    """A run directory after four steps; (evaluation loss, logits (1, T, V)) of its engine. Collective."""
    folder = Path(folder)
    run = Run(job, recipe, json)
    run.train(0, 4)
    config, resolved = resolve(recipe, json, job.ranks.world_size)
    loader = build_eval_loader(config, resolved.batch_plan, token_bundle(), run.engine)
    loss = evaluate(run.engine, CausalLM(), loader, job)["eval/loss"]
    about = describe_adapter(config, run.engine.module, job, open_checkpoint)
    make_store(folder / "checkpoints", job).save_final(run.engine, {"global_step": 4, **about})
    if job.ranks.is_main_process:
        write_model_description(run.engine.module, None, folder / "model")
        (folder / "recipe.yaml").write_text("max_steps: 4\n")
    if not whole_rows:
        return loss, None
    with torch.no_grad():
        return loss, run.engine.module.eval()(IDS).logits.numpy()


def opened(model) -> tuple[float, torch.Tensor]:
    """(evaluation loss, logits of IDS) of a model of transformers' or peft's."""
    samples = [token_bundle().eval["tiny"][index] for index in range(19)]
    with torch.no_grad():
        logits = model.eval()(torch.stack([each["input_ids"] for each in samples])).logits
        labels = torch.stack([each["shift_labels"] for each in samples])
        return float(cross_entropy(logits.flatten(0, 1), labels.flatten())), model(IDS).logits


def read(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_in_bf16_without_deepspeed_too_over_a_base_of_bf16(base, tmp_path):
    read(base).bfloat16().save_pretrained(tmp_path / "base")
    recipe = make_recipe({"kind": "causal_lm", "pretrained": str(tmp_path / "base")}, rate=0.1)
    recipe |= {"adapter": {"rank": 4, "alpha": 8.0}}
    split = {"torch": {"parallel": "single"}, "bf16": {"enabled": True}}
    _, logits = made_run(ALONE, recipe, split, str(tmp_path / "run"), True)
    pipeline.export(tmp_path / "run", tmp_path / "adapter")
    _, theirs = opened(PeftModel.from_pretrained(read(tmp_path / "base"), tmp_path / "adapter"))
    torch.testing.assert_close(theirs, torch.from_numpy(logits), rtol=0.0, atol=1e-6)


@pytest.mark.daily("ZeRO 3-dora", "pipeline 2, ZeRO 1-lora", "tensor 2, ZeRO 1-rslora")
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("split", SPLITS)
def test_peft_gives_what_the_run_gave(ranks, base, tmp_path, split, kind):
    recipe = make_recipe({"kind": "causal_lm", "pretrained": str(base)}, rate=0.1)
    recipe |= {"adapter": {"kind": kind, "rank": 4, "alpha": 8.0}}
    whole_rows = not split.startswith(IN_PARTS)
    loss, logits = run_on_split(ranks, SPLITS[split], made_run, recipe, str(tmp_path / "run"), whole_rows)[0]

    pipeline.export(tmp_path / "run", tmp_path / "adapter")
    pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    untrained, _ = opened(read(base))
    assert abs(untrained - loss) > 5e-4, "nothing was trained"
    for model, allowed in (
        (PeftModel.from_pretrained(read(base), tmp_path / "adapter"), 1e-6),
        (read(tmp_path / "merged"), 1e-5),
    ):
        found, theirs = opened(model)
        assert found == pytest.approx(loss, rel=allowed)
        if logits is not None:
            torch.testing.assert_close(theirs, torch.from_numpy(logits), rtol=0.0, atol=allowed)
