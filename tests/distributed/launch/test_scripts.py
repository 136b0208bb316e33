"""The scripts of launch/: each says how it is used, refuses what cannot work in one line, and trains."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import warnings
from pathlib import Path

import pytest
import yaml
from support.launch import (
    DIGITS,
    ROOT,
    make_environment,
    read_reproducible_rows,
    run_directories,
    write_recipe,
)

from pipeline.config.settings import load_settings
from pipeline.distributed.launch import multi_gpu, torchrun
from pipeline.distributed.launch.environment import split_arguments
from pipeline.distributed.launch.hostfile import read_hostfile
from pipeline.distributed.launch.torchrun import build_command, check_node_counts
from pipeline.distributed.waiting import TimedWait, find_own_address, wait_for_port
from pipeline.errors import LaunchError

LAUNCH = ROOT / "launch"
SCRIPTS = ["multi_gpu.sh", "multi_node.sh", "torchrun.sh", "slurm.sbatch"]


def start(script, *arguments, cwd=ROOT, **variables):
    return subprocess.run(
        ["bash", str(LAUNCH / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=make_environment(**variables),
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_says_how_it_is_used(script):
    done = start(script, "--help")
    assert done.returncode == 0
    assert f"launch/{script} " in done.stdout
    assert "set -euo" not in done.stdout
    assert "#" not in done.stdout
    lines = (LAUNCH / script).read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert max(map(len, lines)) <= 125


def test_a_batch_script_started_by_hand_says_so(tmp_path):
    done = start("slurm.sbatch", "name=x")
    assert (done.returncode, done.stderr) == (
        2,
        "error: not in a Slurm job; start with: sbatch launch/slurm.sbatch\n",
    )
    elsewhere = start("slurm.sbatch", cwd=tmp_path)
    assert elsewhere.returncode == 2
    assert "is not the project's folder" in elsewhere.stderr


def test_the_example_is_a_hostfile():
    assert len(read_hostfile(LAUNCH / "hostfile.example")) == 2


@pytest.mark.slow
def test_kubernetes(monkeypatch):
    """Manifests are valid by the schemas of the newest version, and by this project's own names."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    monkeypatch.chdir(ROOT)
    service, job = documents = list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))
    for document in documents:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (program,) = container["command"]
    assert os.access(ROOT / program, os.X_OK)
    words = build_command(container["args"])
    assert "--rdzv-backend=c10d" in words
    launcher, training = split_arguments(container["args"])
    assert f"--nnodes=1:{job['spec']['completions']}" in launcher
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in launcher
    # The first pod's name, as the headless service gives it.
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{service['metadata']['name']}:29400" in launcher
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    overrides = [word for word in training if "=" in word]
    recipe, split = (Path(training[training.index(name) + 1]) for name in ("--config", "--deepspeed"))
    config = load_settings(recipe, split, overrides).config
    assert config.batch.global_batch_size == 128


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        (["--nproc-per-node=2"], ["--standalone"]),
        (["--nproc-per-node", "2", "--master-port", "7"], []),
        (
            ["--nnodes=2", "--nproc_per_node=2", "--rdzv_endpoint=a:1"],
            ["--rdzv-backend=c10d", "--rdzv-id=pipeline"],
        ),
        (
            ["--nnodes", "1:2", "--nproc-per-node=2", "--rdzv-endpoint", "a:1", "--rdzv-id=7"],
            ["--rdzv-backend=c10d", "--max-restarts=3"],
        ),
        (["--nnodes=2", "--nproc-per-node=2", "--master-addr=a"], []),
    ],
)
def test_what_torchrun_is_given_besides(arguments, added):
    words = build_command([*arguments, "name=x"])
    place = words.index(str(LAUNCH / "train.py"))
    assert words[1:place] == [*added, *arguments]
    assert words[place + 1 :] == ["name=x"]


def test_machines_that_do_not_know_where_to_meet():
    with pytest.raises(LaunchError, match=r"--nnodes 2: --rdzv-endpoint is missing"):
        build_command(["--nnodes", "2", "name=x"])


@pytest.mark.slow
def test_sizes_that_a_restart_could_not_have_are_said_before(tmp_path, capfd):
    recipe = write_recipe(tmp_path, batch={"global_batch_size": 8})
    words = build_command(
        [*("--nnodes=3:4", "--nproc-per-node=2", "--rdzv-endpoint=a:1"), f"--config={recipe}"]
    )
    assert check_node_counts(words) == 0
    said = capfd.readouterr().err
    assert said.startswith(
        "with 3 of 4 machines the run could not continue: batch: global_batch_size = 8 on 6 "
    )
    assert said.endswith("use a global_batch_size of 24, which divides for 3 to 4 machines\n")
    assert check_node_counts([*words, "batch.global_batch_size=30"]) == 2
    assert "use a global_batch_size of 24 or 48, which" in capfd.readouterr().err
    assert check_node_counts([*words, "model.num_layers=x"]) == 2
    assert "num_layers" in capfd.readouterr().err


