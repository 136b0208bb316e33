"""The folder a run swaps to: its own, large enough, and gone however the run ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.native_ops import SwapFolder
from pipeline.errors import ConfigError

pytestmark = pytest.mark.slow

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))


def config(path: Path | None, *sections: str):
    part = {"device": "nvme"} | ({"nvme_path": str(path)} if path else {})
    names = sections or ("offload_optimizer", "offload_param")
    return {"zero_optimization": {"stage": 3, **{name: dict(part) for name in names}}}


def wait_until_empty(path: Path) -> bool:
    deadline = time.monotonic() + 300
    while list(path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not list(path.iterdir())


def test_both_parts_share_a_folder_of_the_run_which_close_removes(tmp_path):
    given = config(tmp_path / "made")
    swap = SwapFolder(given, ALONE)
    zero = swap.config["zero_optimization"]
    folder = Path(zero["offload_param"]["nvme_path"])
    assert folder.is_dir()
    assert folder.parent == tmp_path / "made"
    assert zero["offload_optimizer"]["nvme_path"] == str(folder)
    assert given == config(tmp_path / "made"), "the caller's configuration was changed"
    (folder / "zero_stage_3").mkdir()
    (folder / "zero_stage_3" / "0.tensor.swp").write_bytes(b"x")
    swap.close()
    swap.close()
    assert list((tmp_path / "made").iterdir()) == []


def test_nothing_is_made_where_nothing_is_swapped():
    given = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    swap = SwapFolder(given, ALONE)
    assert swap.config == given
    swap.check_space(10**15)
    swap.close()


HOLD = """
import signal, sys, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.native_ops import SwapFolder
part = {"device": "nvme", "nvme_path": sys.argv[1]}
swap = SwapFolder({"zero_optimization": {"offload_param": part}}, Job(Ranks(0, 0, 1, 1), torch.device("cpu")))
print("made", flush=True)
if sys.argv[2] == "raise":
    raise RuntimeError
time.sleep(1000)
"""


@pytest.mark.daily("9")
@pytest.mark.parametrize("how", ["raise", signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_folder_goes_however_the_process_ends(tmp_path, how):
    command = [sys.executable, "-c", HOLD, str(tmp_path), str(how)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "made\n"
        if how != "raise":
            assert any(path.is_dir() for path in tmp_path.iterdir())
            process.send_signal(how)
        process.wait(timeout=300)
    assert wait_until_empty(tmp_path)


@pytest.mark.nightly
def test_a_dead_runs_folder_goes_at_the_next_start_and_a_living_runs_stays(tmp_path):
    """The remains after the machine itself went down: a folder, and a lock without an owner."""
    dead = tmp_path / "pipeline-swap-0123456789ab"
    (dead / "zero_stage_3").mkdir(parents=True)
    dead.with_name(f"{dead.name}.lock").touch()
    (tmp_path / "somebody-elses").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "hold"], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "made\n"
        assert not dead.exists()
        swap = SwapFolder(config(tmp_path), ALONE)
        assert len(list(tmp_path.glob("pipeline-swap-*[!k]"))) == 2
        swap.close()
        assert len(list(tmp_path.glob("pipeline-swap-*[!k]"))) == 1
        other.kill()
    (tmp_path / "somebody-elses").rmdir()
    assert wait_until_empty(tmp_path)


@pytest.mark.parametrize(
    ("sections", "ranks", "precision", "needed"),
    [
        (("offload_optimizer",), (1, 1), "fp32", "15 MiB"),
        (("offload_param",), (1, 1), "fp32", "4 MiB"),
        (("offload_param",), (1, 1), "bf16", "2 MiB"),
        (("offload_optimizer", "offload_param"), (1, 1), "fp16", "17 MiB"),
        (("offload_optimizer", "offload_param"), (8, 4), "bf16", "9 MiB"),
    ],
)
def test_one_line_has_the_free_space_and_what_the_run_needs(
    tmp_path, caplog, sections, ranks, precision, needed
):
    caplog.set_level("INFO", logger="pipeline.engine.native_ops")
    job = Job(Ranks(0, 0, *ranks), torch.device("cpu"))
    swap = SwapFolder(config(tmp_path, *sections) | {precision: {"enabled": True}}, job)
    swap.check_space(10**6)
    swap.close()
    line = rf"nvme_path {tmp_path}: \S+ GiB free, {re.escape(needed)} needed"
    assert re.fullmatch(line, caplog.messages[0])


def test_too_little_space_is_an_error_with_both_numbers(tmp_path):
    swap = SwapFolder(config(tmp_path), ALONE)
    message = rf"{tmp_path} has \S+ GiB free and the run needs 18626451.49 GiB; use another disk"
    with pytest.raises(ConfigError, match=message):
        swap.check_space(10**15)
    swap.close()


def test_a_path_that_is_missing_or_no_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"offload_param\.nvme_path is missing; device nvme needs a folder"):
        SwapFolder(config(None, "offload_param"), ALONE)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"offload_optimizer\.nvme_path: .*/file/x: Not a directory"):
        SwapFolder(config(tmp_path / "file" / "x"), ALONE)
