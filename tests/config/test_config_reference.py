"""The pages of docs/reference/ are what the schema and the commands' parsers say."""

from __future__ import annotations

import json
import runpy

import yaml
from support.launch import ROOT

from pipeline.config.schema import RunConfig
from pipeline.config.settings import format_recipe_yaml

AGAIN = "python docs/write_reference.py"
PAGE = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")


def test_the_documents_are_up_to_date():
    program = runpy.run_path(str(ROOT / "docs" / "write_reference.py"))
    for path, text in program["build_documents"]().items():
        assert path.read_text(encoding="utf-8") == text, AGAIN


def test_every_key_of_a_recipe_is_in_the_document():
    config = RunConfig.model_validate(
        {
            "max_steps": 1,
            "model": {"kind": "causal_lm", "architecture": "llama"},
            "data": {"kind": "text", "paths": ["a"]},
        }
    )

    def check(tree, prefix):
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                check(value, f"{prefix}{key}.")
            else:
                assert f"| `{prefix}{key}` |" in PAGE

    check(yaml.safe_load(format_recipe_yaml(config)), "")


def test_the_sections_stand_in_the_order_of_the_recipe():
    headings = [line[3:] for line in PAGE.splitlines() if line.startswith("## ")]
    sections = [name for name in RunConfig.model_fields if name in headings]
    assert headings == ["The run", *sections, "The DeepSpeed JSON"]


def test_every_row_of_a_table_has_as_many_cells_as_its_head():
    widths = set()
    for block in PAGE.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        counts = {line.replace("\\|", "").count("|") for line in lines}
        assert len(counts) <= 1, block
        widths |= counts
    assert widths == {3, 6}


def test_defaults_are_written_as_yaml_reads_them():
    for key, default in [("optimizer.betas", [0.9, 0.95]), ("optimizer.eps", 1e-8), ("wandb.tags", [])]:
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{key}` |"))
        assert f"| `{json.dumps(default)}` |" in row
