"""python -m pipeline.distributed.launch.torchrun ...: what launch/torchrun.sh hands over to.

Adds to torchrun's options what a run over machines needs, looks at the recipe, and takes this process's place
with it: torchrun would start a mistake again and again.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.distributed.launch.environment import split_arguments
from pipeline.distributed.launch.multi_node import TRAIN, program
from pipeline.distributed.ranks import AGENT, is_port
from pipeline.distributed.waiting import Wait, is_own_address, wait_for_port
from pipeline.errors import LaunchError, report_errors

RESTARTS = 3
JOIN_TIMEOUT = 600.0  # seconds: torchrun's
WHOLE = re.compile(r"[0-9]{1,9}")
FEW = 8  # numbers of machines that are planned for: under a second each


def command(argv: Sequence[str]) -> list[str]:
    """torchrun's command line.

    Raises:
        LaunchError: several machines, and nowhere to meet; a number that cannot be.
    """
    options, arguments = split_arguments(argv)
    given = _values(options)
    _check(given)
    nodes = given.get("nnodes", "1")
    added = [] if "nproc_per_node" in given else [f"--nproc-per-node={_devices()}"]
    if nodes in ("1", "1:1"):
        if not {"rdzv_endpoint", "master_port", "standalone"} & set(given):
            added.append("--standalone")  # a free port
    elif "rdzv_endpoint" in given:
        if "rdzv_backend" not in given:
            added.append("--rdzv-backend=c10d")
        if "rdzv_id" not in given:
            added.append("--rdzv-id=pipeline")
    elif "master_addr" not in given:
        raise LaunchError(
            f"--nnodes {nodes}: where the machines meet is missing; give every machine the same "
            "--rdzv-endpoint HOST:PORT, of one of them"
        )
    if ":" in nodes and "max_restarts" not in given:
        added.append(f"--max-restarts={RESTARTS}")
    return [program("torchrun"), *added, *options, str(TRAIN), *arguments]


def _check(given: Mapping[str, str]) -> None:
    """torchrun answers these with a traceback."""
    least, colon, most = (nodes := given.get("nnodes", "1")).partition(":")
    if not all(WHOLE.fullmatch(n) for n in (least, most if colon else least)) or not (
        1 <= int(least) <= int(most or least)
    ):
        raise LaunchError(f"--nnodes {nodes}: give N, or MIN:MAX as 3:4")
    each = given.get("nproc_per_node", "1")
    if each not in ("auto", "cpu", "gpu", "xpu") and (not WHOLE.fullmatch(each) or int(each) < 1):
        raise LaunchError(f"--nproc-per-node {each}: give the number of ranks on this machine, 1 or more")
    for name in ("max_restarts", "node_rank"):
        if name in given and (not WHOLE.fullmatch(given[name]) or int(given[name]) < 0):
            raise LaunchError(f"--{name.replace('_', '-')} {given[name]}: give 0 or more")
    ports = {"master_port": given.get("master_port")}
    endpoint = given.get("rdzv_endpoint")
    if endpoint is not None:
        host, ports["rdzv_endpoint"] = split_endpoint(endpoint)
        if not host:
            raise LaunchError(f"--rdzv-endpoint {endpoint}: give HOST:PORT, of one of the machines")
    for name, port in ports.items():
        if port is not None and not is_port(port):
            raise LaunchError(f"--{name.replace('_', '-')}: {port!r} is no port: give one from 1 to 65535")


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Host and port; without one torchrun takes 29400."""
    host, colon, port = endpoint.strip().rpartition(":")
    host, port = (host, port) if colon else (port, "29400")
    return host.strip("[]"), port


