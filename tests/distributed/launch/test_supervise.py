"""A guard and a launcher, for real: how a run ends, that nothing stays, that signals reach the ranks."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.cgroup import limit_memory

from pipeline.distributed.launch.node_guard import Guard, _read_environment
from pipeline.distributed.launch.ssh import encode_message, local_command
from pipeline.distributed.launch.supervise import Supervisor, choose_exit_code, ranks_without_exit_code
from pipeline.errors import LaunchError

GUARD = local_command("pipeline.distributed.launch.node_guard")
SAY = """
folder=$(dirname $PIPELINE_ENVIRONMENT)
say() { echo "{\\"code\\": $2, \\"world_size\\": 2}" > $folder/rank-$1; }
"""


@pytest.fixture
def folder():
    return Path(f"/tmp/pipeline-{secrets.token_hex(8)}")


def supervise(folder, script, **others):
    """The exit code of a run whose launcher is a shell script."""
    document = {"folder": str(folder), "environment": {}, "arguments": []}
    environment = os.environ | {"PIPELINE_ENVIRONMENT": str(folder / "environment.json")}
    supervisor = Supervisor({"here": GUARD} | others, document, {0: "here", 1: "here"})
    code = asyncio.run(supervisor.run(lambda first: ["sh", "-c", SAY + script], environment))
    assert not folder.exists()
    assert processes(folder) == []
    return code


def processes(folder):
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get("PIPELINE_ENVIRONMENT", "").startswith(str(folder)):
            found.append(process)
    return found


def test_a_launcher_that_ends_well_with_ranks_that_did_not(folder, capfd):
    """One is left behind as well: launch.py killed, its rank training on."""
    assert supervise(folder, "say 0 0; RANK=1 setsid sleep 60 & exit 0") == 1
    said = capfd.readouterr().err
    assert "ended without an exit code, most likely killed: rank 1 on here" in said


def test_a_rank_that_the_launcher_killed_after_a_hang_is_not_said_to_be_killed(folder, capfd):
    assert supervise(folder, "say 0 124; exit 124") == 124
    assert "ended without an exit code, see the diagnosis above: rank 1 on here" in capfd.readouterr().err


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's log is not to be read")
def test_a_rank_that_is_killed_for_memory_is_told_as_such(folder, capfd):
    """A real kill, by a cgroup."""
    eats = f"{sys.executable} -c 'x = bytes(range(256)) * 2**20'"
    with limit_memory(64) as members:
        script = f"RANK=1 sh -c 'echo $$ > {members}; exec \"$@\"' - {eats} & say 0 0; wait $!; exit 1"
        assert supervise(folder, script) == 1
    said = capfd.readouterr().err
    assert re.search(r"^here: the kernel killed \d+ process(es)? for memory; lower batch", said, re.M)


@pytest.mark.slow
@pytest.mark.daily("exec")
# A chain of forks may run ahead of one that looks on a busy machine; a single look missed it 62 times.
@pytest.mark.parametrize(("how", "most"), [('exec "$0"', 0), ('"$0" & exit', 10)], ids=["exec", "fork"])
def test_a_look_misses_no_process_that_is_just_starting(how, most, tmp_path):
    """One that is always on its way into a program, or that always leaves a child behind and is gone."""
    program = tmp_path / "on-its-way"
    program.write_text(f"#!/bin/sh\n[ -e {tmp_path}/over ] || {how}\n")
    program.chmod(0o700)
    guard = Guard(tmp_path / "environment.json")
    variables = os.environ | {"PIPELINE_ENVIRONMENT": str(guard.path)}
    first = subprocess.Popen([program], env=variables)
    missed = [look for look in range(100) if not guard.find_processes()]
    (tmp_path / "over").touch()
    first.wait()
    guard.kill()
    assert guard.find_processes() == []
    assert len(missed) <= most


@pytest.mark.slow
@pytest.mark.nightly
def test_a_process_in_exec_is_never_taken_for_one_without_variables(tmp_path):
    """It has a place for them of no length, for some microseconds: a few hundred of so many looks meet it."""
    program = tmp_path / "on-its-way"
    program.write_text(f'#!/bin/sh\n[ -e {tmp_path}/over ] || exec "$0"\n')
    program.chmod(0o700)
    process = subprocess.Popen([program], env=os.environ | {"PIPELINE_ENVIRONMENT": "here"})
    looks = [_read_environment(process.pid) for _ in range(50_000)]
    (tmp_path / "over").touch()
    process.wait()
    assert all(look is None or b"PIPELINE_ENVIRONMENT=here" in look for look in looks)


def test_what_never_has_variables_is_not_waited_for():
    """A program that was started without any, and a dead process that nobody has waited for."""
    bare = subprocess.Popen(["cat"], env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    bare.stdin.write(b"started\n")
    bare.stdin.flush()
    bare.stdout.readline()
    dead = subprocess.Popen(["true"])
    while psutil.Process(dead.pid).status() != "zombie":
        pass
    assert (_read_environment(bare.pid), _read_environment(dead.pid)) == ([], [])
    bare.kill()
    assert (bare.wait(), dead.wait()) == (-9, 0)


def test_signals_reach_the_ranks_and_decide_the_exit_code(folder, tmp_path):
    """A rank that takes the signal as ours do; the launcher makes another code of it."""
    rank = tmp_path / "rank.sh"
    rank.write_text(
        f"{SAY} trap 'say $RANK 138; exit 138' USR1; touch $folder/up$RANK; while :; do sleep 0.05; done"
    )
    ready = "until [ -e $folder/up0 ] && [ -e $folder/up1 ]; do sleep 0.05; done"
    script = f"for n in 0 1; do RANK=$n sh {rank} & done; {ready}; kill -USR1 {os.getpid()}; wait; exit 241"
    assert supervise(folder, script) == 138


def test_a_guard_alone_ends_the_ranks(folder):
    """The connection closes, as when the launch script or its machine is killed."""
    guard = subprocess.Popen(GUARD, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    guard.stdin.write(encode_message({"folder": str(folder), "environment": {}, "arguments": []}))
    guard.stdin.flush()
    assert b"ready" in guard.stdout.readline()
    variables = os.environ | {"PIPELINE_ENVIRONMENT": str(folder / "environment.json"), "RANK": "0"}
    rank = subprocess.Popen(["sleep", "600"], env=variables)
    other = subprocess.Popen(["sleep", "600"], env=variables | {"PIPELINE_ENVIRONMENT": f"{folder}x/y"})
    guard.stdin.close()
    assert rank.wait(200) == -15
    assert guard.wait(200) == 0
    assert not folder.exists()
    assert other.poll() is None  # another run
    other.kill()
    other.wait()


def test_a_node_that_is_lost_ends_the_run(folder, capfd):
    """The second node's connection breaks while the launcher waits for its ranks."""
    lost = 'read line; echo \'{"pipeline": {"ready": {}}}\'; sleep 0.2; echo broken pipe >&2'
    assert supervise(folder, "RANK=0 sleep 60", there=["sh", "-c", lost]) != 0
    assert "there is lost: broken pipe" in capfd.readouterr().err


