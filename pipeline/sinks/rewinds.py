"""All that a run did in the order it did it: metrics.jsonl, with what rollbacks moved out of it put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.events import ROLLBACK
from pipeline.sinks.jsonl import iterate_record

Record = dict[str, Any]
Name = tuple[int, ...]
Files = dict[int, list[list[Record]]]


def is_rollback(record: Mapping[str, Any]) -> bool:
    """Whether a line of the record is the event of a rollback."""
    return record.get("event") == ROLLBACK


def replay(path: Path, start_step: int) -> Iterator[Record]:
    """Rows and events of a run that goes on from a step, in the order in which they came about.

    A rollback is preceded by the rows that it gave up. One to `start_step` itself is left out: the checkpoint
    of that step is older than the rollback, so the run does the same again, with the same event. An event
    that is there twice came about so, and counts once.

    Args:
        path: metrics.jsonl, without anything of later steps.

    Raises:
        MetricsFileError: a file cannot be read.
    """
    found = (line for line in iterate_record(path) if is_rollback(line) and line["step"] < start_step)
    return _put_back(iterate_record(path), _given_up(path, found, {}))


def _given_up(path: Path, rollbacks: Iterable[Record], files: Files) -> dict[Name, list[Record]]:
    """What each rollback gave up. The last one first: what it gave up is at the end of its file."""
    unique = {_name(rollback): rollback for rollback in rollbacks}
    return {name: _stretch(path, rollback, files) for name, rollback in reversed(unique.items())}


def _stretch(path: Path, rollback: Record, files: Files) -> list[Record]:
    until = int(rollback["from_step"])
    if until not in files:
        aside = path.with_name(f"{path.stem}-until-step-{until}{path.suffix}")
        files[until] = _stretches(aside) if aside.exists() else []
    records = files[until].pop() if files[until] else []
    return list(_put_back(records, _given_up(path, filter(is_rollback, records), files)))


def _put_back(records: Iterable[Record], given_up: dict[Name, list[Record]]) -> Iterator[Record]:
    for record in records:
        if not is_rollback(record):
            yield record
        elif (stretch := given_up.pop(_name(record), None)) is not None:
            yield from [*stretch, record]


def _stretches(path: Path) -> list[list[Record]]:
    """A file that several rollbacks from one step wrote to, cut where a stretch begins anew."""
    stretches: list[list[Record]] = []
    step, seen = -1, set[str]()
    for record in iterate_record(path):
        keys = set() if "event" in record else record.keys() - {"step"}
        if not stretches or record["step"] < step or (record["step"] == step and keys & seen):
            stretches.append([])
            seen = set()
        elif record["step"] > step:
            seen = set()
        step, seen = record["step"], seen | keys
        stretches[-1].append(record)
    return stretches


def _name(rollback: Record) -> Name:
    """By what two events are of one rollback."""
    return tuple(int(rollback.get(key, -1)) for key in ("step", "from_step", "first_sample", "last_sample"))
