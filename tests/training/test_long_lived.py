"""Python's garbage collector while a run steps."""

from __future__ import annotations

import gc
import json

import pytest
from support.launch import run_python, write_recipe

pytestmark = pytest.mark.slow

RUN = """
import gc, json, sys, pipeline

def main():
    gc.unfreeze()  # what a test's process is forked from had frozen its imports
    collected = []
    gc.callbacks.append(lambda phase, info: phase == "stop" and collected.append(info["generation"]))
    settings = pipeline.load_settings(sys.argv[1], None, ["max_steps=12"])
    with pipeline.Run(settings) as run:
        while run.step().global_step < 3:
            pass
        collected.clear()
        gc.collect(0), gc.collect(1)
        assert collected == [0, 1]
        collected.clear()
        while run.step() is not None:
            pass
        said = {"full": collected.count(2), "looked_at": len(gc.get_objects())}
        said["frozen"] = gc.get_freeze_count()
    print(json.dumps(said | {"frozen_after": gc.get_freeze_count()}))

if __name__ == "__main__":
    main()
"""


def test_no_collection_of_a_run_looks_at_what_it_keeps(tmp_path):
    (tmp_path / "steps.py").write_text(RUN)
    done = run_python("steps.py", str(write_recipe(tmp_path)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["full"] == 0
    assert said["frozen"] > 100_000
    assert said["looked_at"] < said["frozen"] / 4
    assert said["frozen_after"] == 0


def is_frozen(what: object) -> bool:
    """Counts do not say it: other threads free what is frozen as well."""
    return not any(each is what for each in gc.get_objects())


def test_what_the_process_froze_itself_stays_so():
    from pipeline.training.loop import GcFreezer

    was_frozen = gc.get_freeze_count()
    earlier = [[]]
    gc.freeze()
    try:
        with GcFreezer() as long_lived:
            later = [[]]
            long_lived.freeze()
            assert is_frozen(earlier)
            assert not is_frozen(later)
        assert is_frozen(earlier)
    finally:
        if not was_frozen:
            gc.unfreeze()
