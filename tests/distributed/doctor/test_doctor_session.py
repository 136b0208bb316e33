"""Real probes on this machine: what they find, what is said where they fail; nothing stays behind."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from pipeline.distributed.doctor import facts, network_facts
from pipeline.distributed.doctor.examination import examine, this_machine
from pipeline.distributed.doctor.probe import find_out
from pipeline.distributed.doctor.rows import Wanted, is_red
from pipeline.distributed.doctor.session import (
    PROBE,
    Part,
    SilentError,
    _all_reduce,
    _transfer,
    over_command,
)
from pipeline.distributed.launch.ssh import NO_FOLDER, NO_PYTHON, local_command, ssh_command


def test_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    rows = examine(this_machine(Wanted({}, quick=True, folders=(str(tmp_path / "a"), str(tmp_path / "b")))))
    assert not is_red(rows), rows
    found = {row.check: row.found for row in rows}
    assert "torch 2." in found["versions"]
    assert "cores" in found["devices"] or "GPU" in found["devices"]
    assert not list(tmp_path.iterdir())


def test_a_log_in_that_talks_and_a_probe_that_ends_with_its_pipe():
    """The remote shell's own words are not taken for answers."""
    session = over_command("a", ["sh", "-c", f"echo Welcome; exec {shlex.join(local_command(PROBE))}"])
    assert abs(session.clock_offset()) < 0.1
    (probe,) = [p for p in psutil.Process().children() if p.cmdline()[-2:] == ["-m", PROBE]]
    session._questions.close()
    probe.wait(200)
    session.close()
    with pytest.raises(SilentError):
        session.ask("time", seconds=1)


def test_silence_has_a_reason():
    with closing(over_command("a", ["sh", "-c", "echo b: Permission denied >&2; exit 255"])) as session:
        with pytest.raises(SilentError) as caught:
            session.ask("time", seconds=200)
        assert (caught.value.code, caught.value.said) == (255, "b: Permission denied")
    with closing(over_command("a", ["sleep", "100"])) as session:
        with pytest.raises(SilentError, match=r"no answer within 0\.1 s"):
            session.ask("time", seconds=0.1)
        (sleeper,) = [p for p in psutil.Process().children() if p.name() == "sleep"]
        sleeper.kill()  # else it is waited for


@pytest.mark.parametrize(
    "name", ["plain", "with space", "quote'quote", "$(touch gone)", '`touch gone`";touch gone;"']
)
def test_what_ssh_runs_there_takes_every_name_as_it_is(tmp_path, name):
    """Through two shells: the log-in shell there, and sh."""
    folder = tmp_path / name

    def there(python):
        command = ssh_command("b", PROBE, folder, python)[-1]
        return subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, capture_output=True, check=False, input=b""
        )

    assert there("/nowhere").returncode == NO_FOLDER
    folder.mkdir()
    assert (there("/nowhere").returncode, there("/nowhere").stderr) == (NO_PYTHON, b"no program /nowhere\n")
    assert there(sys.executable).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow
def test_ports():
    port = network_facts.listen("token", "b")
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = {"b": port, "other": port, "silent": silent.getsockname()[1]}
        ports["closed"] = closed.getsockname()[1]
        closed.close()
        peers = [
            network_facts.Peer(name=name, address="127.0.0.1", port=port) for name, port in ports.items()
        ]
        found = {c["name"]: c for c in network_facts.connect_to(peers, "token", 5.0)}
    assert found["b"]["problem"] is None
    assert found["b"]["source"] == "127.0.0.1"
    assert found["other"]["problem"] == "another machine or program answers there"
    assert found["silent"]["problem"] == "no answer within 5 s"
    assert found["closed"]["problem"] == "connection refused"


@pytest.mark.slow
def test_a_fact_that_takes_too_long_is_left_behind():
    gate = threading.Event()
    found, unknown = find_out({"a": lambda: 1, "b": gate.wait, "c": lambda: {}["x"]}, seconds=5.0)
    gate.set()
    assert found == {"a": 1}
    assert unknown == {"b": "no answer within 5 s", "c": "KeyError: 'x'"}