def test_a_node_that_does_not_answer_is_named_and_nothing_is_started(folder, tmp_path):
    """A login shell that talks is no answer; a folder that is there already is a machine named twice."""
    failed = "echo welcome; echo Permission denied '(publickey)' >&2; exit 255"
    with pytest.raises(LaunchError) as caught:
        supervise(folder, f"touch {tmp_path}/started", there=["sh", "-c", failed])
    assert "not started: there: Permission denied (publickey)" in str(caught.value)
    assert not list(tmp_path.iterdir())
    folder.mkdir()
    with pytest.raises(LaunchError, match=r"here: cannot create /tmp/pipeline-\w+: File exists"):
        supervise(folder, "exit 0")
    folder.rmdir()


def words(*codes):
    """Output of each rank; None: it printed nothing."""
    return {
        rank: {"code": code, "world_size": len(codes)} for rank, code in enumerate(codes) if code is not None
    }


@pytest.mark.parametrize(
    ("codes", "launcher", "expected"),
    [
        ((0, 0), 0, 0),
        ((0, 0), -9, 0),  # all had finished when the launcher was ended
        ((0, 0), 250, 250),  # a rank that had finished aborted on its way out
        ((0, None), 0, 1),  # deepspeed, its launch.py killed
        ((None, None), 0, 1),
        ((None, None), 7, 7),
        ((143, 143), 0, 143),
        ((138, 138), 241, 138),  # to be put into the queue again
        ((138, 143), 241, 138),  # the second was just leaving when its launcher ended it
        ((130, 138, 143), 241, 241),
        ((138, None), 241, 241),
        ((1, 124), 247, 124),
        ((2, None), 241, 2),
        ((0, 3), 0, 3),
        ((12, None), 241, 12),  # out of memory, and its launcher ended the other
        ((14, 1), 241, 14),
        ((None, 1), -15, 143),
    ],
)
def test_exit_codes(codes, launcher, expected):
    assert choose_exit_code(words(*codes), range(len(codes)), launcher) == expected


def test_ranks_that_said_nothing():
    assert ranks_without_exit_code(words(0, None, 0), range(4)) == [1, 3]
    assert ranks_without_exit_code(words(0, None, 0), ()) == [1]  # by what the others knew
    assert ranks_without_exit_code({}, ()) == []
    assert choose_exit_code({}, (), 0) == 1
