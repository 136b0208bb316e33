"""The torchrun agent above this rank, as launch/torchrun.sh tells of it: whether its machine can leave a job
that the others go on with. Imports no torch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

AGENT = "PIPELINE_AGENT"
"""Set by launch/torchrun.sh: the agent's process number, MIN of --nnodes, 1 where the store is its own."""


@dataclass(frozen=True)
class Agent:
    """Of one machine, in a job of several."""

    number: int
    """The same for all ranks of the machine, and for no other's."""
    least: int
    """Machines that the job goes on with."""
    is_endpoint: bool
    """Whether all machines meet in a store of its own."""
    restarts_left: int

    def leave(self) -> None:
        """Ends it, and so its ranks: the others stop and meet without it. One rank of a machine calls it.

        Any other end of a rank would have it start the ranks again, or close the meeting for all.
        """
        os.kill(os.getppid(), signal.SIGTERM)


def read_agent(environment: Mapping[str, str]) -> Agent | None:
    """This rank's; None: launch/torchrun.sh did not start it."""
    pid, _, rest = environment.get(AGENT, "").partition(":")
    least, _, is_endpoint = rest.partition(":")
    if pid != str(os.getppid()) or "GROUP_RANK" not in environment:
        return None
    restarts = int(environment["TORCHELASTIC_MAX_RESTARTS"]) - int(environment["TORCHELASTIC_RESTART_COUNT"])
    return Agent(int(environment["GROUP_RANK"]), int(least), is_endpoint == "1", restarts)


def why_none_leaves(agents: Sequence[Agent | None], leaving: Collection[int]) -> str | None:
    """What has to change before the machines of these ranks could leave; None: they can.

    Args:
        agents: Of all ranks.
    """
    known = [each for each in agents if each is not None]
    if len(known) < len(agents):
        return "a machine leaves what launch/torchrun.sh --nnodes MIN:MAX has started"
    gone = {known[rank].number for rank in leaving}
    stays = {each.number: each for each in known if each.number not in gone}
    if not stays:
        return "no machine would be left"
    if len(stays) < known[0].least:
        return f"--nnodes has a MIN of {known[0].least}, and {len(stays)} would be left: lower it"
    if any(each.restarts_left < 1 for each in stays.values()):
        return "no restart is left: raise --max-restarts"
    if any(each.is_endpoint and each.number in gone for each in known):
        return "all meet on its machine: give --rdzv-endpoint another one"
    return None
