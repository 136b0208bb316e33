"""A hostfile is read as the launcher reads it; every mistake in it is one line that names the place."""

from __future__ import annotations

import os

import pytest

from pipeline.errors import LaunchError
from pipeline.launching.hostfile import Host, read_hostfile


def test_machines_in_order(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two racks\nb-1 slots=8\n\n10.0.0.7   slots=4  # the old one\n")
    assert read_hostfile(path) == [Host("b-1", 8), Host("10.0.0.7", 4)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory; give a file with a line for each machine, as 'worker-1 slots=8'"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"# nobody\n", "names no machine"),
        (b"a slots=1\nb\n", "hostfile:2: 'b' is not a machine; write it as 'worker-1 slots=8'"),
        (b"a slots=0\n", "hostfile:1: 'a slots=0' is not a machine"),
        (b"\xef\xbb\xbfa slots=1\r\nb slots=-1\r\n", "hostfile:2: 'b slots=-1' is not a machine"),
        ("a slots=\u0661\n".encode(), "is not a machine"),
        (b"a slots=1 slots=2\n", "hostfile:1: 'a slots=1 slots=2' is not a machine"),
        (b"# long\n" * 200_000, "larger than"),
        (b"a slots=two\n", "hostfile:1: 'a slots=two' is not a machine"),
        (b"a slots=1\nb slots=1\na slots=2\n", "hostfile:3: a is on line 1 already"),
    ],
)
def test_mistakes(tmp_path, content, message):
    path = tmp_path / "hostfile"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_no_hostfile(tmp_path):
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(LaunchError, match="it is a pipe, not a file; give a file"):
        read_hostfile(tmp_path / "hosts")
