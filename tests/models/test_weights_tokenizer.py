"""Weights from elsewhere know the ids of one tokenizer: another that was trained on the data is refused."""

from __future__ import annotations

import shutil

import pytest
from support.launch import write_recipe

from pipeline.cli.train import main as train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of one step; its tokenizer was trained on a few files."""
    folder = tmp_path_factory.mktemp("base")
    assert train(["--config", str(write_recipe(folder, max_steps=1)), f"run_dir={folder / 'run'}"]) == 0
    return folder


@pytest.fixture
def start(base, tmp_path, capsys):
    """`start(weights, key=value, ...)` -> (exit code, stderr) of a run that starts from these weights."""

    def function(weights, *overrides):
        given = ["--config", str(base / "recipe.yaml"), f"run_dir={tmp_path / 'new'}", "max_steps=1"]
        code = train([*given, "eval.max_samples=4", f"model.weights={weights}", *overrides])
        return code, capsys.readouterr().err

    return function


@pytest.fixture
def other_data(tmp_path):
    (tmp_path / "other.txt").write_text("the cat sat on the mat and the dog on the log\n" * 400)
    return f"data.paths=[{tmp_path / 'other.txt'}]", "data.eval_fraction=0"


@pytest.mark.parametrize("place", ["", "checkpoints/step-00000001"])
def test_the_ids_of_other_data_are_refused(base, start, other_data, place):
    code, err = start(base / "run" / place, *other_data)
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "was trained with another tokenizer than the one that this run trained on its data" in line
    named = line.split("use the tokenizer of the weights: ")[1]
    assert start(base / "run" / place, *other_data, named)[0] == 0


def test_the_same_data_give_the_same_ids(base, start):
    assert start(base / "run")[0] == 0


def test_of_a_bare_file_it_is_said_that_nobody_knows(base, start, tmp_path, other_data):
    from pipeline.__main__ import main

    assert main(["export", str(base / "run"), str(tmp_path / "out")]) == 0
    (tmp_path / "bare").mkdir()
    bare = shutil.copy(tmp_path / "out" / "model.safetensors", tmp_path / "bare")
    code, err = start(bare, *other_data, "model.strict=false")
    assert code == 0
    assert "has no tokenizer beside it" in err
    assert "name its tokenizer in data.tokenizer.pretrained" in err
