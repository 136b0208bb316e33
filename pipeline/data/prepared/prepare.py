"""Tokenises the documents of a recipe into the cache: finds missing parts, prepares them, and reports counts.

Parts are named by the hash of their content and settings, so a run finds unchanged parts in the cache even if
another run prepared them.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from multiprocessing import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.data_schema import DocumentsConfig, SourceConfig
from pipeline.data.documents.part import SourcePart, find_parts, no_text_error
from pipeline.data.documents.records import Tally
from pipeline.data.documents.streams import DigestCache, hash_json
from pipeline.data.prepared.encoder import EncoderSettings
from pipeline.data.prepared.part_files import (
    FORMAT_VERSION,
    INDEX_FILE,
    TokenStore,
    explain_write_errors,
    find_part_damage,
    hold_lock,
    is_prepared,
    read_json_object,
)
from pipeline.data.prepared.pool import PartTask, PrepareProgress, prepare_in_pool, prepare_in_process
from pipeline.data.prepared.tokenizer_folder import TokenizerFolder, find_tokenizer
from pipeline.files import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Part of the key of chat and preference data: increase it when a change alters the ids, the loss mask or the
# tally of a row. Parts of plain text do not depend on it.
CONVERSATIONS_VERSION = 3
# Settings of chat and preference data that decide the ids, the loss mask or the tally.
ENCODING_SETTINGS = {
    *("kind", "layout", "examples", "learn_from", "append_eos"),
    *("too_long", "sequence_length", "answer_length"),
}
SINGLE_PROCESS_BYTES = 8_000_000  # up to this size, tokenising takes no longer than starting workers
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundSource:
    """A source or an evaluation set, with its parts in order.

    Attributes:
        source: Section of the recipe.
        parts: Parts that together contain each document of the source once.
        is_eval_set: Whether this is one of `data.eval_sets`.
    """

    source: SourceConfig
    parts: list[SourcePart]
    is_eval_set: bool


def find_sources(config: DocumentsConfig, cache_dir: Path) -> list[FoundSource]:
    """Return all sources, then all evaluation sets.

    A file is read to compute its digest, unless the digest is in the cache.

    Raises:
        DataError: A source cannot be read, or it is empty.
    """
    digests = DigestCache(cache_dir)
    eval_sets = [source.model_copy(update={"name": name}) for name, source in config.eval_sets.items()]
    found = [FoundSource(source, find_parts(source, digests), False) for source in config.all_sources()]
    return found + [FoundSource(source, find_parts(source, digests), True) for source in eval_sets]


def iter_leakage_warnings(sources: Sequence[FoundSource]) -> Iterator[str]:
    """Yield a warning for each evaluation set that shares files with the training data.

    Files (or the pieces of large files) are compared by content; `inspect` compares single documents.
    """
    digests_by_source = [[piece.digest for part in found.parts for piece in part.pieces] for found in sources]
    train_source_of = {
        digest: found.source.name
        for found, digests in zip(sources, digests_by_source, strict=True)
        if not found.is_eval_set
        for digest in digests
    }
    for found, digests in zip(sources, digests_by_source, strict=True):
        shared = [digest for digest in digests if digest in train_source_of]
        if found.is_eval_set and shared:
            yield (
                f"data.eval_sets.{found.source.name}: {len(shared)} of its {len(digests)} files are also in "
                f"the training source {train_source_of[shared[0]]}, so its loss is not measured on unseen "
                "text; remove them from one of the two"
            )


def plan_tasks(
    config: DocumentsConfig, found: FoundSource, tokenizer: TokenizerFolder, cache_dir: Path
) -> list[PartTask]:
    """Return a task for each part of a source, in order.

    The key of a task is a hash of everything that decides the bytes of its files.
    """
    eval_fraction = 1.0 if found.is_eval_set else config.eval_fraction
    tasks = []
    for part in found.parts:
        identity = {
            "format": FORMAT_VERSION,
            "source": part.digest,
            "tokenizer": tokenizer.digest,
            "eval_fraction": eval_fraction,
            "encoding": _describe_encoding(config, tokenizer),
        }
        tasks.append(PartTask(part, hash_json(identity), eval_fraction, identity, cache_dir))
    return tasks


def _describe_encoding(config: DocumentsConfig, tokenizer: TokenizerFolder) -> dict[str, Any]:
    """Return the settings that decide a document's ids, apart from the record and the tokenizer."""
    if config.conversations is None:
        return {"kind": "text"}
    return {
        "version": CONVERSATIONS_VERSION,
        "chat_template": hash_json(tokenizer.tokenizer.chat_template),
        **config.model_dump(include=ENCODING_SETTINGS),
    }


