"""How many files this process may open: as many as the system lets it, and a word where that is too few."""

from __future__ import annotations

import logging
import resource

MOST = 1 << 20  # beyond, programs that walk through all numbers of files take seconds
ALONE = 400  # libraries, the data's maps, batches from workers, the files of a checkpoint
PER_RANK = 5  # connections of gloo's and NCCL's groups to each other rank
log = logging.getLogger(__name__)


def raise_open_files_limit(world_size: int = 1, is_told: bool = True) -> None:
    """Raises the soft limit to the hard one; children inherit it. Warns beforehand where that is too few.

    Args:
        is_told: Whether this is the rank that warns.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):  # some systems say a hard limit that they do not give
            hard = soft
    needed = ALONE + PER_RANK * world_size
    if is_told and hard != resource.RLIM_INFINITY and hard < needed:
        log.warning(
            "a process may open %d files here, and one of %d ranks opens about %d: raise the hard limit "
            "(ulimit -Hn; nofile in limits.conf, LimitNOFILE in systemd, --ulimit nofile in Docker)",
            hard,
            world_size,
            needed,
        )
