"""The tables of other trainers' keys: a page shows them, and every key is imported or reported."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from pipeline.cli.import_configs.mapping import ImportDraft
from pipeline.cli.import_configs.unmapped_keys import NO_EFFECT, NO_EXACT_COUNTERPART
from pipeline.cli.import_configs.writing import TOOLS, format_recipe, make_json
from pipeline.config.deepspeed_check import load_key_rules
from pipeline.config.loading import ConfigFile
from pipeline.errors import ConfigError

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[3] / "docs"
BASES = {
    "llama-factory": [{}, {"stage": "dpo"}, {"stage": "pt", "finetuning_type": "full"}],
    "axolotl": [{"adapter": "lora", "lora_r": 8, "lora_alpha": 16}, {"rl": "simpo"}],
    "trl-sft": [{"use_peft": True}],
    "trl-dpo": [{"loss_type": "sigmoid", "beta": 0.1}],
    "trainer": [{}],
    "accelerate": [{"distributed_type": "FSDP"}, {"distributed_type": "DEEPSPEED"}],
}
NEEDED = {"axolotl": {"base_model": "a/b", "learning_rate": 1e-4}}
STRANGE = (-1, "x", [1], {"a": 1}, [{"path": "x", "split": 3, "data_files": 5, "fraction": "q"}])


def test_the_page_has_the_tables():
    program = runpy.run_path(str(DOCS / "write_reference.py"))
    page = (DOCS / "reference" / "imported-keys.md").read_text()
    for name in BASES:
        section = page.split(f"\n## {TOOLS[name].title}\n")[1].split("\n## ")[0]
        missing = [key for key in program["list_own_rows"](name) if f"`{key}`" not in section]
        assert missing == [], name
    for words in (NO_EXACT_COUNTERPART, NO_EFFECT):
        assert [key for key in words if f"`{key}`" not in page] == []


@pytest.mark.parametrize("name", BASES)
def test_what_keys_become_is_in_the_recipe(name):
    known = set(re.findall(r"^\| `([\w.]+)` \|", (DOCS / "reference" / "configuration.md").read_text(), re.M))
    for key, row in TOOLS[name].rows.items():
        of_json = row.ours.startswith("JSON: ")
        for ours in row.ours.removeprefix("JSON: ").split(", "):
            if of_json:
                assert ours in load_key_rules(), key
                continue
            assert ours in known or any(each.startswith(f"{ours}.") for each in known), f"{key}: {ours}"


def draft_of(name, tree):
    """Return the draft of a tool's configuration, and all that is written of it."""
    draft = ImportDraft(ConfigFile(Path("theirs.yaml"), tree), TOOLS[name], 1, name.removeprefix("trl-"))
    draft.import_keys()
    make_json(draft)
    format_recipe(draft)
    return draft


@pytest.mark.parametrize("name", BASES)
def test_no_value_is_a_traceback_and_every_key_gets_a_word(name):
    """A value of any type for any key gives one line, or a recipe in which the key was read or is named."""
    for base in BASES[name]:
        for pattern in sorted(TOOLS[name].rows):
            key, _, below = pattern.partition(".")
            for value in STRANGE:
                nested = [{"path": "x", below[2:]: value}] if below.startswith("*.") else {below: value}
                tree = NEEDED.get(name, {}) | base | {key: nested if below else value}
                said = ""
                try:
                    draft = draft_of(name, tree)
                except ConfigError as error:
                    said = str(error)
                else:
                    named = draft.keys_read | draft.left_open.keys() | draft.no_effect.keys()
                    assert draft.theirs.keys() <= named, (key, value)
                assert "\n" not in said, (key, value)


@pytest.mark.parametrize("words", [NO_EXACT_COUNTERPART, NO_EFFECT], ids=["left_open", "no_effect"])
def test_keys_without_a_counterpart_are_named(words):
    tree = {key: "given" for key in words if "." not in key and key not in TOOLS["axolotl"].rows}
    draft = draft_of("axolotl", NEEDED["axolotl"] | tree)
    named = draft.left_open if words is NO_EXACT_COUNTERPART else draft.no_effect
    assert {key: named.get(key) for key in tree} == {key: words[key] for key in tree}