@dataclass(frozen=True)
class PreparedSource:
    """Tokenised documents of a source or an evaluation set.

    Attributes:
        name: Name of the source.
        train: Documents to train on; empty for an evaluation set.
        eval: Held-out documents.
        tally: Counts of skipped, dropped and changed records by kind, such as `bad records`, with the
            location of the first record of each kind.
    """

    name: str
    train: TokenStore
    eval: TokenStore
    tally: Tally


@dataclass(frozen=True)
class PreparedDocuments:
    """All documents of a recipe as tokens.

    Attributes:
        tokenizer: Tokenizer that was trained on the data, or the pretrained one.
        vocab_size: Upper bound of token ids (exclusive).
        sources: Training sources, in the order of the recipe.
        eval_sets: Sets of `data.eval_sets`, whose documents are all in `eval`.
        fingerprint: Hash of the tokens and their order; the same on every machine and in every run.
    """

    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    sources: list[PreparedSource]
    eval_sets: list[PreparedSource]
    fingerprint: str


def prepare_documents(
    config: DocumentsConfig, shard: tuple[int, int] | None = None, verify: bool = False
) -> PreparedDocuments:
    """Return all documents of a recipe as tokens; tokenise parts that are not in the cache.

    Any number of processes may call this at the same time; one of them prepares each part. On one machine,
    only one process at a time prepares the same data, with all cores, and the others wait.

    Args:
        config: The recipe's data section.
        shard: (index, count): prepare and return only every count-th part, starting with part `index`; `None`
            for all parts.
        verify: Whether to compare the checksums of all existing files, not only of changed ones. Damaged
            parts are prepared again in either case.

    Raises:
        DataError: A source, a document, the tokenizer or the cache cannot be used, or a worker was killed.
        ConfigError: A document is too long and `data.too_long` is `error`, or the chat template cannot be
            used.
    """
    cache_dir = Path(config.cache_dir).expanduser()
    sources = find_sources(config, cache_dir)
    for line in iter_leakage_warnings(sources):
        log.info("%s", line)  # every rank logs it, and one rank's console shows it
    train_parts = [part for found in sources if not found.is_eval_set for part in found.parts]
    tokenizer = find_tokenizer(config, train_parts, cache_dir)
    tasks_by_source = [plan_tasks(config, found, tokenizer, cache_dir) for found in sources]
    unique = list({task.key: task for source in tasks_by_source for task in source}.values())
    tasks = unique if shard is None else unique[shard[0] :: shard[1]]
    missing = _find_missing(tasks, verify)
    if missing:
        if len(missing) < len(tasks):
            log.info("%d of %d parts are prepared already", len(tasks) - len(missing), len(tasks))
        lock_name = f"{platform.node()}-{hash_json([task.key for task in tasks])}"

        def describe_wait() -> str:
            num_finished = sum(task.folder.is_dir() for task in tasks)
            return f"waiting for another process, which has prepared {num_finished} of {len(tasks)} parts"

        with hold_lock(cache_dir, lock_name, describe_wait):
            still_missing = [task for task in missing if not is_prepared(task.folder)]
            _prepare_missing(still_missing, config, tokenizer)
    prepared = _collect_parts(sources, tasks_by_source, tasks, tokenizer, complete=shard is None)
    _log_summary(prepared)
    if missing:
        log.info("prepared data: %s", cache_dir)
    return prepared


def _find_missing(tasks: Sequence[PartTask], verify: bool) -> list[PartTask]:
    """Return the tasks whose part is missing or damaged. Log each damaged part, and remove its index."""

    def is_missing(task: PartTask) -> bool:
        if not task.folder.is_dir():
            return True
        damage = find_part_damage(task.folder, verify)
        if damage is not None:
            log.warning("%s is damaged (%s): it is prepared again", task.folder, damage)
            with explain_write_errors(task.cache_dir, "a damaged part"):
                (task.folder / INDEX_FILE).unlink(missing_ok=True)
        return damage is not None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(compress(tasks, pool.map(is_missing, tasks)))


