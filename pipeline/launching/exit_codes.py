"""The exit code of a run, by what its ranks said of their ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.errors import DeviceFailedError, DeviceMemoryError

HUNG, BAD_INPUT = 124, 2
OUT_OF_MEMORY, DEVICE_FAILED = DeviceMemoryError.exit_code, DeviceFailedError.exit_code  # ENOMEM, EFAULT
SIGTERM = 143
STOPS = {129, 130, 138, SIGTERM}  # with a checkpoint, by a closed terminal, Ctrl-C, SIGUSR1, SIGTERM

ExitRecords = Mapping[int, Mapping[str, int]]
"""Rank -> its `code` and the `world_size` it knew of; a rank that was killed said nothing."""


def ranks_without_exit_code(records: ExitRecords, ranks: Iterable[int]) -> list[int]:
    """The ranks that said nothing, of those that were to run; `ranks` empty: of those the records tell of."""
    known = range(max((record["world_size"] for record in records.values()), default=0))
    return [rank for rank in list(ranks) or known if rank not in records]


def exit_code(records: ExitRecords, ranks: Iterable[int], launcher: int) -> int:
    """0 only where every rank has said so; their common code; a hang, the device's end or bad input whatever
    came of it; else the launcher's.

    Args:
        ranks: Those that were to run; empty where only the launcher knew.
        launcher: Its exit code; negative: the signal that killed it.
    """
    codes = {record["code"] for record in records.values()}
    launched = launcher if launcher >= 0 else 128 - launcher
    if codes <= STOPS and len(codes) == 2:
        codes -= {SIGTERM}  # the launcher's, for ranks that were just leaving
    if len(codes) == 1 and not ranks_without_exit_code(records, ranks):
        # Finished, and then the launcher was ended: nothing was lost.
        return codes.pop() or max(launcher, 0)
    for code in (HUNG, OUT_OF_MEMORY, DEVICE_FAILED, BAD_INPUT):
        if code in codes:
            return code
    return launched or max(codes | {1})
