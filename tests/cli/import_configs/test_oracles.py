"""The first rows of an imported configuration have the ids and the loss mask that its own trainer makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracle_cases import CASES, RECORDED, write_case

from pipeline.cli.import_configs.writing import draft_recipe, write_files
from pipeline.config.settings import load_settings
from pipeline.data.prepared import prepare_documents

pytestmark = pytest.mark.slow

ORACLES: dict[str, Any] = json.loads(RECORDED.read_text())


def documents_of(folder: Path, cache: Path) -> list[list[list[list[int]]]]:
    """Return ids and mask of each answer of the documents that a recipe's data are prepared to."""
    recipe = folder / "recipe.yaml"
    # The user's answer: the tokenizer's own template.
    recipe.write_text(recipe.read_text().replace("  chat_template: FILL-IN.jinja\n", ""))
    config = load_settings(recipe, folder / "deepspeed.json").config.data
    changes: dict[str, Any] = {"cache_dir": str(cache), "prepare_workers": 1}
    prepared = prepare_documents(config.model_copy(update=changes))
    found = []
    for part in prepared.sources[0].train.parts:
        ids = part.tokens.tolist()
        masks = part.loss_mask
        mask = [1] * len(ids) if masks is None else [int(each) for each in masks]
        start = 0
        for number, end in enumerate(part.ends.tolist()):
            segments = part.segments[number].tolist() if config.kind == "preference" else []
            sizes = [size for kind, _, size in segments if kind] or [end - start]
            answers = []
            for size in sizes:
                answers.append([ids[start : start + size], mask[start : start + size]])
                start += size
            found.append(answers)
    return found


@pytest.mark.parametrize("name", CASES)
def test_ids_and_mask_are_those_of_the_other_trainer(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draft = draft_recipe(write_case(name, tmp_path), CASES[name]["tool"], 1)
    write_files(draft, tmp_path / "out")
    assert documents_of(tmp_path / "out", tmp_path / "cache") == ORACLES[name]
