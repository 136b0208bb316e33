"""Implements launch/torchrun.sh: `python -m pipeline.distributed.launch.torchrun ...`.

It adds the options that a run over several machines needs, checks the recipe, and replaces itself with
torchrun. The check comes first because torchrun would restart a faulty recipe again and again.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from pipeline.distributed.launch.environment import split_arguments
from pipeline.distributed.launch.multi_node import TRAIN, find_program
from pipeline.distributed.machine import count_gpus
from pipeline.distributed.ranks import is_port
from pipeline.distributed.waiting import TimedWait, find_own_address, wait_for_port
from pipeline.errors import LaunchError, report_errors

RESTARTS = 3
JOIN_TIMEOUT = 600.0  # seconds: torchrun's
NUMBER = "[1-9][0-9]{0,8}"
FEW = 8  # numbers of machines that are planned for: under a second each


def build_command(argv: Sequence[str]) -> list[str]:
    """Return torchrun's command line.

    Raises:
        LaunchError: Several machines have nowhere to meet, or a number cannot be.
    """
    options, arguments = split_arguments(argv)
    given = _values(options)
    _check(given)
    nodes = given.get("nnodes", "1")
    added = [] if "nproc_per_node" in given else [f"--nproc-per-node={count_gpus(os.environ) or 1}"]
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
    return [find_program("torchrun"), *added, *options, str(TRAIN), *arguments]


def _is_range(nodes: str) -> bool:
    least, _, most = nodes.partition(":")
    return re.fullmatch(f"{NUMBER}(:{NUMBER})?", nodes) is not None and int(least) <= int(most or least)


def _is_endpoint(text: str) -> bool:
    host, port = split_endpoint(text)
    return host != "" and is_port(port)


RULES: dict[str, tuple[Callable[[str], object], str]] = {
    "nnodes": (_is_range, "give N, or MIN:MAX as 3:4"),
    "nproc_per_node": (
        re.compile(f"auto|cpu|gpu|xpu|{NUMBER}").fullmatch,
        "give the number of ranks on this machine, 1 or more",
    ),
    "max_restarts": (re.compile("[0-9]{1,9}").fullmatch, "give 0 or more"),
    "node_rank": (re.compile("[0-9]{1,9}").fullmatch, "give 0 or more"),
    "rdzv_endpoint": (_is_endpoint, "give HOST:PORT, of one of the machines, with a port from 1 to 65535"),
    "master_port": (is_port, "give a port from 1 to 65535"),
}
"""Option -> whether its value can be, and what to give. torchrun answers others with a traceback."""


def _check(given: Mapping[str, str]) -> None:
    for name, (is_right, advice) in RULES.items():
        if name in given and not is_right(given[name]):
            raise LaunchError(f"--{name.replace('_', '-')} {given[name]}: {advice}")


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return host and port; without a port torchrun takes 29400."""
    host, colon, port = endpoint.strip().rpartition(":")
    host, port = (host, port) if colon else (port, "29400")
    return host.strip("[]"), port


def wait_for_others(words: Sequence[str]) -> None:
    """Wait until the machine where all meet can be reached.

    torchrun itself would wait without a word, and give up with a traceback.

    Raises:
        LaunchError: It could not be reached for as long as torchrun would wait for the others.
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
    wait = TimedWait(float(match[1]) if match else JOIN_TIMEOUT, "--rdzv-conf=join_timeout=...")
    what = f"{platform.node()} does not reach the machine where all meet"
    wait_for_port(host, int(port), what, wait, is_own_host=lambda: find_own_address(host) is not None)


def _values(options: Sequence[str]) -> dict[str, str]:
    """Return option -> value, in torchrun's spelling with underscores; a flag's value means nothing."""
    found = {}
    for option, following in zip(options, [*options[1:], ""], strict=True):
        if option.startswith("--"):
            name, equals, value = option[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else following
    return found


def check_node_counts(words: Sequence[str]) -> int:
    """Plan the run (train.py --dry-run) for every number of machines that it may have.

    What does not fit the most machines is an error. For fewer it is a line: a restart would end there.

    Returns:
        The exit code of the plan for the most machines: 2 if it is wrong.
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
    """Become torchrun; return 2 if that cannot be."""
    return report_errors(lambda: _launch(sys.argv[1:] if argv is None else argv))


def _launch(argv: Sequence[str]) -> int:
    words = build_command(argv)
    if code := check_node_counts(words):
        return code
    try:
        wait_for_others(words)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1  # no mistake in what was given: it may be there the next time
    # Else torch keeps the ranks' store from attempt to attempt, on the machine that had rank 0 in the first:
    # lost, it is looked for there by all machines but the one that takes its place.
    os.execve(words[0], words, os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


if __name__ == "__main__":
    sys.exit(main())
