"""The soft limit of open files is raised to the hard one, and one that is too low is told of beforehand."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from multiprocessing import get_context

import pytest
from support.captured_logs import capture_logs

from pipeline.distributed.machine import raise_open_files_limit


def raise_it(connection, limits, world_size) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with capture_logs() as lines:
        raise_open_files_limit(world_size)
    connection.send((resource.getrlimit(resource.RLIMIT_NOFILE), lines))


@pytest.mark.parametrize(("hard", "world_size", "is_told"), [(900, 8, False), (900, 200, True)])
def test_the_limit_is_raised(hard, world_size, is_told):
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=raise_it, args=(theirs, (256, hard), world_size))
    process.start()
    limits, lines = ours.recv()
    process.join()
    assert limits == (hard, hard)
    assert bool(lines) == is_told
    if is_told:
        (line,) = lines
        assert "may open 900 files" in line
        assert "200 ranks opens about 1400" in line


@pytest.mark.slow
def test_every_command_raises_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))\n"
        "atexit.register(lambda: print('files', *resource.getrlimit(resource.RLIMIT_NOFILE)))\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "pipeline", "checkpoints", "nowhere"]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "files 2048 2048" in done.stdout, done
