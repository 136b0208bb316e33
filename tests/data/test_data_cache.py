"""The cache among real processes: one killed while it writes, two at once; and an entry that was damaged."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
from filelock import FileLock

from pipeline.config.data_schema import TextDataConfig, TokenizerConfig
from pipeline.data import prepare_data
from pipeline.data.cache import read_index

STDLIB = Path(sysconfig.get_path("stdlib"))
PROGRAM = """
import logging, sys
from pipeline.config.data_schema import TextDataConfig
from pipeline.data import prepare_data
logging.basicConfig(level=logging.INFO, format="%(message)s")
bundle = prepare_data(TextDataConfig.model_validate_json(sys.argv[1]))
print(bundle.fingerprint, bundle.train.num_tokens)
"""


def config(pattern, cache_dir):
    """Modules of the standard library, with a small vocabulary."""
    return TextDataConfig(
        kind="text",
        paths=[str(STDLIB / pattern)],
        cache_dir=str(cache_dir),
        tokenizer=TokenizerConfig(vocab_size=400),
    )


def start(settings):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, settings.model_dump_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def folders(cache_dir):
    return [path.name for path in cache_dir.iterdir() if path.is_dir()]


def test_a_killed_writer_leaves_nothing_that_counts(tmp_path):
    settings = config("[a-i]*.py", tmp_path)  # 2 MB: time enough to be hit
    writer = start(settings)
    while not any(path.stat().st_size > 1000 for path in tmp_path.glob("*.tmp-*/train.npy")):
        assert writer.poll() is None, writer.stderr.read()
        time.sleep(0.001)
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    (left,) = folders(tmp_path)
    assert ".tmp-" in left
    assert not (tmp_path / left / "index.json").exists()

    bundle = prepare_data(settings)
    assert folders(tmp_path) == [bundle.fingerprint]
    tokens = np.load(bundle.train.path)
    assert len(tokens) == read_index(tmp_path / bundle.fingerprint)["tokens"]["train"]


def test_two_at_once_do_the_work_once(tmp_path, caplog):
    key = prepare_data(config("[c-d]*.py", tmp_path / "other")).fingerprint
    caplog.set_level(logging.INFO)
    caplog.clear()
    cache_dir = tmp_path / "cache"
    cache_dir.mkdir()
    settings = config("[c-d]*.py", cache_dir)
    with FileLock(cache_dir / f"{key}.lock"):
        other = start(settings)
        assert "waiting for it" in other.stderr.readline()
    here = prepare_data(settings)
    output, log = other.communicate()
    assert other.returncode == 0, log
    assert (
        output.split() == [here.fingerprint, str(here.train.num_tokens)] == [key, str(here.train.num_tokens)]
    )
    assert (log + caplog.text).count("training the tokenizer") == 1
    assert folders(cache_dir) == [key]


def test_a_damaged_entry_is_made_again(tmp_path):
    settings = config("[c-d]*.py", tmp_path)
    bundle = prepare_data(settings)
    whole = bundle.train.path.read_bytes()
    for damage in (whole[:-2], None):
        bundle.train.path.unlink() if damage is None else bundle.train.path.write_bytes(damage)
        assert prepare_data(settings).train.path.read_bytes() == whole
