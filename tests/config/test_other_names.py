"""Names of optimizers and schedules that people bring along: the advice of each refusal, followed, works."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import yaml
from support import extending
from torch import nn

from pipeline.cli.train import main
from pipeline.config.optimizer_schema import OTHER_OPTIMIZERS, OTHER_SCHEDULES, OptimizerConfig
from pipeline.engine.optim import build_torch_optimizer

RECIPE = """\
max_steps: 10
model: {kind: causal_lm, architecture: llama, hidden_size: 64, num_layers: 1, num_heads: 4}
data: {kind: text, paths: [nothing-is-read.txt]}
"""
KIND = re.compile(r"\b(?:write|or) ([a-z]\w+(?:\.\w+)*(?::\w+)?)(?=[ ,;]|$)")
NAMES = [("optimizer", name) for name in OTHER_OPTIMIZERS] + [("schedule", name) for name in OTHER_SCHEDULES]


@pytest.fixture
def dry_run(tmp_path, capsys):
    """`dry_run(arguments)`: exit code and what it said."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)

    def function(*arguments):
        code = main(["--config", str(recipe), "--dry-run", *arguments])
        return code, capsys.readouterr().err

    return function


@pytest.mark.parametrize(("section", "name"), NAMES)
def test_the_advice_works(section, name, dry_run, monkeypatch):
    code, said = dry_run(f"{section}.kind={name.upper()}")
    assert code == 2
    assert said.startswith(
        f"error: command line: {section}.kind: {name.upper()!r} is no kind of this trainer: "
    )
    assert said.count("\n") == 1
    advice = said.partition("trainer: ")[2].strip()
    more = [f"{key}=1" for key in re.findall(r"and (schedule\.\w+)", advice)]
    kinds = [kind for kind in KIND.findall(advice) if kind not in ("keep", "write")]
    monkeypatch.setitem(sys.modules, "my_optimizer", extending)
    for kind in kinds:
        assert dry_run(f"{section}.kind={kind}", *more) == (0, "")
        if section == "optimizer":
            groups = [{"params": [nn.Parameter(torch.ones(2, 3))], "weight_decay": 0.0, "lr_factor": 1.0}]
            build_torch_optimizer(groups, OptimizerConfig(kind=kind))
    for file in re.findall(r"ds_configs/\w+\.json", advice):
        assert dry_run("--deepspeed", file, f"optimizer.kind={kinds[0]}")[0] == 0
    for groups in re.findall(r"optimizer\.groups: (\[.*\])", advice):
        assert dry_run(f"optimizer.groups={groups}") == (0, "")
        assert yaml.safe_load(groups)[0]["kind"] == "muon"
    for part in re.findall(r"(\w+) (?:of|in) docs/extending\.md", advice):
        assert hasattr(extending, part), "the page shows it"
    assert kinds or "docs/extending.md" in advice


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("optimizer.kind=adamv", "optimizer.kind: 'adamv' is no known kind (did you mean \"adamw\"?)"),
        ("optimizer.kind=AdamW", '(did you mean "adamw"?); your own: package.module:function'),
        ("schedule.kind=cosin", "schedule.kind: 'cosin' is no known kind (did you mean \"cosine\"?)"),
        ("schedule.kind=x.y", "schedule.kind: 'x.y' is no known kind (valid: constant, cosine, linear, wsd)"),
        ("optimizer.args={a: 1}", "optimizer.args: adamw is built in and takes none; drop it, or name your"),
        (
            "optimizer.groups=[{patterns: [x], kind: lion}]",
            "optimizer.groups.0.kind: input should be 'adamw'",
        ),
    ],
)
def test_other_words_are_one_line(given, words, dry_run):
    code, said = dry_run(given)
    assert code == 2
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("optimizer.kind=a:b", "optimizer.betas=[0.8, 0.9]", "drop it, or write it into optimizer.args"),
        ("optimizer.kind=a:b", "optimizer.eps=1e-6", "optimizer.eps: a:b does not read it"),
        ("optimizer.kind=a:b", "optimizer.momentum=0.8", "optimizer.momentum: a:b does not read it"),
        ("schedule.kind=a:b", "schedule.warmup_steps=3", "schedule.warmup: a:b decides the"),
        ("schedule.kind=a:b", "schedule.decay_steps=3", "schedule.decay_steps: a:b decides the whole"),
        ("schedule.kind=a:b", "schedule.min_learning_rate_ratio=0.3", "move it into that function"),
    ],
)
def test_keys_that_an_own_part_does_not_read_are_refused(kind, given, words, dry_run):
    assert dry_run(kind) == (0, ""), "nothing is imported"
    code, said = dry_run(kind, given)
    assert code == 2
    assert words in said
