"""The split that is suggested: accepted by a dry run, and nothing that fits is both faster and smaller."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest
from support.benchmarks import imported
from support.launch import ROOT

from pipeline.config.settings import load_settings
from pipeline.planner.forecast import forecast_of
from pipeline.planner.place import History, Kind, Measured, place_of
from pipeline.planner.shapes import model_of
from pipeline.planner.suggest import choose, fitting_splits, suggest, write

suggestions = imported("suggestions")
DAILY = {("7B", "1 x 24"), ("13B", "8 x 80"), ("70B", "2 x 8 x 80")}


def case(size, place):
    return pytest.param(size, place, marks=() if (size, place) in DAILY else pytest.mark.nightly)


@pytest.mark.parametrize(
    ("size", "where"), [case(size, place) for size in suggestions.SIZES for place in suggestions.PLACES]
)
def test_a_suggestion_is_accepted_and_nothing_beats_it(tmp_path, size, where):
    gib, per_node, nodes = suggestions.PLACES[where]
    recipe = tmp_path / f"{size}.yaml"
    suggestions.write_recipe(recipe, size)
    place = place_of(None, gib, per_node, nodes, None, None)
    settings = load_settings(recipe)
    model = model_of(settings.config)
    others, tried = fitting_splits(settings, model, place)
    found = choose(others, tried)
    assert found is not None
    best = found.best
    row = f"| {size} | {where} | {suggestions.row(found)} |"
    assert row in (ROOT / "docs" / "planning.md").read_text("utf-8")
    assert not [o for o in others if o.seconds < best.seconds and o.found.peak < best.found.peak]
    assert best.found.resolved.plan.global_batch_size == 128
    assert best.found.peak <= place.memory
    path = tmp_path / "split.json"
    text = write(found, path, recipe, "plan --suggest").read_text()
    assert ("optimizer on " in text) == ("offload_optimizer" in best.json["zero_optimization"])
    command = shlex.split(re.split(r"(?:pipeline train|multi_node\.sh HOSTFILE) ", text)[1])
    words = [str(ROOT / "launch" / "train.py"), *command, "--dry-run", "--world-size", str(place.ranks)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text()) == best.json
    assert str(best.found.resolved.plan) in done.stdout


RECIPE = """
max_steps: 4
model:
  kind: causal_lm
  architecture: llama
  vocab_size: 512
  hidden_size: 64
  num_layers: 2
  num_heads: 2
  activation_checkpointing: full
  activation_offload: true
data: {kind: text, paths: [python_stdlib], sequence_length: 64}
batch: {micro_batch_size: 2, global_batch_size: 16}
"""
JSON = {
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.99]}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1, "total_num_steps": 4}},
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
}
TYPED = [
    "run_dir=my run",
    "optimizer.weight_decay=0.05",
    "batch.micro_batch_size=1",
    "ds.gradient_clipping=0.25",
]
TYPED += ["ds.gradient_accumulation_steps=8", "model.activation_budget_gib=1"]


@pytest.fixture
def tiny(tmp_path):
    """A recipe and a JSON in a folder whose name has a space, and what was typed."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    (folder / "it.yaml").write_text(RECIPE)
    (folder / "own.json").write_text(json.dumps(JSON))
    return load_settings(folder / "it.yaml", folder / "own.json", TYPED)


def planned(settings, place, history=None):
    return suggest(settings, model_of(settings.config), place, history)


def test_the_words_that_are_told_make_the_run_that_was_planned(tiny):
    """With what was typed and what the JSON stated, and without what of the recipe is not to be."""
    found = planned(tiny, place_of("h100", None, 2, 1, None, None))
    path = tiny.recipe_path.parent / "split.json"
    text = write(found, path, tiny.recipe_path, "plan --suggest").read_text()
    command = shlex.split(re.split(r"(?:pipeline train|multi_node\.sh HOSTFILE) ", text)[1])
    assert command[:4] == ["--config", str(tiny.recipe_path), "--deepspeed", str(path)]
    config = load_settings(tiny.recipe_path, path, command[4:]).config
    assert config.model_dump(exclude={"batch"}) == found.best.found.config.model_dump(exclude={"batch"})
    assert config.model.activation_offload is False
    assert config.model.activation_budget_gib is None
    assert config.run_dir == "my run"
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.betas, optimizer.weight_decay) == (3e-4, (0.9, 0.99), 0.05)
    assert (optimizer.max_grad_norm, config.schedule.warmup) == (0.25, 1)
    resolved = load_settings(tiny.recipe_path, path, command[4:]).resolve(2, found.best.found.place.device)
    assert resolved == found.best.found.resolved
    assert resolved.plan.global_batch_size == 16


def test_what_stands_against_a_suggestion_is_told_with_it(tiny):
    tiny.recipe_path.write_text(f"{RECIPE}engine: {{precision: bf16}}\n")
    settings = load_settings(tiny.recipe_path)
    found = planned(settings, place_of("h100", None, 1, 1, None, None))
    told = write(
        found, tiny.recipe_path.parent / "split.json", tiny.recipe_path, "plan --suggest"
    ).read_text()
    assert re.fullmatch(
        r"That is refused as it stands: .*it.yaml:\d+: engine: .*drop the section", told.splitlines()[-1]
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_candidates_are_planned_as_a_plan_is_and_corrected_by_what_runs_took(tiny, tmp_path, ranks):
    """Of a machine's processors, too: what an engine holds there is not what it holds on a GPU."""
    history, name = History(tmp_path), place_of(None, None, ranks, 1, None, 8).gpu.name
    history.add(Measured(Kind(name, "", "", False), memory=None, speed=None, flops=1e11))
    place, model = place_of(None, None, ranks, 1, None, 8, history), model_of(tiny.config)
    last = fitting_splits(tiny, model, place, history)[0][-1].found
    kind = Kind.of(name, model, last.config, last.resolved)
    history.add(Measured(kind, memory=1.25, speed=0.5, flops=1e11))
    fitting, _ = fitting_splits(tiny, model, place, history)
    corrected = set()
    for each in fitting:
        found = each.found
        plain = forecast_of(found.config, found.resolved, found.model, place, history)
        assert (each.found.peak, each.seconds) == (plain.peak, plain.time.seconds)
        if found.correction.runs:
            corrected.add(str(found.resolved.split))
    assert corrected == {kind.split}
