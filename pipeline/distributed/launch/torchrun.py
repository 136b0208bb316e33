"""Implements launch/torchrun.sh: `python -m pipeline.distributed.launch.torchrun ...`.

It adds the options that a run over several machines needs, checks the recipe, and replaces its process with
torchrun. The check comes first because torchrun would start a run with a wrong recipe again at each
of its restarts.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from pipeline.distributed.launch.environment import split_arguments
from pipeline.distributed.launch.multi_node import TRAIN_SCRIPT, find_program
from pipeline.distributed.machine import count_gpus
from pipeline.distributed.ranks import is_port
from pipeline.distributed.waiting import TimedWait, find_own_address, wait_for_port
from pipeline.errors import LaunchError, report_errors

DEFAULT_MAX_RESTARTS = 3  # if the number of machines may change; torchrun's default is 0
DEFAULT_JOIN_SECONDS = 600.0  # torchrun's default for join_timeout
POSITIVE_NUMBER_PATTERN = "[1-9][0-9]{0,8}"
MAX_PLANS = 8  # numbers of machines for which check_node_counts plans the run; each takes up to a second
MAX_ADVISED_BATCH_SIZE = 10**6  # above it, the advice is to allow fewer numbers of machines


def build_command(argv: Sequence[str]) -> list[str]:
    """Return the command line of torchrun, with the options that the user has left out.

    Args:
        argv: Options of torchrun, then arguments of train.py.

    Raises:
        LaunchError: Several machines have neither a rendezvous endpoint nor a master address, or the value of
            an option is invalid.
    """
    options, arguments = split_arguments(argv)
    parsed = _parse_options(options)
    _check_values(parsed)
    nodes = parsed.get("nnodes", "1")
    added = []
    if "nproc_per_node" not in parsed:
        added.append(f"--nproc-per-node={count_gpus(os.environ) or 1}")
    if nodes in ("1", "1:1"):
        if not {"rdzv_endpoint", "master_port", "standalone"} & set(parsed):
            added.append("--standalone")  # torchrun then takes a free port
    elif "rdzv_endpoint" in parsed:
        if "rdzv_backend" not in parsed:
            added.append("--rdzv-backend=c10d")
        if "rdzv_id" not in parsed:
            added.append("--rdzv-id=pipeline")
    elif "master_addr" not in parsed:
        raise LaunchError(
            f"--nnodes {nodes}: --rdzv-endpoint is missing; give --rdzv-endpoint HOST:PORT of one of the "
            "machines, the same on all of them"
        )
    if ":" in nodes and "max_restarts" not in parsed:
        added.append(f"--max-restarts={DEFAULT_MAX_RESTARTS}")
    return [find_program("torchrun"), *added, *options, str(TRAIN_SCRIPT), *arguments]


def _is_range(nodes: str) -> bool:
    """Return whether a text is N, or MIN:MAX with MIN not above MAX."""
    if re.fullmatch(f"{POSITIVE_NUMBER_PATTERN}(:{POSITIVE_NUMBER_PATTERN})?", nodes) is None:
        return False
    lowest, _, highest = nodes.partition(":")
    return int(lowest) <= int(highest or lowest)


def _is_endpoint(text: str) -> bool:
    """Return whether a text is HOST:PORT or a host."""
    host, port = split_endpoint(text)
    return host != "" and is_port(port)


OPTION_RULES: dict[str, tuple[Callable[[str], object], str]] = {
    "nnodes": (_is_range, "give N, or MIN:MAX such as 3:4"),
    "nproc_per_node": (
        re.compile(f"auto|cpu|gpu|xpu|{POSITIVE_NUMBER_PATTERN}").fullmatch,
        "give the number of ranks on this machine, 1 or more",
    ),
    "max_restarts": (re.compile("[0-9]{1,9}").fullmatch, "give 0 or more"),
    "node_rank": (re.compile("[0-9]{1,9}").fullmatch, "give 0 or more"),
    "rdzv_endpoint": (_is_endpoint, "give HOST:PORT of one of the machines, with a port from 1 to 65535"),
    "master_port": (is_port, "give a port from 1 to 65535"),
}
"""Option -> function whose result is true for a valid value, and the advice for an invalid value.

torchrun itself ends with a traceback at an invalid value.
"""


def _check_values(values: Mapping[str, str]) -> None:
    """Check the values of the options by OPTION_RULES.

    Args:
        values: Result of `_parse_options`.

    Raises:
        LaunchError: A value breaks the rule of its option.
    """
    for name, (is_valid, advice) in OPTION_RULES.items():
        if name in values and not is_valid(values[name]):
            raise LaunchError(f"--{name.replace('_', '-')} {values[name]}: {advice}")


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return the host and the port of an endpoint; the default port of torchrun is 29400."""
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon:
        host = port
        port = "29400"
    return host.strip("[]"), port


