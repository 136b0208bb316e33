"""The tables of other trainers' keys: docs/coming-from.md shows them, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.cli.import_configs.mapping import Draft, as_markdown
from pipeline.cli.import_configs.writing import TOOLS, make_json, recipe_text
from pipeline.config.deepspeed_check import rules
from pipeline.config.loading import ConfigFile
from pipeline.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs"
BASES = {
    "llama-factory": [{}, {"stage": "dpo"}, {"stage": "pt", "finetuning_type": "full"}],
    "axolotl": [{"adapter": "lora", "lora_r": 8, "lora_alpha": 16}, {"rl": "simpo"}],
    "trl": [{"use_peft": True}, {"loss_type": "sigmoid", "beta": 0.1}],
    "trainer": [{}],
    "accelerate": [{"distributed_type": "FSDP"}, {"distributed_type": "DEEPSPEED"}],
}
NEEDED = {"axolotl": {"base_model": "a/b", "learning_rate": 1e-4}}
STRANGE = (-1, "x", [1], {"a": 1}, [{"path": "x", "split": 3, "data_files": 5, "fraction": "q"}])


@pytest.mark.parametrize("name", TOOLS)
def test_the_page_has_the_tables(name):
    """All of them, and no other: as many keys stand there as the three tables have."""
    page = (DOCS / "coming-from.md").read_text()
    assert as_markdown(TOOLS[name]) in page
    section = page.split(f"\n## {TOOLS[name].title}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    shown = re.findall(r"`(\w+)`", "".join(rows))
    assert sorted(shown) == sorted([*TOOLS[name].keys, *TOOLS[name].without])


@pytest.mark.parametrize("name", TOOLS)
def test_what_keys_become_is_in_the_recipe(name):
    known = set(re.findall(r"^\| `([\w.]+)` \|", (DOCS / "configuration.md").read_text(), re.M))
    for key, row in TOOLS[name].keys.items():
        of_json = row.ours.startswith("JSON: ")
        for ours in row.ours.removeprefix("JSON: ").split(", "):
            if of_json:
                assert ours in rules(), key
                continue
            assert ours in known or any(each.startswith(f"{ours}.") for each in known), f"{key}: {ours}"


@pytest.mark.parametrize("name", TOOLS)
def test_no_value_is_a_traceback(name):
    """Of any key, of any type: a recipe, or one line."""
    for base in BASES[name]:
        for key in TOOLS[name].keys:
            for value in STRANGE:
                said = ""
                tree = NEEDED.get(name, {}) | base | {key: value}
                draft = Draft(ConfigFile(Path("theirs.yaml"), tree), TOOLS[name], 1, Path("out"))
                try:
                    draft.fill()
                    make_json(draft)
                    recipe_text(draft)
                except ConfigError as error:
                    said = str(error)
                assert "\n" not in said, (key, value)
