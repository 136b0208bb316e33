"""Python's garbage collector while a run steps."""

from __future__ import annotations

import json

from support.launch import run_python, write_recipe

RUN = """
import gc, json, sys, pipeline

def is_frozen(what):  # counts do not say it: other threads free what is frozen as well
    return not any(each is what for each in gc.get_objects())

def main():
    gc.unfreeze()  # what a test's process is forked from had frozen its imports
    own = [[]]
    if len(sys.argv) > 2:
        gc.freeze()
    collected = []
    gc.callbacks.append(lambda phase, info: phase == "stop" and collected.append(info["generation"]))
    settings = pipeline.load_settings(sys.argv[1], None, ["max_steps=12"])
    later = [[]]
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
        said |= {"frozen": gc.get_freeze_count(), "later_is_frozen": is_frozen(later)}
    said |= {"frozen_after": gc.get_freeze_count(), "own_is_frozen_after": is_frozen(own)}
    print(json.dumps(said))

if __name__ == "__main__":
    main()
"""


def run(tmp_path, *words):
    (tmp_path / "steps.py").write_text(RUN)
    done = run_python("steps.py", str(write_recipe(tmp_path)), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_collection_of_a_run_looks_at_what_it_keeps(tmp_path):
    said = run(tmp_path)
    assert said["full"] == 0
    assert said["frozen"] > 100_000
    assert said["looked_at"] < said["frozen"] / 4
    assert said["later_is_frozen"]
    assert said["frozen_after"] == 0
    assert not said["own_is_frozen_after"]


def test_what_the_process_froze_itself_stays_so(tmp_path):
    said = run(tmp_path, "freezes")
    assert said["own_is_frozen_after"]
    assert not said["later_is_frozen"]
