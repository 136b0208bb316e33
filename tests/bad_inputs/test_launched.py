"""Bad input to real processes: exit code 2 and one line `error: ...`, of several ranks once."""

from __future__ import annotations

import json

import pytest
from support.launch import ROOT, TORCHRUN, TRAIN, launch, run_python, write_recipe
from support.rank_pool import free_port

pytestmark = pytest.mark.slow


def only_line(text):
    """The one line that begins with `error:`."""
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, text
    return errors[0]


def test_a_value_that_deepspeed_refuses_is_one_line_before_data_is_prepared(tmp_path):
    split = tmp_path / "split.json"
    split.write_text(json.dumps({"aio": {"use_gds": True}}))  # which it refuses on a CPU only
    words = ["--config", str(write_recipe(tmp_path)), "--deepspeed", str(split), "data.paths=[/nowhere]"]
    done = launch(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    message = only_line(done.stderr)
    assert "DeepSpeed refuses the configuration" in message
    assert "GDS currently only supported for CUDA" in message


@pytest.mark.daily(
    "model.vocab_size=299-but the tokenizer has 300 entries",
    "runs_dir=/dev/null/runs-the run directory /dev/null/runs",
)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layer=3", "command line: model.num_layer: unknown key"),  # before a process group
        ("data.paths=[/nowhere]", "data.paths: /nowhere does not exist"),
        ("model.vocab_size=299", "but the tokenizer has 300 entries"),  # inside of one
        ("runs_dir=/dev/null/runs", "the run directory /dev/null/runs"),  # found by rank 0 alone
    ],
)
def test_two_ranks_say_it_once(tmp_path, override, message):
    launcher = [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), TRAIN]
    split = str(ROOT / "ds_configs" / "zero2.json")
    words = ["--config", str(write_recipe(tmp_path, max_steps=1)), "--deepspeed", split, override]
    done = run_python(*launcher, *words)
    assert "exitcode  : 2 " in done.stderr
    # The console that both share; torchrun adds a traceback of its own, the ranks may not.
    assert "Traceback" not in done.stdout
    assert "error:" not in done.stdout
    assert done.stderr.count("Traceback") == 1
    assert message in only_line(done.stderr)
