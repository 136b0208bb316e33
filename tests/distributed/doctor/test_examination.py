"""An examination from start to end: nodes that are slow, or do not answer; tasks of srun; the table."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys

import psutil
import pytest
from support.launch import ROOT

from pipeline.__main__ import main
from pipeline.distributed.doctor.all_reduce import RANK_MODULE, _transfer
from pipeline.distributed.doctor.examination import (
    PROBE_MODULE,
    ExaminationSettings,
    check_clocks,
    describe_missing_answer,
    examine,
    is_slurm_task,
    read_slots,
    restrict_to_this_machine,
)
from pipeline.distributed.doctor.network import check_names
from pipeline.distributed.doctor.node import NoAnswerError, ask, ask_all, measure_clock_offset
from pipeline.distributed.doctor.rows import HOST, CheckRow, Fault, group_faults, has_failure, print_rows
from pipeline.distributed.launch import ssh
from pipeline.distributed.launch.ssh import NO_FOLDER, NO_PYTHON, local_command, ssh_command, start_process


@pytest.mark.parametrize(
    ("arguments", "hostfile", "message"),
    [
        (["--hostfile", "missing"], None, "hostfile missing: No such file or directory"),
        (["--hostfile", "h", "--include", "c"], "a slots=1", "'c' is not in the hostfile"),
        (["--include", "c"], None, "add --hostfile FILE"),
        (["h"], "a slots=1", "give a hostfile as --hostfile h"),
        (["--deepspeed", "none.json"], None, "none.json"),
        # As a launcher hands over the run's arguments.
        (["--dry-run", "--world-size", "2", "--no-import-paths", "objective.kind=a.b:c"], None, "a.b:c"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, hostfile, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hostfile is not None:
        (tmp_path / "h").write_text(hostfile)
    assert main(["doctor", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_the_table(capsys):
    rows = [CheckRow("ssh", "ok", "every host")]
    rows += group_faults("disk", [(host, Fault("fail", "1 MiB free", f"ssh {HOST} df")) for host in "bc"], "")
    rows += group_faults("clock", [("a", Fault("warning", "1.0 s ahead", f"ssh {HOST} date"))], "")
    rows += group_faults("memory", [], "enough")
    rows += check_clocks({}) + check_names({})
    print_rows(rows, seconds=1.23)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "ssh     ok       every host",
        "disk    fail     b, c: 1 MiB free",
        "                 -> ssh b df (the same for c)",
        "clock   warning  a: 1.0 s ahead",
        "                 -> ssh a date",
        "memory  ok       enough",
        "clock   skipped  not checked: no host answered",
        "names   skipped  not checked: no host answered",
        "b, c: 1 failed, 1 warned, 2 passed in 1.2 s",
    ]
    assert has_failure(rows)
    assert not has_failure(rows[2:])


def test_clocks():
    rows = check_clocks({"a": 0.01, "b": -2.5, "c": 0.7, "d": 2.1})
    assert [(row.status, row.hosts, row.text) for row in rows] == [
        ("fail", ("b",), "2.5 s behind the launching machine's clock"),
        ("warning", ("c",), "0.7 s ahead of the launching machine's clock"),
        ("fail", ("d",), "2.1 s ahead of the launching machine's clock"),
    ]
    assert all("timedatectl" in row.fix for row in rows)


@pytest.mark.parametrize(
    ("code", "said", "check", "found", "fix"),
    [
        (255, "b: Permission denied (publickey).", "ssh", "asks for a password", "ssh-copy-id b"),
        (255, "Host key verification failed.", "ssh", "host key is not known", "ssh-keyscan -H b"),
        (255, "ssh: Could not resolve hostname b: x", "ssh", "unknown host", "hostfile"),
        (255, "ssh: connect to host b port 22: Connection refused", "ssh", "no ssh server", "start ssh"),
        (255, "ssh: connect to host b port 22: Connection timed out", "ssh", "does not answer", "ping b"),
        (255, "ssh: connect to host b port 22: No route to host", "ssh", "no route to this host", "ping b"),
        (255, "kex_exchange: read: reset\n", "ssh", "exit code 255: kex_exchange", "by hand: ssh b"),
        (None, "no answer within 300 s", "ssh", "no answer within 300 s", "by hand"),
        (NO_FOLDER, "sh: 1: cd: can't cd to /w", "folder", "no folder ", "rsync -a "),
        (NO_PYTHON, "", "python", "no program ", "same environment on b"),
        (
            1,
            "/py: No module named psutil",
            "python",
            "lacks a package of the project: psutil",
            "pip install -e .",
        ),
        (134, "", "python", "exit code 134: no output", "by hand"),
        (
            1,
            "Traceback ...\nTypeError: MachineQuestion.__init__() got an unexpected keyword argument 'x'",
            "project",
            "not the version of the launching machine",
            "rsync -a --delete --exclude runs ",
        ),
    ],
)
def test_a_host_that_does_not_answer(code, said, check, found, fix):
    row = describe_missing_answer("b", NoAnswerError(code, said))
    assert (row.check, row.status, row.hosts) == (check, "fail", ("b",))
    assert found in row.text
    assert fix in row.fix


def run_on(command, question):
    """Answers of the process that a command starts."""

    async def talk():
        node = await start_process("a", command)
        try:
            return await question(node)
        finally:
            await node.close()

    return asyncio.run(talk())


@pytest.mark.slow
def test_a_log_in_that_talks_and_a_probe_that_ends_with_its_pipe():
    """The remote shell's own words are not taken for answers."""
    talking = ["sh", "-c", f"echo Welcome; exec {shlex.join(local_command(PROBE_MODULE))}"]
    assert abs(run_on(talking, measure_clock_offset)) < 0.1
    assert not [p for p in psutil.Process().children() if p.cmdline()[-2:] == ["-m", PROBE_MODULE]]


