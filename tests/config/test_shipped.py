"""Shipped recipes and DeepSpeed JSON files by name; a file of the user comes first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.launch import ROOT

from pipeline.__main__ import main
from pipeline.config.settings import load_settings
from pipeline.config.shipped import DS_CONFIGS, RECIPES
from pipeline.errors import ConfigError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_shipped_files_are_those_of_the_repository():
    assert DS_CONFIGS == ROOT / "ds_configs"
    assert RECIPES == ROOT / "launch" / "recipes"


@pytest.mark.parametrize("recipe", ["digits_cnn", "digits_cnn.yaml"])
@pytest.mark.parametrize("split", ["zero2", "zero2.json"])
def test_a_shipped_file_is_found_by_its_name(here, recipe, split):
    (here / "zero2").mkdir()  # an output folder of the user's
    settings = load_settings(recipe, split)
    assert settings.recipe_path == RECIPES / "digits_cnn.yaml"
    assert settings.deepspeed_path == DS_CONFIGS / "zero2.json"


def test_a_file_of_the_user_comes_first(here):
    (here / "zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    shutil.copy(RECIPES / "digits_cnn.yaml", here / "python_stdlib")
    settings = load_settings("python_stdlib", "zero2.json")
    assert settings.deepspeed_path == Path("zero2.json")
    assert settings.config.model.kind == "cnn"


@pytest.mark.parametrize(
    ("recipe", "split", "said"),
    [
        (
            "digits_cnn",
            "zero4",
            'error: --deepspeed zero4: no such file (did you mean "zero3"?); shipped are ddp, ',
        ),
        (
            "digit_cnn",
            None,
            'error: --config digit_cnn: no such file (did you mean "digits_cnn"?); shipped are dig',
        ),
        (
            "mine.yml",
            None,
            'error: --config mine.yml: no such file (did you mean "mine.yaml"?); shipped are digits',
        ),
        (
            "digits_cnn",
            "x/zero2.json",
            "error: x/zero2.json: no such file; for the shipped one: --deepspeed zero2\n",
        ),
        ("folder", None, "error: folder: cannot be read: Is a directory; name a file in it\n"),
    ],
)
def test_a_wrong_name_says_which_there_are(here, capsys, recipe, split, said):
    (here / "mine.yaml").write_text("{}")
    (here / "folder").mkdir()
    words = ["--config", recipe, *(["--deepspeed", split] if split else [])]
    for command in (["train", "--dry-run"], ["plan"]):
        assert main([*command, *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(said)
        assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "plan", "prepare", "inspect"])
def test_every_command_takes_a_name(command, capsys):
    options = {"train": ["--dry-run"], "plan": ["--gpu", "h100"]}.get(command, [])
    assert main([command, *options, "--config", "sft", "model.num_layer=2"]) == 2
    assert capsys.readouterr().err.startswith("error: command line: model.num_layer: ")


def test_a_name_in_an_advice_is_one_that_can_be_followed():
    settings = load_settings("python_stdlib").with_arguments(["--deepspeed", "zero3_offload"])
    assert settings.deepspeed_path == DS_CONFIGS / "zero3_offload.json"


def test_an_error_is_the_same_for_an_empty_name():
    with pytest.raises(ConfigError, match="--deepspeed: empty, or the folder"):
        load_settings("python_stdlib", "")
