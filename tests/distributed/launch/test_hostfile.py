"""A hostfile is read and devices chosen as the launcher does it; every mistake is one line with its place."""

from __future__ import annotations

import os

import pytest

from pipeline.distributed.launch.hostfile import Selection, choose_devices, read_hostfile
from pipeline.errors import LaunchError


def test_machines_in_order(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two racks\nb-1 slots=8\n\n10.0.0.7   slots=4  # the old one\n")
    assert list(read_hostfile(path).items()) == [("b-1", 8), ("10.0.0.7", 4)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbfa slots=1\r\nb slots=-1\r\n", "hostfile:2: got 'b slots=-1', expected a name"),
        ("a slots=\u0661\n".encode(), "expected a name and a number of ranks"),
        (b"a slots=1 slots=2\n", "hostfile:1: got 'a slots=1 slots=2', expected a name"),
        (b"# long\n" * 200_000, "larger than"),
    ],
)
def test_mistakes_that_an_editor_leaves(tmp_path, content, message):
    """Others: tests/bad_inputs/hostfiles.py."""
    path = tmp_path / "hostfile"
    path.write_bytes(content)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_no_hostfile(tmp_path):
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(LaunchError, match="it is a pipe, not a file; give a file"):
        read_hostfile(tmp_path / "hosts")


SLOTS = {"a": 2, "b": 4, "c": 2}


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [
        (Selection(), {"a": [0, 1], "b": [0, 1, 2, 3], "c": [0, 1]}),
        (Selection(include="c@a:1"), {"a": [1], "c": [0, 1]}),  # in the hostfile's order: so are the ranks
        (Selection(include="b:2,0@b:3"), {"b": [0, 2, 3]}),
        (Selection(exclude="a@b:0,2"), {"b": [1, 3], "c": [0, 1]}),
        (Selection(num_nodes=2, num_gpus=1), {"a": [0], "b": [0]}),
        (Selection(visible="1,0"), {"a": [1, 0], "b": [1, 0], "c": [1, 0]}),
        (Selection(visible=""), {"a": [0, 1], "b": [0, 1, 2, 3], "c": [0, 1]}),
    ],
)
def test_what_is_chosen(wanted, devices):
    chosen = choose_devices(SLOTS, wanted)
    assert chosen == devices
    assert list(chosen) == list(devices)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            Selection(include="a:2"),
            "--include a:2: a has no device 2, but slots=2 (the hostfile); give numbers from 0 to 1",
        ),
        (Selection(include="a:" + "9" * 5000), "write NAME or NAME:0,2"),
        (Selection(include="a:9", source="this machine"), "a has no device 9, but slots=2 (this machine)"),
        (Selection(include="a:0,0"), "a device of a is given twice"),
        (Selection(exclude="b", num_gpus=1), "--exclude and --num_nodes/--num_gpus each choose"),
        (Selection(include="a", visible="0"), "--include and CUDA_VISIBLE_DEVICES=0 (of this shell) each"),
        (Selection(num_nodes=4), "--num_nodes 4: the hostfile has 3 machines; give"),
        (Selection(num_gpus=3), "--num_gpus 3: a has slots=2 (the hostfile)"),
        (Selection(num_gpus=0), "--num_gpus 0"),
        (Selection(visible="3"), "CUDA_VISIBLE_DEVICES=3: a has no device 3"),
        (Selection(visible="GPU-8a1f"), "the launcher chooses devices by number"),
    ],
)
def test_what_is_refused(wanted, message):
    with pytest.raises(LaunchError) as caught:
        choose_devices(SLOTS, wanted)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
