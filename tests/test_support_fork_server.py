"""Forks of a server that has nothing but imports behind it: pools of ranks, and programs."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest
from parity.splits import LLAMA, zero
from support.fork_server import HAS_GPU, PRELOAD, ForkedProgram
from support.launch import make_environment
from support.rank_pool import RankPool
from support.resume_across_splits import Run, make_recipe

pytestmark = pytest.mark.slow
PATIENCE = 200.0
forks = pytest.mark.skipif(HAS_GPU, reason="with a GPU every process is a fresh interpreter")


def threads(_job):
    server = psutil.Process().parent()
    return server.num_threads(), "forkserver" in " ".join(server.cmdline())


def test_the_server_has_no_thread_that_a_fork_would_lose():
    with RankPool(1) as pool:
        (found,) = pool.run(threads)
    assert HAS_GPU or found == (1, True), PRELOAD


def left_open(job):
    Run(job, make_recipe(LLAMA), zero(2)).train(0, 1)


def own_threads(_job):
    return psutil.Process().num_threads()


def test_a_pool_ends_the_groups_of_engines_that_a_function_left_open(ranks):
    pool = ranks(2)
    before = pool.run(own_threads)
    pool.run(left_open)
    assert pool.run(own_threads) == before


PROGRAMS = {
    "words": "import sys; print(sys.argv[1:], __name__); print('told', file=sys.stderr)",
    "environment": "import os; print(sorted((k, v) for k, v in os.environ.items() if k != 'LC_CTYPE'))",
    "own folder": "import beside, sys; print(beside.__file__, sys.modules['__main__'].__file__)",
    "code": "import sys; sys.exit(3)",
    "code below zero": "import sys; sys.exit(-9)",
    "a last word": "import sys; sys.exit('no')",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "interrupted": "import os, signal; print(1, flush=True); os.kill(os.getpid(), signal.SIGINT)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "signals": "import signal as s; print([str(s.getsignal(n))[:15] for n in sorted(s.valid_signals())])",
    "a thread": "import threading, time; threading.Timer(0.2, print, ['done']).start()",
    "processes": "import multiprocessing as m; print(m.current_process().name, m.parent_process())",
}


@pytest.fixture
def stop_ignored():
    """A signal that a shell, nohup or CI may have left ignored: programs inherit that."""
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTSTP, before)


@forks
@pytest.mark.usefixtures("stop_ignored")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_in_a_fresh_interpreter(tmp_path, name):
    script, output, errors = (tmp_path / file for file in ("script.py", "output", "errors"))
    script.write_text(PROGRAMS[name])
    (tmp_path / "beside.py").touch()
    words = [str(script), "a", "b=c"]
    variables = make_environment(ONE="two")
    fresh = subprocess.run(
        [sys.executable, *words], env=variables, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    forked = ForkedProgram(words, variables, output, errors, tmp_path)
    assert forked.wait(PATIENCE) == fresh.returncode
    assert output.read_text() == fresh.stdout
    if "Traceback" not in fresh.stderr:
        assert errors.read_text() == fresh.stderr
    else:  # the frames above the script's own are another's
        assert errors.read_text().splitlines()[-1] == fresh.stderr.splitlines()[-1]


LAUNCHER = """
import os, subprocess, sys
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import Popen
child, environment = [sys.executable, "-u", sys.argv[1]], {**os.environ, "RANK": "7"}
print(subprocess.Popen(child, env=environment).wait(), flush=True)
piped = Popen(child, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
print(piped.communicate()[0].strip(), piped.returncode, flush=True)
fresh = "import sys; print('torch' in sys.modules)"
print(subprocess.run([sys.executable, "-c", fresh], capture_output=True, text=True).stdout.strip())
"""
CHILD = """
import os, sys
print(os.environ["RANK"], os.getppid() == os.getsid(0), os.getsid(0) == os.getpid(), "torch" in sys.modules)
os.kill(os.getpid(), 9)
"""


@forks
def test_what_a_program_starts_is_its_child_and_forked_too(tmp_path):
    for name, text in (("launcher", LAUNCHER), ("child", CHILD)):
        (tmp_path / f"{name}.py").write_text(text)
    words = [str(tmp_path / "launcher.py"), str(tmp_path / "child.py")]
    assert ForkedProgram(words, make_environment(), tmp_path / "output").wait(PATIENCE) == 0
    shown = (tmp_path / "output").read_text().splitlines()
    killed = -signal.SIGKILL
    assert shown == ["7 True False True", f"{killed}", f"7 False True True {killed}", "False"]