def _prepare_missing(tasks: Sequence[PartTask], config: DocumentsConfig, tokenizer: TokenizerFolder) -> None:
    """Prepare parts, and wait for those that another machine is preparing at the same time."""
    if not tasks:
        return
    cores = _count_cores()
    workers = _choose_num_workers(tasks, config, cores)
    settings = EncoderSettings(
        config=config,
        tokenizer=tokenizer.path,
        end_of_document=tokenizer.tokenizer.eos_token_id,
        vocab_size=tokenizer.vocab_size,
        # With fewer workers than cores, each worker gets several threads, so that large parts do not take a
        # minute each.
        threads=min(cores, 2 * -(-cores // workers)),
    )
    size = sum(task.part.size for task in tasks)
    log.info("tokenising %s in %d part%s", format_bytes(size), len(tasks), "s" * (len(tasks) > 1))
    progress = PrepareProgress(len(tasks))
    # First skip the parts that another machine is preparing at the same time, then wait for them.
    for wait in (False, True):
        if workers == 1:
            tasks = prepare_in_process(tasks, settings, wait, progress)
        else:
            tasks = prepare_in_pool(tasks, settings, workers, wait, progress)
        if not tasks:
            break
        log.info("waiting for another process, which is preparing %d more parts", len(tasks))
    log.info("tokenised %s", progress)


def _choose_num_workers(tasks: Sequence[PartTask], config: DocumentsConfig, cores: int) -> int:
    """Return `data.prepare_workers` or a number that suits the size of the data; at most one per part."""
    # multiprocessing lets a daemon, such as a rank in a caller's pool, start no processes.
    if current_process().daemon:
        return 1
    is_size_known = all(task.part.size for task in tasks)
    is_small = is_size_known and sum(task.part.size for task in tasks) < SINGLE_PROCESS_BYTES
    default = 1 if is_small else cores
    return min(config.prepare_workers or default, len(tasks))


def _collect_parts(
    sources: Sequence[FoundSource],
    tasks_by_source: Sequence[Sequence[PartTask]],
    tasks: Sequence[PartTask],
    tokenizer: TokenizerFolder,
    complete: bool,
) -> PreparedDocuments:
    """Collect the prepared parts of all sources.

    Args:
        sources: Sources and evaluation sets.
        tasks_by_source: Tasks of all parts, for each of `sources`.
        tasks: Tasks of the parts to return.
        tokenizer: Tokenizer of the recipe.
        complete: Whether `tasks` has all parts, so that every source must have a document.

    Raises:
        DataError: A source has no document that can be used.
    """
    keys = {task.key for task in tasks}
    train_sources: list[PreparedSource] = []
    eval_sets: list[PreparedSource] = []
    fingerprint_content: list[Any] = [tokenizer.digest]
    for found, source_tasks in zip(sources, tasks_by_source, strict=True):
        source = found.source
        folders = [task.folder for task in source_tasks if task.key in keys]
        train = TokenStore(folders, "train")
        held_out = TokenStore(folders, "eval")
        tally = Tally()
        for folder in folders:
            index = read_json_object(folder / INDEX_FILE) or {}
            tally.add(Tally(index.get("tally", {}), index.get("first", {})))
            checksums = {name: file["xxh3_128"] for name, file in index["files"].items()}
            fingerprint_content.append([source.name, checksums])
        if complete and train.num_documents + held_out.num_documents == 0:
            raise no_text_error(source, tally)
        prepared = PreparedSource(source.name or "", train, held_out, tally)
        (eval_sets if found.is_eval_set else train_sources).append(prepared)
    return PreparedDocuments(
        tokenizer=tokenizer.tokenizer,
        vocab_size=tokenizer.vocab_size,
        sources=train_sources,
        eval_sets=eval_sets,
        fingerprint=hash_json(fingerprint_content),
    )


def _log_summary(prepared: PreparedDocuments) -> None:
    for source in (*prepared.sources, *prepared.eval_sets):
        train = f"{source.train.num_documents:,} documents, {source.train.num_tokens:,} tokens"
        held_out = f"{source.eval.num_documents:,} documents, {source.eval.num_tokens:,} tokens"
        log.info("%s: %s; %s held out", source.name, train, held_out)
        for line in source.tally.format_lines():
            log.info("%s: %s", source.name, line)


def _count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