def wait_for_endpoint(words: Sequence[str]) -> None:
    """Wait until the rendezvous endpoint can be reached.

    Does nothing on the machine that serves it, if `rdzv_conf` has `is_host`, or if the backend is not c10d.
    torchrun itself would print nothing while it waits, and end with a traceback.

    Args:
        words: Command line of torchrun.

    Raises:
        LaunchError: The endpoint cannot be reached within torchrun's `join_timeout`.
    """
    parsed = _parse_options(words[1 : words.index(str(TRAIN_SCRIPT))])
    rendezvous_options = parsed.get("rdzv_conf", "")
    if "rdzv_endpoint" in parsed:
        if parsed.get("rdzv_backend") != "c10d" or "is_host" in rendezvous_options:
            return
        host, port = split_endpoint(parsed["rdzv_endpoint"])
    elif "master_addr" in parsed and parsed.get("node_rank", "0") != "0":
        host = parsed["master_addr"]
        port = parsed.get("master_port", "29500")
    else:
        return
    match = re.search(r"join_timeout=([0-9]+)", rendezvous_options)
    wait = TimedWait(float(match[1]) if match else DEFAULT_JOIN_SECONDS, "--rdzv-conf=join_timeout=...")
    problem = f"{platform.node()} does not reach the rendezvous endpoint"
    wait_for_port(host, int(port), problem, wait, is_own_host=lambda: find_own_address(host) is not None)


def _parse_options(options: Sequence[str]) -> dict[str, str]:
    """Return the value of each option; dashes in the names of the options become underscores.

    A flag (--standalone) has no value, so its value in the result has no meaning.
    """
    values = {}
    for option, next_word in zip(options, [*options[1:], ""], strict=True):
        if option.startswith("--"):
            name, equals, value = option[2:].partition("=")
            values[name.replace("-", "_")] = value if equals else next_word
    return values


def check_node_counts(words: Sequence[str]) -> int:
    """Plan the run (train.py --dry-run) for the numbers of machines that it may have.

    A problem with the highest number of machines ends the launch. A problem with a lower number is only
    printed: the run can start, but could not continue if it lost so many machines. Of a long range only the
    MAX_PLANS highest numbers are planned.

    Args:
        words: Command line of torchrun.

    Returns:
        Exit code of the plan for the highest number of machines: 0 if the run can start, or if nothing is
        planned because --nproc-per-node is no number; 2 for bad input.
    """
    train_position = words.index(str(TRAIN_SCRIPT))
    parsed = _parse_options(words[1:train_position])
    lowest, _, highest = parsed.get("nnodes", "1").partition(":")
    ranks_per_node = parsed["nproc_per_node"]
    if not all(text.isdecimal() for text in (ranks_per_node, lowest, highest or lowest)):
        return 0  # with `auto`, `cpu`, `gpu` or `xpu` torchrun itself counts the devices
    rank_variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in rank_variables}
    node_counts = range(int(highest or lowest), int(lowest) - 1, -1)
    for num_nodes in node_counts[:MAX_PLANS]:
        world_size = str(num_nodes * int(ranks_per_node))
        command = [sys.executable, *words[train_position:], "--dry-run", "--world-size", world_size]
        plan = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if plan.returncode == 0:
            continue
        problem = _advise_on_all_counts(plan.stderr.strip(), num_nodes, node_counts[:MAX_PLANS])
        if num_nodes == node_counts[0]:
            print(problem, file=sys.stderr, flush=True)
            return plan.returncode
        reason = problem.removeprefix("error: ")
        line = f"with {num_nodes} of {node_counts[0]} machines the run could not continue: {reason}"
        print(line, file=sys.stderr, flush=True)
    return 0


def _advise_on_all_counts(problem: str, num_nodes: int, node_counts: Sequence[int]) -> str:
    """Return the problem of a plan, with a global batch that divides for every number of machines.

    The advice of the plan itself (see `plan_batch`) is only for the number of machines that it planned.

    Args:
        problem: Error of the plan.
        num_nodes: Number of machines of the plan.
        node_counts: All numbers of machines to advise for, highest first.
    """
    match = re.search(r"= (\d+) / (\d+) = \S+, which is not an integer; use a global_batch_size of ", problem)
    if match is None or len(node_counts) == 1:
        return problem
    total = int(match[1])
    # The divisor is proportional to the number of ranks.
    size = math.lcm(*(int(match[2]) * count // num_nodes for count in node_counts))
    counts = f"{node_counts[-1]} to {node_counts[0]}"
    if size > MAX_ADVISED_BATCH_SIZE:
        return f"{problem}; no size divides for each of {counts} machines: give --nnodes a narrower range"
    lower = total // size * size
    near = f"{lower} or {lower + size}" if lower else f"{size}"
    return f"{problem[: match.end()]}{near}, which divides for {counts} machines"


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process with torchrun.

    Returns:
        Exit code if torchrun is not started: 2 for bad input, 1 if the rendezvous endpoint is unreachable.
    """
    return report_errors(lambda: _launch(sys.argv[1:] if argv is None else argv))


def _launch(argv: Sequence[str]) -> int:
    """Check options and recipe, wait for the endpoint, and replace this process with torchrun."""
    words = build_command(argv)
    code = check_node_counts(words)
    if code:
        return code
    try:
        wait_for_endpoint(words)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1  # not 2, because the input is right and the endpoint may be reachable later
    # By default torch keeps the store of the ranks on the machine that had rank 0 in the first attempt. If
    # that machine is lost, the others look for the store there after a restart, and never find it.
    os.execve(words[0], words, os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


if __name__ == "__main__":
    sys.exit(main())
