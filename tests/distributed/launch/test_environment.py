"""Environment variables on the nodes: who reads them, what a shell there changes, which a rank takes."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.shipped import LAUNCH
from pipeline.distributed.launch.environment import (
    SENT_PREFIXES,
    choose_environment,
    launcher_environment,
    load_sent_environment,
    split_arguments,
    write_document,
)
from pipeline.distributed.launch.multi_node import TRAIN_SCRIPT, main, plan_launch
from pipeline.errors import LaunchError

HOSTILE = "$(touch x) `id` \"'; echo é\n\\ %n *"
SHELL = {
    "WANDB_API_KEY": "secret-1",
    "HF_TOKEN": HOSTILE,
    "NCCL_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "4",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "MLFLOW_TRACKING_PASSWORD": "secret-2",
    "AWS_SECRET_ACCESS_KEY": "secret-3",
    "DS_ENV_FILE": "/somewhere/else",
    "PATH": "/usr/bin",
    "EDITOR": "ed",
}


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("a slots=2\nb slots=4\n")
    return path


def test_the_page_lists_the_variables_that_are_always_sent():
    page = (LAUNCH.parent / "docs" / "how-to" / "many-machines.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("|") and "WANDB_" in line)
    names = {word.removesuffix("\\*") for word in row.split("|")[1].replace(",", "").split()}
    assert names == set(SENT_PREFIXES)


def test_training_variables_go_and_nothing_else_does():
    chosen = choose_environment(SHELL, ["EDITOR"])
    assert set(chosen) == {
        *("WANDB_API_KEY", "HF_TOKEN", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING"),
        "EDITOR",
    }
    assert all(value == SHELL[name] for name, value in chosen.items())
    with pytest.raises(LaunchError, match="--export PAGER: PAGER is not set"):
        choose_environment(SHELL, ["PAGER"])


def test_deepspeed_is_not_given_what_it_would_send_on():
    assert not {"MLFLOW_TRACKING_PASSWORD", "NCCL_SOCKET_IFNAME"} & set(launcher_environment(SHELL))
    assert launcher_environment({"PYTHONPATH": "/a:/b"}) == {"PYTHONPATH": "/a:/b"}
    with pytest.raises(LaunchError, match=r"PYTHONPATH='/a b' cannot be sent"):
        launcher_environment({"PYTHONPATH": "/a b"})


def test_a_rank_takes_up_what_was_handed_over(tmp_path):
    path = tmp_path / "environment.json"
    environment = {"HF_TOKEN": HOSTILE, "WANDB_NAME": os.fsdecode(b"\xff\xfe")}
    write_document(path, {"environment": environment, "arguments": [HOSTILE, ""]})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    rank = {"PIPELINE_ENVIRONMENT": str(path), "HF_TOKEN": "another", "RANK": "3", "PATH": "/usr/bin"}
    assert load_sent_environment(rank) == [HOSTILE, ""]
    assert rank["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert {name: rank[name] for name in environment} == environment
    assert rank["RANK"] == "3"
    with pytest.raises(FileExistsError):
        write_document(path, {})
    assert load_sent_environment({"PATH": "/usr/bin"}) == []


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("{}", 0o600, "not a file that a launch script wrote"),
        ("[1", 0o600, "not a file that a launch script wrote"),
        ('{"environment": {}, "arguments": []}', 0o640, "other users may read or write this file"),
    ],
)
def test_what_is_not_ours_is_not_taken(tmp_path, content, mode, message):
    path = tmp_path / "environment.json"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(LaunchError) as caught:
        load_sent_environment({"PIPELINE_ENVIRONMENT": str(path)})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "launcher", "training"),
    [
        (["h", "--no-doctor", "--deepspeed", "z.json"], ["h", "--no-doctor"], ["--deepspeed", "z.json"]),
        (["h", "-i", "a@b:0,1", "name=x", "-q"], ["h", "-i", "a@b:0,1"], ["name=x", "-q"]),
        (["h", "--launcher_args=-x=1", "--config=c"], ["h", "--launcher_args=-x=1"], ["--config=c"]),
        (["h", "--", "--quiet"], ["h"], ["--quiet"]),
        (["h"], ["h"], []),
    ],
)
def test_where_the_arguments_of_train_py_begin(arguments, launcher, training):
    assert split_arguments(arguments) == (launcher, training)


def hostile_values(count):
    """Pieces that mean something to a shell, to ssh, to pdsh or to the deepspeed launcher, put together."""
    words = "$(touch TRAP)|`touch TRAP`|; touch TRAP;|& touch TRAP &|> TRAP|${IFS}|$HOME|[a-z]|{1,2}|!!|%n|%h"
    pieces = [*words.split("|"), *"'\"\\\n\r\t ~*?#é\udcff=@x", "| tee TRAP", "name", "-o", "--", "日本", ""]
    dice = random.Random(0)
    return ["".join(dice.choices(pieces, k=dice.randint(1, 6))) for _ in range(count)]


def test_a_thousand_hostile_arguments_and_values_arrive_through_a_shell(hostfile, tmp_path):
    """Ten a launch: what pdsh would send goes through a real shell; the rest is what a rank takes up."""
    trap = tmp_path / "trap"
    values = [value.replace("TRAP", str(trap)) for value in hostile_values(1000)]
    launches = []
    lines = []
    for start in range(0, 1000, 10):
        some = values[start : start + 10]
        # The first three launches have plain arguments only: they stay on the command line.
        given = [f"name={start}.{n}" if start < 30 else f"name={value}" for n, value in enumerate(some)]
        shell = {f"WANDB_{n}": value for n, value in enumerate(some)}
        launch = plan_launch([str(hostfile), "--no-doctor", "--", *given], shell)
        words = launch.build_command(hostfile, {"address": "10.0.0.1", "port": 3})
        lines.append(" ".join(["printf", r"'%s\0'", *words[words.index(str(TRAIN_SCRIPT)) :]]))
        assert bool(launch.arguments) == (start < 30)
        launches.append((launch, given, shell))
        assert not any(value in word for value in some if len(value) > 20 for word in words)
    script = "\nprintf '\\n'\n".join(lines)
    answer = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, check=True).stdout
    seen = [[os.fsdecode(word) for word in line.split(b"\0")[1:-1]] for line in answer.split(b"\n")]
    assert len(seen) == len(launches) == 100
    for number, (words, (launch, given, shell)) in enumerate(zip(seen, launches, strict=True)):
        path = tmp_path / f"{number}.json"
        write_document(path, launch.document)
        rank = {"PIPELINE_ENVIRONMENT": str(path)}
        assert words + load_sent_environment(rank) == given
        assert {name: rank[name] for name in shell} == shell
    assert not trap.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], []),
        (["--include", "b:0,2"], ["--include=b:0,2"]),
        (["--include", "b"], []),  # the hostfile of the run has no other
        (["--master_port", "7", "--master_addr", "b"], ["--master_port=7", "--master_addr=b"]),
        (["--log_level", "info"], ["--log_level=info"]),
        (["--bind_cores_to_rank"], ["distributed.bind_cores=true"]),
    ],
)
def test_what_deepspeed_is_given(hostfile, arguments, expected):
    launch = plan_launch([str(hostfile), "--no-doctor", *arguments, "--deepspeed", "z.json"], {})
    words = launch.build_command(hostfile, {"address": "10.0.0.1", "port": 3})
    assert "--force_multi" in words  # else one machine, though remote, means this one
    assert set(expected) <= set(words)
    assert words[words.index(str(TRAIN_SCRIPT)) + 1 :][:2] == ["--deepspeed", "z.json"]
    assert any(word.startswith("--include") for word in words) == (expected == ["--include=b:0,2"])
    if "b" in arguments and "--include" in arguments:
        assert launch.format_hostfile() == "b slots=4\n"
        assert launch.map_ranks_to_nodes() == dict.fromkeys(range(4), "b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hostfile", "h"], f"unrecognized arguments: --hostfile h; see {LAUNCH}/multi_node.sh --help"),
        (["--master_addr", "a;b"], "--master_addr: 'a;b' has characters that a shell on the nodes would"),
        (
            ["--launcher", "openmpi", "--include", "a:1@b:2"],
            "mpirun always takes the first devices of each node",
        ),
        (["--master_port", "99999"], "--master_port 99999: expected a whole number from 1 to 65535"),
    ],
)
def test_what_cannot_be_done_is_refused(hostfile, arguments, message):
    """Others: tests/bad_inputs/hostfiles.py."""
    with pytest.raises(LaunchError) as caught:
        plan_launch([str(hostfile), *arguments], {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_a_shell_would_read_is_refused(hostfile, tmp_path, monkeypatch):
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(
        LaunchError, match="my project' has characters that a shell on the nodes would interpret"
    ):
        plan_launch([str(hostfile)], {})


STAND_IN_SSH = """#!/bin/sh
for word; do last=$word; done
exec sh -c "$last"
"""
STAND_IN_DEEPSPEED = """#!/bin/sh
. "$DS_ENV_FILE"
folder=$(dirname "$PIPELINE_ENVIRONMENT")
cp "$PIPELINE_ENVIRONMENT" {seen}/environment.json
stat -c %a "$PIPELINE_ENVIRONMENT" "$folder" "$DS_ENV_FILE" > {seen}/modes
cat /proc/[0-9]*/cmdline > {seen}/lines 2>/dev/null
for rank in 0 1; do echo '{{"code": 0, "world_size": 2}}' > $folder/rank-$rank; done
"""


def test_a_launch_hands_over_in_private_and_cleans_up(hostfile, tmp_path, monkeypatch, capfd):
    """ssh and deepspeed are stand-ins, the guard is real; a .deepspeed_env that lies about is not read."""
    for name, script in {"ssh": STAND_IN_SSH, "deepspeed": STAND_IN_DEEPSPEED.format(seen=tmp_path)}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".deepspeed_env").write_text("PATH=/evil\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "pipeline.distributed.launch.multi_node.find_program", lambda name: str(tmp_path / name)
    )
    shell = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_TOKEN": HOSTILE, "WANDB_API_KEY": "k" * 40}
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    assert main([str(hostfile), "--no-doctor", "--include", "a", "--export", "HOME"]) == 0
    assert f"{tmp_path}/.deepspeed_env is not read" in capfd.readouterr().err
    document = json.loads((tmp_path / "environment.json").read_text())
    sent = document["environment"]
    assert [sent[name] for name in ("HF_TOKEN", "WANDB_API_KEY", "HOME")] == [
        HOSTILE,
        "k" * 40,
        os.environ["HOME"],
    ]
    assert "PATH" not in sent
    assert (tmp_path / "modes").read_text().split() == ["600", "700", "600"]
    assert b"k" * 40 not in (tmp_path / "lines").read_bytes()
    assert not Path(document["folder"]).exists()
