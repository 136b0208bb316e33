"""Users' own scripts that prepare data: unguarded ones, and one whose process may start no other."""

from __future__ import annotations

import pytest
from support.launch import run_python

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from pipeline.config.data_schema import TextDataConfig
from pipeline.data import prepare_data

prepare_data(TextDataConfig.model_validate_json(sys.argv[1]))
"""
START = """
import multiprocessing
process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
"""


def test_it_is_told_what_to_change(make_config, corpus, tmp_path):
    """And does not wait for the lock that its parent has."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    config = make_config(corpus, tmp_path / "cache", prepare_workers=2)
    ended = run_python(str(path), config.model_dump_json(exclude_unset=True))
    last = ended.stderr.splitlines()[-1]
    assert f"DataError: {path} is imported by worker processes: " in last, ended.stderr
    assert last.endswith('put its code under if __name__ == "__main__":')
    # So is one of somebody else's, such as a loader's on Python 3.14.
    path.write_text(SCRIPT + START)
    config = make_config(corpus, tmp_path / "other", prepare_workers=1)
    command = str(path), config.model_dump_json(exclude_unset=True)
    said = run_python(*command).stderr
    assert said.splitlines()[-1].startswith(f"error: {path} is imported by worker processes: "), said
    guarded = SCRIPT.replace("\nprepare_data", '\nif __name__ == "__main__":\n    prepare_data')
    path.write_text(guarded)
    assert run_python(*command).returncode == 0


def test_a_daemon_prepares_its_data_itself(make_config, corpus, tmp_path):
    """A daemon of multiprocessing, such as a rank of a pool, may start no process."""
    daemon = """
import multiprocessing

if __name__ == "__main__":
    config = TextDataConfig.model_validate_json(sys.argv[1])
    process = multiprocessing.get_context("spawn").Process(target=prepare_data, args=(config,), daemon=True)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.rpartition("\nprepare_data")[0] + daemon)
    config = make_config(corpus, tmp_path / "cache", prepare_workers=2)
    ended = run_python(str(path), config.model_dump_json(exclude_unset=True))
    assert ended.returncode == 0, ended.stderr
