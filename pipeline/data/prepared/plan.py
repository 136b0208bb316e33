"""What a recipe's documents become: the parts of every source, and the name each has once it is prepared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.data_schema import DocumentsConfig, SourceConfig
from pipeline.data.documents.digests import DigestCache, hash_of
from pipeline.data.documents.part import Part, find_parts
from pipeline.data.prepared.part_files import FORMAT_VERSION, is_prepared
from pipeline.data.prepared.parts import PartTask
from pipeline.data.prepared.tokenizer_folder import TokenizerFolder


@dataclass(frozen=True)
class FoundSource:
    """A source or an eval set, and its parts in order."""

    source: SourceConfig
    parts: list[Part]
    is_eval_set: bool


def find_sources(config: DocumentsConfig, cache_dir: Path) -> list[FoundSource]:
    """Every source, then every eval set. Files that are known are not read.

    Raises:
        DataError: a source cannot be read, or there is nothing in it.
    """
    digests = DigestCache(cache_dir)
    found = [FoundSource(source, find_parts(source, digests), False) for source in config.all_sources()]
    for name, given in config.eval_sets.items():
        source = given.model_copy(update={"name": name})
        found.append(FoundSource(source, find_parts(source, digests), True))
    return found


def trained_on(sources: Sequence[FoundSource]) -> Iterator[str]:
    """A line for each eval set whose files are training data too: they are trained on nevertheless.

    Whole files (or pieces of large ones) are compared by content; single documents, `inspect` compares.
    """
    trained = {
        piece.digest: found.source.name
        for found in sources
        if not found.is_eval_set
        for part in found.parts
        for piece in part.pieces
    }
    for found in sources:
        pieces = [piece.digest for part in found.parts for piece in part.pieces]
        shared = [digest for digest in pieces if digest in trained]
        if found.is_eval_set and shared:
            yield (
                f"data.eval_sets.{found.source.name}: {len(shared)} of its {len(pieces)} files are also in "
                f"{trained[shared[0]]} and trained on, so its loss is not that of unseen text; take them out "
                "of one of the two"
            )


def plan_tasks(
    config: DocumentsConfig,
    sources: Sequence[FoundSource],
    tokenizer: TokenizerFolder,
    cache_dir: Path,
) -> list[list[PartTask]]:
    """The tasks of each source, in order. Every part is named by all that decides its bytes."""
    encoding = _describe_encoding(config, tokenizer)

    def task_of(part: Part, eval_fraction: float, digest: str) -> PartTask:
        identity = {
            "format": FORMAT_VERSION,
            "source": digest,
            "tokenizer": tokenizer.digest,
            "eval_fraction": eval_fraction,
            "encoding": encoding,
        }
        return PartTask(part, hash_of(identity), eval_fraction, identity, cache_dir)

    def choose(part: Part, eval_fraction: float) -> PartTask:
        task = task_of(part, eval_fraction, part.digest)
        if part.skip_bad_records and not task.folder.is_dir():
            other = task_of(part, eval_fraction, part.digest_without_skips)
            if is_prepared(other.folder):
                return other
        return task

    planned = []
    for found in sources:
        eval_fraction = 1.0 if found.is_eval_set else config.eval_fraction
        planned.append([choose(part, eval_fraction) for part in found.parts])
    return planned


# Part of the key of chat and preference data: raise it when a row would get other ids, another loss mask, or
# another entry in the tally. Text, which has no such entry, keeps its parts then.
CONVERSATIONS_VERSION = 2


def _describe_encoding(config: DocumentsConfig, tokenizer: TokenizerFolder) -> dict[str, Any]:
    """What decides a document's ids besides its record and the tokenizer."""
    if (preferences := config.preferences) is not None:
        return {
            "kind": "preference",
            "version": CONVERSATIONS_VERSION,
            "layout": preferences.layout,
            "unpaired": preferences.is_unpaired,
            "too_long": preferences.too_long,
            "sequence_length": preferences.sequence_length,
            "chat_template": hash_of(tokenizer.tokenizer.chat_template),
            **({} if preferences.answer_length is None else {"answer_length": preferences.answer_length}),
            **({} if preferences.append_eos else {"append_eos": False}),
            **({} if preferences.learn_from == "assistant" else {"learn_from": preferences.learn_from}),
        }
    if (chat := config.chat) is None:
        return {"kind": "text"}
    return {
        "kind": "chat",
        "version": CONVERSATIONS_VERSION,
        "layout": chat.layout,
        "learn_from": chat.learn_from,
        "too_long": chat.too_long,
        "sequence_length": chat.sequence_length,
        "chat_template": hash_of(tokenizer.tokenizer.chat_template),
        **({} if chat.append_eos else {"append_eos": False}),
    }


def unique_tasks(planned: list[list[PartTask]], shard: tuple[int, int] | None) -> list[PartTask]:
    """Every part once, in order; of a shard (index, count) every count-th."""
    tasks = list({task.key: task for tasks in planned for task in tasks}.values())
    return tasks if shard is None else tasks[shard[0] :: shard[1]]


def record_path(config: DocumentsConfig, cache_dir: Path) -> Path:
    """The file that notes with which tokenizer these sources were last prepared."""
    sources = [
        source.model_dump(mode="json") for source in (*config.all_sources(), *config.eval_sets.values())
    ]
    return cache_dir / "sets" / f"{hash_of(sources)}.json"