@pytest.mark.slow
def test_a_node_with_another_version_is_told_to_copy_the_project():
    """An older version does not know a field of the question."""

    async def examine_there(node):
        with pytest.raises(NoAnswerError) as ended:
            await ask(node, "examine", {"a field of another version": 1})
        return ended.value

    row = describe_missing_answer("b", run_on(local_command(PROBE_MODULE), examine_there))
    assert (row.check, row.status) == ("project", "fail")
    assert f" b:{ROOT}/" in row.fix


@pytest.mark.slow
def test_a_node_that_ends_says_why_and_a_slow_one_is_waited_for_aloud(monkeypatch, capfd):
    monkeypatch.setattr(ssh, "FIRST_REPORT_SECONDS", 0.2)
    step = """echo '{"pipeline": {"step": "disk, folders"}}'; exec sleep 100"""

    async def talk():
        ended = await start_process("a", ["sh", "-c", "echo b: Permission denied >&2; exit 255"])
        slow = await start_process("b", ["sh", "-c", step])
        found = await ask_all([ended, slow], lambda node: ask(node, "time", seconds=1.5))
        await slow.close(timeout_seconds=0.1)
        return found

    answers, silent = asyncio.run(talk())
    assert answers == {}
    assert (silent["a"].code, silent["a"].reason) == (255, "b: Permission denied")
    assert silent["b"].reason == "no answer within 1.5 s, still at: disk, folders"
    assert "waiting: b (disk, folders) after 0 s" in capfd.readouterr().err


def test_a_machine_without_ssh_is_told_what_to_install(tmp_path, monkeypatch, capsys):
    (tmp_path / "hosts").write_text("a slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["doctor", "--hostfile", str(tmp_path / "hosts")]) == 2
    said = capsys.readouterr().err
    assert said == "error: ssh is not on this machine; install it: apt-get install ssh\n"


@pytest.mark.parametrize(("options", "check"), [([], "devices"), (["--force_multi"], "ssh")])
def test_a_hostfile_of_this_machine_alone_needs_no_ssh(tmp_path, monkeypatch, capsys, options, check):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\necho Connection refused >&2; exit 255\n")
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    main(["doctor", "--hostfile", str(tmp_path / "hosts"), "--quick", *options])
    said = capsys.readouterr().out
    assert re.search(rf"^{check} ", said, re.M)
    assert ("localhost is this machine: one machine needs neither hostfile nor ssh" in said) == (not options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plain", "with space", "quote'quote", "$(touch gone)", '`touch gone`";touch gone;"']
)
def test_what_ssh_runs_there_takes_every_name_as_it_is(tmp_path, name):
    """The text passes two shells: the log-in shell there, and sh."""
    folder = tmp_path / name

    def there(python):
        command = ssh_command("b", PROBE_MODULE, folder, python)[-1]
        return subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, capture_output=True, check=False, input=b""
        )

    assert there("/nowhere").returncode == NO_FOLDER
    folder.mkdir()
    assert (there("/nowhere").returncode, there("/nowhere").stderr) == (NO_PYTHON, b"no program /nowhere\n")
    assert there(sys.executable).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]