def wait_for_others(words: Sequence[str]) -> None:
    """Until the machine where all meet can be reached; torchrun itself would wait without a word, and give up
    with a traceback.

    Raises:
        LaunchError: it could not be, for as long as torchrun would wait for the others.
    """
    given = _values(words[1 : words.index(str(TRAIN))])
    if "rdzv_endpoint" in given:
        if given.get("rdzv_backend") != "c10d" or "is_host" in given.get("rdzv_conf", ""):
            return
        host, port = split_endpoint(given["rdzv_endpoint"])
    elif "master_addr" in given and given.get("node_rank", "0") != "0":
        host, port = given["master_addr"], given.get("master_port", "29500")
    else:
        return
    match = re.search(r"join_timeout=([0-9]+)", given.get("rdzv_conf", ""))
    wait = Wait(float(match[1]) if match else JOIN_TIMEOUT, "--rdzv-conf=join_timeout=...")
    what = f"{platform.node()} does not reach the machine where all meet"
    wait_for_port(host, int(port), what, wait, is_here=lambda: is_own_address(host))


def described(words: Sequence[str]) -> str:
    """What ranks are told of the agent that this process is about to be (pipeline.distributed.ranks)."""
    given = _values(words[1 : words.index(str(TRAIN))])
    least = given.get("nnodes", "1").partition(":")[0]
    stated = re.search(r"is_host=(\w+)", given.get("rdzv_conf", ""))
    if stated is not None:
        serves = stated[1].lower() in ("1", "true", "t", "yes", "y")
    else:
        serves = is_own_address(split_endpoint(given.get("rdzv_endpoint", "localhost"))[0])
    return f"{os.getpid()}:{least}:{int(serves)}"


def _values(options: Sequence[str]) -> dict[str, str]:
    """Option -> its value, in torchrun's spelling with underscores; a flag's value means nothing."""
    found = {}
    for option, following in zip(options, [*options[1:], ""], strict=True):
        if option.startswith("--"):
            name, equals, value = option[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else following
    return found


def _devices() -> int:
    """GPUs of this machine without torch, which torchrun loads anyway; 1 on CPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip()]) or 1
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or 1


def check_sizes(words: Sequence[str]) -> int:
    """Plans the run (train.py --dry-run) for every number of machines that it may have.

    What does not fit the most machines is an error; for fewer it is said: a restart would end there.

    Returns:
        The exit code of the plan for the most: 2 where it is wrong.
    """
    place = words.index(str(TRAIN))
    given = _values(words[1:place])
    least, _, most = given.get("nnodes", "1").partition(":")
    per_node = given["nproc_per_node"]
    if not (per_node + least + most).isdecimal():
        return 0  # `gpu`, `auto`: torchrun will count
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    alone = {name: value for name, value in os.environ.items() if name not in launched}
    sizes = range(int(most or least), int(least) - 1, -1)
    for nodes in sizes[:FEW]:
        size = str(nodes * int(per_node))
        plan = [sys.executable, *words[place:], "--dry-run", "--world-size", size]
        done = subprocess.run(plan, capture_output=True, text=True, check=False, env=alone)
        if done.returncode == 0:
            continue
        problem = done.stderr.strip()
        if nodes == sizes[0]:
            print(problem, file=sys.stderr, flush=True)
            return done.returncode
        reason = problem.removeprefix("error: ")
        line = f"with {nodes} of {sizes[0]} machines it could not go on: {reason}"
        print(line, file=sys.stderr, flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Does not return where torchrun could be started; else 2."""
    return report_errors(lambda: _launch(sys.argv[1:] if argv is None else argv))


def _launch(argv: Sequence[str]) -> int:
    words = command(argv)
    if code := check_sizes(words):
        return code
    try:
        wait_for_others(words)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1  # no mistake in what was given: it may be there the next time
    # Else torch keeps the ranks' store from attempt to attempt, on the machine that had rank 0 in the first:
    # lost, it is looked for there by all machines but the one that takes its place.
    told = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", AGENT: described(words)}
    os.execve(words[0], words, os.environ | told)


if __name__ == "__main__":
    sys.exit(main())
