"""Which worker of pytest-xdist runs what."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling


class Scheduling(LoadScopeScheduling):
    """A file's tests to one worker; those of nodes, which there is one set of, to one too."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "nodes" if file.startswith("tests/multinode/") else file