SSH = """#!/bin/sh
for word; do host=$last; last=$word; done
[ "$host" != gone ] || { echo 'ssh: connect to host gone port 22: No route to host' >&2; exit 255; }
exec sh -c "$last"
"""


@pytest.mark.slow
def test_hosts_through_ssh(tmp_path, monkeypatch, capsys):
    """ssh is a stand-in: both hosts are this machine. Nothing stays behind."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("a slots=1\nlocalhost slots=1\ngone slots=1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["--hostfile", str(tmp_path / "hosts"), f"runs_dir={tmp_path / 'runs'}"]
    assert main(["doctor", *words]) == 2
    table = " ".join(capsys.readouterr().out.split())
    for row in (
        "ssh fail gone: no route to this host",
        "disk ok enough free in",
        "clock ok within 0.",
        "hosts fail a, localhost: a and localhost are the same machine",
        "names fail a, localhost: the name a does not resolve",
        "ports ok all 2 connections succeed",
        "run folder ok shared by all hosts",
        "all-reduce warning skipped -> repair these first: hosts, ",
    ):
        assert row in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "hosts"]


def _measure(job):
    return _transfer(job.ranks.rank, [[[0, 1]], [[1, 0]]], job.device)


@pytest.mark.slow
def test_transfers(ranks):
    results = ranks(2).run(_measure)
    assert [[link[:2] for link in links] for links in results] == [[[1, 0]], [[0, 1]]]
    assert all(link[2] > 1e6 for links in results for link in links)


@pytest.mark.slow
def test_all_reduce_of_one_machine(tmp_path):
    """The check runs in a process of its own, which is gone afterwards."""
    rows = examine(
        restrict_to_this_machine(ExaminationSettings({}, folders=(str(tmp_path / "a"), str(tmp_path / "b"))))
    )
    assert not has_failure(rows), rows
    assert [row.text for row in rows if row.check == "all-reduce"] == ["16 MiB over 1 rank"]
    assert not [p for p in psutil.Process().children(recursive=True) if RANK_MODULE in p.cmdline()]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tasks", "node", "slots"),
    [("1", 0, None), ("8(x2)", 1, 8), ("2(x3),4", 3, 4), ("2,3", 1, 3), ("4(x2)", 5, None)],
)
def test_slots_of_a_task(tasks, node, slots):
    environment = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert read_slots(environment) == (None if slots is None else list(range(slots)))
    assert read_slots(environment | {"CUDA_VISIBLE_DEVICES": "0"}) is None


@pytest.mark.slow
@pytest.mark.nightly  # each day tests/multinode/test_doctor_nodes.py has real tasks, as root
def test_tasks_of_srun_find_each_other(tmp_path):
    """Two nodes' first tasks and a second one of the first, as srun would start them."""
    assert not is_slurm_task({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}), "a batch script is no task"

    def start(number: int, node: int, local: int) -> subprocess.Popen[str]:
        job = {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_TASKS_PER_NODE": "2,1",
            "SLURMD_NODENAME": f"n{node}",
            "SLURM_PROCID": str(number),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local),
        }
        command = [sys.executable, "-m", "pipeline", "doctor", "--quick", f"runs_dir={tmp_path}"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=os.environ | job, cwd=ROOT, **streams)

    second = start(1, 0, 1)
    assert second.communicate(timeout=300)[0] == ""  # it waits for no one
    assert second.returncode == 0
    tasks = [start(2, 1, 0), start(0, 0, 0)]
    said = [task.communicate(timeout=300)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 2], said
    assert said[0] == ""
    assert "n0 and n1 are the same machine" in " ".join(said[1].split())  # as they are here
