"""The path of a step: what a newcomer reads to have seen one, and what an ordinary step pays for in calls."""

from __future__ import annotations

import json

import pytest
from support.launch import ROOT, run_python, write_recipe

MOST_CALLS = 250
MOST_FILES = 30
WARM_STEPS = 5

COUNT = """
import json, sys
from pathlib import Path

import pipeline
from pipeline.training.api import Run
from pipeline.config.settings import load_settings

own = str(Path(pipeline.__file__).parent) + "/"
entered = {}  # frame -> place: a generator that goes on is the call that began it

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(own):
        entered.setdefault(frame, (code.co_filename.removeprefix(own), code.co_qualname))

with Run(load_settings(sys.argv[1])) as run:
    for _ in range(int(sys.argv[2])):
        run.step()
    sys.setprofile(note)
    step = run.step()
    sys.setprofile(None)
assert step.row is not None
print(json.dumps(list(entered.values())))
"""


@pytest.mark.slow
def test_a_step_with_its_row_enters_few_files_by_few_calls(tmp_path):
    """A warm step of one process on a CPU: data, forward, backward, update, row, alerts, record, console.

    A comprehension is a part of its function, and counts as no call. All rows come from one document:
    attention is called once for each document of a row.
    """
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(4000))))
    data = {
        "kind": "text",
        "paths": [str(text)],
        "sequence_length": 32,
        "eval_fraction": 0,
        "tokenizer": {"vocab_size": 300},
        "cache_dir": str(tmp_path / "cache"),
    }
    recipe = write_recipe(
        tmp_path,
        data=data,
        log={"every": 2},
        eval={"every": 0},
        checkpoint={"every": 0},
    )
    (tmp_path / "count.py").write_text(COUNT)
    script = str(tmp_path / "count.py")
    warm = str(WARM_STEPS)
    counted = run_python(script, str(recipe), warm, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert counted.returncode == 0, counted.stderr
    entered = json.loads(counted.stdout.splitlines()[-1])
    parts = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
    calls = [(file, name) for file, name in entered if not name.endswith(parts)]
    files = {file for file, _ in entered}
    assert len(calls) <= MOST_CALLS, f"{len(calls)} calls"
    assert len(files) <= MOST_FILES, f"{len(files)} files: {sorted(files)}"
