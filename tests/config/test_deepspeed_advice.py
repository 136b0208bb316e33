"""The advice of every refusal of a DeepSpeed JSON, followed to the letter, ends the refusal."""

from __future__ import annotations

import json

import pytest

from pipeline.config.loading import set_dotted
from pipeline.config.settings import load_settings
from pipeline.config.split import Device
from pipeline.errors import ConfigError

CPU = Device.cpu()
ODD_GPU = Device("cuda", bf16=True, fp16=False)
RECIPE = {"max_steps": 10, "model": {"kind": "cnn"}, "data": {"kind": "digits"}}


class Said:
    """A user's input: two files and a command line."""

    def __init__(self, split, recipe=None, *words, device=CPU):
        self.split, self.recipe, self.words = split, RECIPE | (recipe or {}), list(words)
        self.device = device

    def write(self, key, value):
        """Values in the JSON."""
        set_dotted(self.split, key.split("."), value, "test")

    def drop(self, tree, key):
        *above, last = key.split(".")
        for part in above:
            tree = tree[part]
        del tree[last]

    def load(self, folder):
        (folder / "split.json").write_text(json.dumps(self.split))
        (folder / "recipe.yaml").write_text(json.dumps(self.recipe))
        settings = load_settings(folder / "recipe.yaml", folder / "split.json", self.words)
        settings.resolve(1, self.device)


def optimizer(**params):
    return {"optimizer": {"type": "AdamW", "params": params}}


def scheduler(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


LR = "optimizer.params.lr"
HERE = 'write "auto" here'
# name: (what is said, words of the refusal that give the advice, the advice followed)
CASES = {
    "a number differs, auto": (
        lambda: Said(optimizer(lr=1e-4), {"optimizer": {"learning_rate": 1e-3}}),
        HERE,
        lambda said: said.write(LR, "auto"),
    ),
    "a number differs from the command line's": (
        lambda: Said({"gradient_clipping": 0.5}, None, "optimizer.max_grad_norm=2"),
        'command line: optimizer.max_grad_norm is 2; write "auto" here, or remove optimizer.max_grad_norm',
        lambda said: said.words.clear(),
    ),
    "a share of the run as a number of steps": (
        lambda: Said(scheduler("WarmupLR", warmup_num_steps=0.1)),
        'given 0.1; for a share of the run write "auto" here, and schedule.warmup in the recipe',
        lambda said: (
            said.write("scheduler.params.warmup_num_steps", "auto"),
            said.recipe.update(schedule={"warmup": 0.1}),
        ),
    ),
    "a decay ends elsewhere, dropped": (
        lambda: Said(scheduler("WarmupDecayLR"), {"schedule": {"min_learning_rate_ratio": 0.2}}),
        "or remove schedule.min_learning_rate_ratio there",
        lambda said: said.drop(said.recipe, "schedule.min_learning_rate_ratio"),
    ),
    "epochs beside steps": (
        lambda: Said(scheduler("WarmupDecayLR", total_num_steps=20), {"max_steps": None, "max_epochs": 2}),
        "or remove max_epochs there",
        lambda said: said.drop(said.recipe, "max_epochs"),
    ),
    "the JSON differs from itself": (
        lambda: Said({"gradient_clipping": 1.0, **optimizer(max_grad_norm=2.0)}),
        HERE,
        lambda said: said.write("optimizer.params.max_grad_norm", "auto"),
    ),
    "an optimizer of another type": (
        lambda: Said({"optimizer": {"type": "OneBitAdam"}}),
        "or remove the section, and set optimizer.kind in the recipe",
        lambda said: said.drop(said.split, "optimizer"),
    ),
    "a schedule of another type": (
        lambda: Said(scheduler("OneCycle", cycle_min_lr=1e-5)),
        "or remove the section, and set schedule.kind in the recipe",
        lambda said: (said.drop(said.split, "scheduler"), said.recipe.update(schedule={"kind": "linear"})),
    ),
    "torch beside DeepSpeed, dropped": (
        lambda: Said({"torch": {"parallel": "single"}, "zero_optimization": {"stage": 1}}),
        "does not read zero_optimization; remove the torch section, or remove these",
        lambda said: said.drop(said.split, "torch"),
    ),
    "torch and an engine": (
        lambda: Said({"torch": {"parallel": "single"}}, {"engine": {"precision": "fp32"}}),
        "remove one of the two",
        lambda said: said.drop(said.recipe, "engine"),
    ),
    "torch in fp16": (
        lambda: Said({"torch": {"parallel": "single"}, "fp16": {"enabled": True}}),
        "computes in fp32 or bf16; use ds_configs/zero2_fp16.json",
        lambda said: setattr(said, "split", {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}),
    ),
    "fp16 where there is none": (
        lambda: Said({"fp16": {"enabled": True}}, device=ODD_GPU),
        "or fp32 with ds.fp16.enabled=false",
        lambda said: said.words.append("ds.fp16.enabled=false"),
    ),
    "an auto that nothing fills": (
        lambda: Said({"zero_optimization": {"stage": 2, "round_robin_gradients": "auto"}}),
        "write a value",
        lambda said: said.write("zero_optimization.round_robin_gradients", True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_advice_that_is_followed_ends_the_refusal(tmp_path, name):
    make, advice, follow = CASES[name]
    said = make()
    with pytest.raises(ConfigError) as caught:
        said.load(tmp_path)
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert advice in message
    assert "\n" not in message
    follow(said)
    said.load(tmp_path)
