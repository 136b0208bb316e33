"""`python -m pipeline doctor`: its mistakes, its table, its exit code; and its tasks under srun."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.launch import ROOT

from pipeline.__main__ import main
from pipeline.distributed.doctor.rows import Row, show
from pipeline.distributed.doctor.slurm import in_step, slots_of


@pytest.mark.parametrize(
    ("arguments", "hostfile", "message"),
    [
        (["--hostfile", "missing"], None, "hostfile missing: No such file or directory"),
        (["--hostfile", "h"], "a slots=1\nb", "h:2: 'b' is not a machine"),
        (["--hostfile", "h"], "a slots=1\na slots=2", "h:2: a is on line 1 already"),
        (["--hostfile", "h", "--include", "c"], "a slots=1", "'c' is not in the hostfile"),
        (["--include", "c"], None, "give --hostfile FILE"),
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


def test_a_lock_left_behind_is_told_to_runs_that_need_the_op(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    for path in (lock, lock.parent):
        os.utime(path, (0, 0))
    for split, is_told in (("zero2", False), ("zero2_offload", True)):
        run = ["--deepspeed", str(ROOT / "ds_configs" / f"{split}.json"), f"runs_dir={tmp_path}"]
        main(["doctor", "--quick", *run])
        table = capsys.readouterr().out
        assert str(tmp_path) in table  # of the recipe: its disk is looked at
        assert (f"a killed build left {lock}" in " ".join(table.split())) is is_told


def test_the_table(capsys):
    show(
        [
            Row("ssh", "ok", "every host"),
            Row("disk", "fail", "1 MiB free", "ssh b df", ("b",)),
            Row("clock", "warning", "1.0 s ahead", "ssh a date", ("a",)),
        ],
        seconds=1.23,
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "ssh    ok       every host",
        "disk   fail     b: 1 MiB free",
        "                -> ssh b df",
        "clock  warning  a: 1.0 s ahead",
        "                -> ssh a date",
        "b: 1 failed, 1 warned of, 1 fine, in 1.2 s",
    ]


@pytest.mark.parametrize(
    ("tasks", "node", "slots"),
    [("1", 0, None), ("8(x2)", 1, 8), ("2(x3),4", 3, 4), ("2,3", 1, 3), ("4(x2)", 5, None)],
)
def test_slots_of_a_task(tasks, node, slots):
    environment = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert slots_of(environment) == (None if slots is None else list(range(slots)))
    assert slots_of(environment | {"CUDA_VISIBLE_DEVICES": "0"}) is None


def test_a_batch_script_is_no_task():
    assert not in_step({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"})
    assert in_step({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"})


@pytest.mark.slow
def test_tasks_of_srun_find_each_other(tmp_path):
    """Two nodes' first tasks and a second one of the first, as srun would start them."""

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
        command = [sys.executable, "-m", "pipeline", "doctor", "--quick", "--runs-dir", str(tmp_path)]
        return subprocess.Popen(
            command, env=os.environ | job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    second = start(1, 0, 1)
    assert second.communicate(timeout=300)[0] == ""  # it waits for no one
    assert second.returncode == 0
    tasks = [start(2, 1, 0), start(0, 0, 0)]
    said = [task.communicate(timeout=300)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 2], said
    assert said[0] == ""
    assert "n0 and n1 are one machine" in " ".join(said[1].split())  # as they are here