def test_locks_of_builds(tmp_path, monkeypatch):
    """Stale: old, and no process works in the folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old = time.time() - 60
    for name in ("stale", "fresh", "worked-in"):
        lock = tmp_path / name / "lock"
        lock.parent.mkdir()
        lock.touch()
        if name != "fresh":
            os.utime(lock, (old, old))
            os.utime(lock.parent, (old, old))
    worker = subprocess.Popen(["sleep", "100"], cwd=tmp_path / "worked-in")
    try:
        locks = {Path(lock["path"]).parent.name: lock["is_held"] for lock in facts.read_ops()["locks"]}
    finally:
        worker.kill()
        worker.wait()
    assert locks == {"fresh": True, "stale": False, "worked-in": True}


def test_folders(tmp_path):
    file = tmp_path / "file"
    file.touch()
    found = facts.read_folders([str(tmp_path / "a" / "b"), str(tmp_path / "c"), str(file)], "marker")
    assert [(folder["problem"] is None) for folder in found] == [True, True, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "marker"]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2]), ("2,0", [2, 0]), ("", []), ("1,7,0", [1]), ("GPU-b", [1]), (" 1 , 2", [1, 2])],
)
def test_visible_gpus(visible, indices):
    gpus = [
        (facts.Gpu(index=n, name="x", total=1, used=0), f"GPU-{letter}") for n, letter in enumerate("abc")
    ]
    assert [gpu["index"] for gpu in facts._visible(gpus, visible)] == indices


def test_gpus_as_nvidia_smi_lists_them(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, 81559, 4, GPU-a'\necho '1, Same, 81559, 9000, GPU-b'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = facts.read_devices()["gpus"]
    assert first == {"index": 0, "name": "NVIDIA H100 80GB HBM3", "total": 81559 << 20, "used": 4 << 20}
    assert second["used"] == 9000 << 20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert facts.read_devices()["gpus"] == [second]


def _measure(job):
    part = Part(
        rank=job.ranks.rank,
        world_size=2,
        device=None,
        address="",
        port=0,
        rounds=[[(0, 1)], [(1, 0)]],
        seconds=10,
    )
    links = _transfer(part, job.device)
    return links, _all_reduce(part, links, job.device)


@pytest.mark.slow
def test_transfers_and_the_all_reduce(ranks):
    results = ranks(2).run(_measure)
    assert [[link[:2] for link in links] for links, _ in results] == [[(1, 0)], [(0, 1)]]
    assert all(link[2] > 1e6 for links, _ in results for link in links)
    (size, bandwidth), (other, _) = (reduced for _, reduced in results)
    assert size == other
    assert 1 << 18 <= size <= 1 << 24
    assert bandwidth > 1e6


@pytest.mark.slow
def test_all_reduce_of_one_machine(tmp_path):
    """In a process of its own, that is gone when it is done."""
    rows = examine(this_machine(Wanted({}, folders=(str(tmp_path), str(tmp_path)))))
    assert [row.status for row in rows if row.check == "all-reduce"] == ["ok"]
    assert not [
        p
        for p in psutil.Process().children(recursive=True)
        if "pipeline.distributed.doctor.session" in p.cmdline()
    ]


def test_answers_are_json():
    with closing(over_command("a", local_command(PROBE))) as session:
        asked = {
            "token": "t",
            "name": "a",
            "names": ["localhost", "no.such.name.invalid"],
            "folders": [os.devnull],
            "environment": {"GLOO_SOCKET_IFNAME": "x"},
            "devices": None,
            "load_torch": False,
        }
        answer = session.ask("examine", asked, seconds=200)
    assert answer == json.loads(json.dumps(answer))
    assert answer["unknown"] == {}
    assert answer["network"]["names"]["no.such.name.invalid"] == []
    assert answer["environment"] == {"GLOO_SOCKET_IFNAME": "x"}
    assert answer["folders"][0]["problem"]
