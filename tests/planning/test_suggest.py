"""The split that is suggested: accepted by a dry run, and nothing that fits is both faster and smaller."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from support.benchmarks import imported
from support.launch import ROOT

from pipeline.config.settings import load_settings
from pipeline.planning.place import place_of
from pipeline.planning.shapes import model_of
from pipeline.planning.suggest import choose, fitting_splits, write

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
