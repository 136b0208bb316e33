"""Reward models: their initial weights, their checkpoints, and equal rewards by transformers and peft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from parity.answers import SPLITS
from peft import PeftModel
from support.base_model import write_base_model
from support.preferences import ALONE, make_recipe, train_preferences
from transformers import AutoModelForSequenceClassification

import pipeline
from pipeline.__main__ import main
from pipeline.errors import ConfigError, ModelError

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the sky?"}]
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4}
ADAPTER = {"kind": "lora", "rank": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base_model(tmp_path_factory.mktemp("base"))


def settings(folder: Path, name: str, model: dict, tokenizer: Path, further: dict | None = None):
    pairs = [
        {
            "prompt": QUESTION,
            "chosen": [{"role": "assistant", "content": f"It is blue {number}."}],
            "rejected": [{"role": "assistant", "content": f"Who knows, {number} or so, I do not."}],
        }
        for number in range(24)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    recipe = {
        "run_dir": str(folder / name),
        "max_steps": 6,
        "model": {"kind": "causal_lm", **model},
        "objective": {"kind": "reward"},
        "data": {
            "kind": "preference",
            "paths": [str(folder / "pairs.jsonl")],
            "eval_fraction": 0.25,
            "sequence_length": 128,
            "tokenizer": {"pretrained": str(tokenizer)},
            "cache_dir": str(folder / "cache"),
            "prepare_workers": 1,
        },
        "batch": {"micro_batch_size": 2},
        "optimizer": {"learning_rate": 0.01},
        "wandb": {"mode": "disabled"},
    } | (further or {})
    path = folder / f"{name}.json"
    path.write_text(json.dumps(recipe))
    return pipeline.load_settings(path)


def run(asked) -> tuple[dict[str, float], torch.Tensor]:
    """The last evaluation, and the score of a sequence."""
    with pipeline.Run(asked) as trained:
        trained.train()
        with torch.no_grad():
            scores_BT1 = trained._parts.engine.module.eval()(IDS).logits
        assert trained.sample() is None
        return trained.evaluate(), scores_BT1[0, -1, 0]


IDS = torch.arange(1, 25)[None]


@torch.no_grad()
def score_of(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()(IDS).logits[0, 0]


def test_transformers_says_the_same_of_an_answer(tmp_path, base, capsys):
    row, expected = run(settings(tmp_path, "run", {"pretrained": str(base)}, base))
    assert row["eval/rewards/accuracy"] == 1
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    opens_it = f'AutoModelForSequenceClassification.from_pretrained("{tmp_path / "out"}") opens it'
    assert capsys.readouterr().out.splitlines()[-1] == opens_it
    torch.testing.assert_close(score_of(tmp_path / "out"), expected, rtol=1e-6, atol=2e-6)
    assert pipeline.evaluate(tmp_path / "run")["eval/loss"] == pytest.approx(row["eval/loss"], rel=1e-6)
    with pytest.raises(ModelError, match="no method `generate`"):
        pipeline.generate(tmp_path / "run", "Hello")
    # From there on: by its folder, or by the run.
    new = {"architecture": "llama", **SHAPE, "max_sequence_length": 128, "weights": str(tmp_path / "run")}
    for name, model in (("folder", {"pretrained": str(tmp_path / "out")}), ("weights", new)):
        with pipeline.Run(settings(tmp_path, name, model, base)) as further:
            assert further.evaluate()["eval/loss"] == pytest.approx(row["eval/loss"], rel=1e-6)


def test_an_adapter_trains_the_scoring_layer_whole(tmp_path, base):
    further = {"adapter": ADAPTER}
    row, expected = run(settings(tmp_path, "run", {"pretrained": str(base)}, base, further))
    assert row["eval/rewards/accuracy"] == 1
    pipeline.export(tmp_path / "run", tmp_path / "adapter")
    torch.testing.assert_close(score_of(base, tmp_path / "adapter"), expected, rtol=1e-5, atol=1e-5)
    merged = pipeline.export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert merged.auto_class == "AutoModelForSequenceClassification"
    torch.testing.assert_close(score_of(tmp_path / "merged"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.daily("stages 2")
@pytest.mark.parametrize("split", ["ZeRO 3", "tensor 2", "stages 2"])
def test_its_first_weights_are_the_same_under_every_split(ranks, base, split):
    words = json.loads((base / "config.json").read_text())["vocab_size"]
    new = {"architecture": "llama", **SHAPE, "max_sequence_length": 128, "vocab_size": words}
    expected = None
    for model in ({"pretrained": str(base)}, new | {"weights": str(base)}):
        tree = make_recipe("reward", 2) | {"model": {"kind": "causal_lm"} | model}
        alone = train_preferences(ALONE, tree, None)
        found = ranks(2).run(train_preferences, tree, SPLITS[split])[0]
        expected = expected or alone
        for rows in (alone, found):
            losses = [row["train/loss"] for row in rows if "train/loss" in row]
            assert losses == pytest.approx([row["train/loss"] for row in expected[:-1]], rel=1e-6)


def test_it_writes_nothing(tmp_path, base):
    with pytest.raises(ConfigError, match=r"sample: a reward model scores answers and generates no text"):
        settings(tmp_path, "run", {"pretrained": str(base)}, base, {"sample": {"prompt": "Hello"}})


def test_a_model_that_transformers_cannot_classify_with(tmp_path, base):
    new = {"architecture": "mamba", "num_layers": 1, "hidden_size": 32}
    with (
        pytest.raises(ModelError, match="no sequence classification for the model type mamba"),
        pipeline.Run(settings(tmp_path, "run", new, base)),
    ):
        pass
