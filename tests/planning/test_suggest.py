"""The split that is suggested: accepted by a dry run, and nothing that fits is both faster and smaller."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
import yaml
from support.launch import ROOT

from pipeline.config.settings import load_settings
from pipeline.planning.place import place_of
from pipeline.planning.shapes import model_of
from pipeline.planning.suggest import choose, fitting_splits, write

SIZES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_layers": 32, "num_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_layers": 40, "num_heads": 40},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80, "num_heads": 64}
    | {"num_key_value_heads": 8},
}
PLACES = {
    "1x24": (24, 1, 1),
    "1x80": (80, 1, 1),
    "8x80": (80, 8, 1),
    "2x8x80": (80, 8, 2),
    "64x80": (80, 8, 8),
}
DAILY = {("7b", "1x24"), ("13b", "8x80"), ("70b", "2x8x80")}


def recipe_of(folder, size):
    path = folder / f"{size}.yaml"
    model = {"kind": "causal_lm", "architecture": "llama", "vocab_size": 32000, **SIZES[size]}
    data = {"kind": "text", "paths": ["python_stdlib"], "sequence_length": 4096}
    batch = {"global_batch_size": 128}
    path.write_text(yaml.safe_dump({"max_steps": 100, "model": model, "data": data, "batch": batch}))
    return path


def case(size, place):
    return pytest.param(size, place, marks=() if (size, place) in DAILY else pytest.mark.nightly)


@pytest.mark.parametrize(("size", "where"), [case(size, place) for size in SIZES for place in PLACES])
def test_a_suggestion_is_accepted_and_nothing_beats_it(tmp_path, size, where):
    gib, per_node, nodes = PLACES[where]
    recipe = recipe_of(tmp_path, size)
    place = place_of(None, gib, per_node, nodes, None, None)
    settings = load_settings(recipe)
    model = model_of(settings.config)
    others, tried = fitting_splits(settings, model, place)
    found = choose(others, tried)
    assert found is not None
    best = found.best
    assert not [o for o in others if o.seconds < best.seconds and o.found.peak < best.found.peak]
    assert best.found.resolved.plan.global_batch_size == 128
    assert best.found.peak <= place.memory
    path = tmp_path / "split.json"
    text = write(found, path, recipe, "plan --suggest").read_text()
    command = shlex.split(text.rpartition("launch/train.py ")[2])
    words = [str(ROOT / "launch" / "train.py"), *command, "--dry-run", "--world-size", str(place.ranks)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text()) == best.json
    assert str(best.found.resolved.plan) in done.stdout
