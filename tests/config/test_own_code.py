"""--no-import-paths finds every place where a recipe can name code."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from pipeline.config.model_schema import IMPORT_PATH
from pipeline.config.recipe import IMPORT_PATH_FIELDS, find_code_references
from pipeline.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
CODE = "os:system"


def test_every_place_is_found():
    source = {"iterable": CODE}
    tree = {
        "max_steps": 1,
        "model": {"kind": "causal_lm", "pretrained": "x", "trust_remote_code": True},
        "data": {"kind": "text", "sources": [{"paths": ["x"]}, source], "eval_sets": {"more": source}},
        "objective": {"kind": CODE},
        "optimizer": {"kind": CODE},
        "schedule": {"kind": CODE},
        "log": {"trackers": [{"kind": CODE}]},
        "notify": {"command": "./tell.sh"},
        "callbacks": [CODE],
    }
    tree["data"]["curriculum"] = CODE
    found = dict(find_code_references(RunConfig.model_validate(tree)))
    assert found == {
        "model.trust_remote_code": "True",
        "data.sources.1.iterable": CODE,
        "data.eval_sets.more.iterable": CODE,
        "data.curriculum": CODE,
        "objective.kind": CODE,
        "optimizer.kind": CODE,
        "schedule.kind": CODE,
        "log.trackers.0.kind": CODE,
        "notify.command": "./tell.sh",
        "callbacks.0.kind": CODE,
    }
    data = {"kind": CODE, "collate_fn": CODE}
    own = tree | {"model": {"kind": CODE}, "data": data, "objective": {"kind": "model_loss"}}
    own |= {"log": {}, "notify": {}, "optimizer": {}, "schedule": {}, "callbacks": []}
    assert dict(find_code_references(RunConfig.model_validate(own))) == {
        "model.kind": CODE,
        "data.kind": CODE,
        "data.collate_fn": CODE,
    }


def test_no_field_takes_an_import_path_under_another_name():
    schema = RunConfig.model_json_schema()
    fields = [
        name
        for section in [schema, *schema["$defs"].values()]
        for name, field in section.get("properties", {}).items()
        if json.dumps(IMPORT_PATH[1:-1])[1:-1] in json.dumps(field)
    ]
    assert set(fields) == set(IMPORT_PATH_FIELDS)


@pytest.mark.slow
def test_nothing_else_imports_what_a_recipe_names():
    """Code comes in by import_object alone, from fields that are checked."""
    users = set()
    importers = set()
    for path in (ROOT / "pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                place = str(path.relative_to(ROOT / "pipeline"))
                users |= {place} if name == "import_object" else set()
                importers |= {place} if name.endswith("import_module") or name == "__import__" else set()
    assert users == {
        "training/callbacks.py",
        "data/curriculum.py",
        "data/custom.py",
        "models/custom.py",
        "models/sizes.py",
        "data/documents/part.py",
        "objectives/__init__.py",
        "engine/optim.py",
        "engine/schedule.py",
        "monitoring/trackers/interface.py",
    }
    # Besides import_paths.py they import by names that stand in them.
    named = {"__init__.py", "data/__init__.py"}
    assert importers == {"config/import_paths.py", *named}