@pytest.mark.slow
def test_the_scripts_of_one_machine_train_alike(tmp_path):
    """Two ranks each; the second goes on with the first one's run, which SIGUSR1 of a scheduler stopped."""
    recipe = write_recipe(tmp_path, max_steps=5000, eval={"max_samples": 8}, **DIGITS)
    first = subprocess.Popen(
        [str(LAUNCH / "multi_gpu.sh"), "--num_gpus", "2", "--config", str(recipe)],
        env=make_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    said = ""
    for line in first.stdout:
        said += line
        if "saved" in line and first.poll() is None and "SIGUSR1" not in said:
            first.send_signal(10)
            break
    said += first.stdout.read()
    assert first.wait(300) == 138, said
    assert not [path for path in Path("/tmp").glob("pipeline-*") if str(path) in said]
    (run,) = run_directories(tmp_path)
    rows = read_reproducible_rows(run)
    stopped = rows[-1]["step"]
    done = start(
        "torchrun.sh", "--nproc-per-node=2", "--config", recipe, f"run_dir={run}", f"max_steps={stopped + 2}"
    )
    assert done.returncode == 0, done.stderr
    assert f"resuming {run} from step-" in done.stderr
    assert read_reproducible_rows(run)[-1]["step"] == stopped + 2
    assert json.loads((run / "summary.json").read_text())["global_step"] == stopped + 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "3:2"], "--nnodes 3:2: give N, or MIN:MAX"),
        (["--nnodes=0"], "--nnodes 0: give N"),
        (["--nnodes=two"], "--nnodes two: give N"),
        (["--nnodes=1:"], "--nnodes 1:: give N"),
        (["--nproc-per-node", "x"], "--nproc-per-node x: give the number of ranks"),
        (["--nproc_per_node=0"], "--nproc-per-node 0: give the number"),
        (["--max-restarts=-1"], "--max-restarts -1: give 0 or more"),
        (["--nnodes=2", "--rdzv-endpoint=node1:abc"], "--rdzv-endpoint node1:abc: give HOST:PORT"),
        (["--nnodes=2", "--rdzv-endpoint=node1:99999"], "--rdzv-endpoint node1:99999: give HOST:PORT"),
        (["--nnodes=2", "--rdzv-endpoint=:29400"], "--rdzv-endpoint :29400: give HOST:PORT"),
        (["--nnodes=2", "--master-addr=a", "--master-port=-3"], "--master-port -3: give a port from 1"),
    ],
)
def test_numbers_that_torchrun_cannot_take(options, words):
    with pytest.raises(LaunchError, match=f"^{re.escape(words)}"):
        build_command([*options, "name=x"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num_gpus", "0"], "--num_gpus 0: give 1 or more"),
        (["--num_gpus", "two"], "argument --num_gpus/--num_accelerators: invalid int value: 'two'"),
        (["--num-gpus", "2"], "--num-gpus: unknown option; did you mean --num_gpus?"),
        (["--num_nodes", "2"], "multi_gpu.sh trains on this machine only"),
        (["--hostfile", "hosts"], "multi_gpu.sh trains on this machine only"),
        (["--master_port", "abc"], "--master_port abc: expected a whole number"),
        (["--include", "localhost:99"], "--include localhost:99: localhost has no device 99, but slots="),
    ],
)
def test_what_deepspeed_answers_with_a_traceback_is_told_before(options, words, capfd):
    try:
        code = multi_gpu.main([*options, "name=x"])
    except SystemExit as end:
        code = end.code
    said = capfd.readouterr().err
    assert code == 2
    if words.startswith("argument"):  # found by the parser, whose usage stands before it
        assert re.match(rf"usage: .*\nlaunch/multi_gpu.sh: error: {re.escape(words)}", said)
        assert said.count("\n") == 2
    else:
        assert said.startswith(f"error: {words}")
        assert said.count("\n") == 1


@pytest.mark.slow
def test_an_endpoint_without_a_machine_is_told(capfd):
    """Names of pods come late in Kubernetes; torchrun gave up without naming the host."""
    words = build_command(
        ["--nnodes=2", "--rdzv-endpoint=nowhere.invalid:29400", "--rdzv-conf=join_timeout=1", "a=b"]
    )
    named = r"\S+ does not reach the rendezvous endpoint, nowhere.invalid:29400 \("
    with pytest.raises(LaunchError, match=named):
        torchrun.wait_for_endpoint(words)
    assert re.match(f"waiting: {named}", capfd.readouterr().err)


def test_a_machine_that_is_there_is_reached(capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert find_own_address("127.0.0.1") == "127.0.0.1"
        wait_for_port("127.0.0.1", server.getsockname()[1], "nobody", TimedWait(60))
    assert find_own_address("198.51.100.1") is None
    looks = iter([False, True])  # the name service learns a pod's own name after the pod has begun
    wait_for_port("nowhere.invalid", 1, "nobody", TimedWait(60), is_own_host=lambda: next(looks))
    assert not capfd.readouterr().err
