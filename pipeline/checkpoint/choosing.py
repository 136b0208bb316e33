"""Which checkpoint a run goes on from: the newest that every machine finds whole, byte by byte."""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path

import xxhash

from pipeline.checkpoint.folders import bring_back, folder_name, manifest_of, named_in, steps_in
from pipeline.checkpoint.manifest import MANIFEST, Manifest
from pipeline.checkpoint.peers import Peers
from pipeline.checkpoint.saving import first
from pipeline.checkpoint.verify import check_content, look
from pipeline.errors import CheckpointError

LONG = 2e9  # bytes that take some seconds to read
log = logging.getLogger(__name__)


def newest_whole(folder: Path, peers: Peers) -> tuple[Manifest | None, set[int]]:
    """The newest checkpoint that verifies on all machines, and the steps passed over. Collective.

    Each that is passed over is one line that says why.

    Returns:
        No manifest: there is no checkpoint, but maybe a link or a folder without a manifest.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole.
    """
    peers.attempt(lambda: bring_back(folder))  # where it cannot, that is one checkpoint less
    steps = peers.gather(list(named_in(folder)) if peers.is_leader else [])
    passed_over: dict[int, str] = {}
    for step in sorted(set(itertools.chain(*steps)), reverse=True):
        answer = _examine(folder / folder_name(step), peers)
        if isinstance(answer, Manifest):
            return answer, set(passed_over)
        log.warning("%s", answer)
        passed_over[step] = answer
    if any(peers.gather(bool(steps_in(folder)))):
        raise CheckpointError(
            f"{folder} holds no whole checkpoint; the newest: {next(iter(passed_over.values()))}; "
            "bring back what is missing, or start a new run with checkpoint.resume=never"
        )
    return None, set()


def _examine(path: Path, peers: Peers) -> Manifest | str:
    """A checkpoint's manifest once every byte of it is verified, by all ranks together; else why not."""
    manifest = None
    problem, checksum, here = None, "", list[str]()
    try:
        manifest = manifest_of(path)
        _ = manifest.table
        checksum = xxhash.xxh3_128_hexdigest((path / MANIFEST).read_bytes())
        if peers.is_leader:  # one on each file system: a thousand ranks would look for a thousand files each
            damages, absent = look(path, manifest)
            problem = f"on {peers.host}: {damages[0]}" if damages else None
            here = [file.name for file in manifest.files if file.name not in absent]
    except (CheckpointError, OSError) as error:
        problem = f"on {peers.host}: {error}"
    said = peers.gather((problem, checksum, here))
    here = said[peers.leader][2]
    problem = first(wrong for wrong, _, _ in said)
    if problem is not None or manifest is None:
        return f"{path.name} is passed over: {problem}"
    if len({checksum for _, checksum, _ in said}) > 1:
        return f"{path.name} is passed over: it is not the same checkpoint on all machines"
    there = set(itertools.chain(*(names for _, _, names in said)))
    for file in manifest.files:
        if file.name not in there:
            return f"{path.name} is passed over: no machine has {file.name}, written on {file.host}"
    if manifest.num_bytes > LONG:
        log.info("verifying %s, %.1f GB", path.name, manifest.num_bytes / 1e9)
    neighbours = peers.neighbours
    mine = here[neighbours.index(peers.rank) :: len(neighbours)]
    began = time.perf_counter()
    found = peers.gather([str(damage) for damage in check_content(path, manifest, mine)])
    if (damage := next(itertools.chain(*found), None)) is not None:
        return f"{path.name} is passed over: {damage}"
    log.info("%s: every byte read and compared in %.1f s", path.name, time.perf_counter() - began)
    return manifest
