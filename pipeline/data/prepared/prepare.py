"""Documents of a recipe -> tokens in the cache: finds what is missing, has it made, reports it.

Everything is known by its content, so what did not change is there already, whoever made it.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.data_schema import (
    DocumentsConfig,
    SourceConfig,
)
from pipeline.data.documents.part import Part, find_parts, no_text, read_texts
from pipeline.data.documents.records import Tally
from pipeline.data.documents.streams import DigestCache, hash_of
from pipeline.data.prepared.encoder import (
    SAMPLE_DOCUMENTS,
    EncoderSettings,
    is_faithful,
    plain_text_tokenizer,
)
from pipeline.data.prepared.part_files import (
    CHECKED,
    FORMAT_VERSION,
    TokenStore,
    damage_of,
    held_lock,
    is_prepared,
    read_index,
    replace_json,
)
from pipeline.data.prepared.pool import PartTask, PrepareProgress, prepare_here, prepare_in_pool
from pipeline.data.prepared.tokenizer_folder import TokenizerFolder, find_tokenizer
from pipeline.files import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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


SMALL_BYTES = 8_000_000  # tokenised in the time it takes to start workers
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedSource:
    """A source, or an eval set: its documents, tokenised, and what was left out on the way.

    Attributes:
        name: Of the source.
        train: Documents to train on; none for an eval set.
        eval: Documents held out.
        tally: Counts of what is worth reporting, such as `bad records` that were skipped, and the first of
            each.
    """

    name: str
    train: TokenStore
    eval: TokenStore
    tally: Tally


@dataclass(frozen=True)
class Prepared:
    """All documents of a recipe as tokens.

    Attributes:
        tokenizer: Trained on the data, or the pretrained one.
        vocab_size: Ids are below this.
        sources: In the recipe's order.
        eval_sets: All their documents are in `eval`.
        fingerprint: Of the tokens and their order, not of where or when they were prepared.
    """

    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    sources: list[PreparedSource]
    eval_sets: list[PreparedSource]
    fingerprint: str


def prepare_documents(
    config: DocumentsConfig, shard: tuple[int, int] | None = None, verify: bool = False
) -> Prepared:
    """All documents of a recipe as tokens; what is not in the cache is tokenised first.

    Any number of processes may call this at once: each part is made by one of them. On one machine a single
    process at a time works on the same data, with all cores.

    Args:
        config: The recipe's data section.
        shard: (index, count): prepare only every count-th part, and return only those.
        verify: Compare all that is there with its checksums, not only what was touched.

    Raises:
        DataError: a source, a document, the tokenizer or the cache cannot be used; a worker was killed.
    """
    cache_dir = Path(config.cache_dir).expanduser()
    sources = find_sources(config, cache_dir)
    for line in trained_on(sources):
        log.info("%s", line)  # every rank finds it; one shows it
    to_train_on = [part for found in sources if not found.is_eval_set for part in found.parts]
    tokenizer = find_tokenizer(config, to_train_on, cache_dir)
    planned = plan_tasks(config, sources, tokenizer, cache_dir)
    tasks = unique_tasks(planned, shard)
    missing = _missing(tasks, verify)
    if missing:
        _explain(config, tokenizer, cache_dir, len(missing), len(tasks))
        lock = f"{platform.node()}-{hash_of([task.key for task in tasks])}"
        say_once = cache(partial(log.info, "another process prepares this data: waiting for it"))
        with held_lock(cache_dir, lock, say_once):
            still = [task for task in missing if not is_prepared(task.folder)]
            _prepare(still, config, tokenizer)
    prepared = _gather(sources, planned, tasks, tokenizer, complete=shard is None)
    if shard is None:
        replace_json(record_path(config, cache_dir), {"tokenizer": tokenizer.digest})
    _summarise(prepared, cache_dir)
    return prepared


def _missing(tasks: Sequence[PartTask], verify: bool) -> list[PartTask]:
    """Tasks whose part is missing or damaged; damage is logged."""

    def examine(task: PartTask) -> tuple[bool, str | None]:
        there = task.folder.is_dir()
        return there, damage_of(task.folder, verify) if there else None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        results = list(pool.map(examine, tasks))
    missing = []
    for task, (there, damage) in zip(tasks, results, strict=True):
        if damage is not None:
            log.warning("%s is damaged (%s): it is prepared again", task.folder, damage)
            with suppress(OSError):  # whoever looks next reads the content
                (task.folder / CHECKED).unlink(missing_ok=True)
        if not there or damage is not None:
            missing.append(task)
    return missing


def _explain(
    config: DocumentsConfig, tokenizer: TokenizerFolder, cache_dir: Path, missing: int, total: int
) -> None:
    """Why data that was prepared once is prepared again, or how much of it is there."""
    before: Any = None
    with suppress(OSError, ValueError):
        before = json.loads(record_path(config, cache_dir).read_text("utf-8"))
    if isinstance(before, dict) and before.get("tokenizer") not in (None, tokenizer.digest):
        change = "not the one this data was prepared with"
        if config.tokenizer.pretrained is None:
            change = "trained on the data, which changed"
        log.info("the tokenizer is %s: all of it is prepared again", change)
    elif missing < total:
        log.info("%d of %d parts are prepared already", total - missing, total)


def _prepare(tasks: Sequence[PartTask], config: DocumentsConfig, tokenizer: TokenizerFolder) -> None:
    if not tasks:
        return
    cores = _cores()
    size = sum(task.part.size for task in tasks)
    known = all(task.part.size for task in tasks)
    workers = min(config.prepare_workers or (1 if known and size < SMALL_BYTES else cores), len(tasks))
    fast = _choose_fast(config, tokenizer, tasks)
    threads = -(-cores // workers)
    settings = EncoderSettings(
        config=config,
        tokenizer=tokenizer.path,
        end_of_document=tokenizer.tokenizer.eos_token_id,
        vocab_size=tokenizer.vocab_size,
        fast=fast,
        # The standard tokeniser takes a minute for a part: workers without one leave their cores to the rest.
        threads=threads if fast else min(cores, 2 * threads),
    )
    log.info("tokenising %s in %d part%s", format_bytes(size), len(tasks), "s" * (len(tasks) > 1))
    with PrepareProgress(size, len(tasks)) as progress:
        for wait in (False, True):
            if workers == 1:
                tasks = prepare_here(tasks, settings, wait, progress)
            else:
                tasks = prepare_in_pool(tasks, settings, workers, wait, progress)
            if not tasks:
                break
            log.info("another process is at %d more: waiting for it", len(tasks))
    log.info(
        "tokenised %s documents, %s tokens, %s of text in %.1f s: %s",
        f"{progress.documents:,}",
        f"{progress.tokens:,}",
        format_bytes(progress.text_bytes),
        progress.seconds,
        progress.rates(),
    )


def _choose_fast(config: DocumentsConfig, tokenizer: TokenizerFolder, tasks: Sequence[PartTask]) -> bool:
    """Whether gigatoken can take the place of tokenizers: tried on the first documents of parts all over."""
    if config.conversations is not None:
        return False
    chosen = tasks[:: max(1, len(tasks) // 30)]
    each = max(1, SAMPLE_DOCUMENTS // len(chosen))
    sample = (text for task in chosen for _, text in islice(read_texts(task.part, Tally()), each))
    return is_faithful(tokenizer.path, plain_text_tokenizer(tokenizer.path), sample)


def _gather(
    sources: Sequence[FoundSource],
    planned: Sequence[Sequence[PartTask]],
    tasks: Sequence[PartTask],
    tokenizer: TokenizerFolder,
    complete: bool,
) -> Prepared:
    """What is there now.

    Raises:
        DataError: no document of a source has any text.
    """
    keys = {task.key for task in tasks}
    trained: list[PreparedSource] = []
    eval_sets: list[PreparedSource] = []
    content: list[Any] = [tokenizer.digest]
    for found, source_tasks in zip(sources, planned, strict=True):
        source = found.source
        folders = [task.folder for task in source_tasks if task.key in keys]
        train, held_out = TokenStore(folders, "train"), TokenStore(folders, "eval")
        tally = Tally()
        for folder in folders:
            index = read_index(folder) or {}
            tally.add(Tally(index.get("tally", {}), index.get("first", {})))
            content.append([source.name, {name: file["xxh3_128"] for name, file in index["files"].items()}])
        if complete and train.num_documents + held_out.num_documents == 0:
            raise no_text(source, tally)
        prepared = PreparedSource(source.name or "", train, held_out, tally)
        (eval_sets if found.is_eval_set else trained).append(prepared)
    return Prepared(tokenizer.tokenizer, tokenizer.vocab_size, trained, eval_sets, hash_of(content))


def _summarise(prepared: Prepared, cache_dir: Path) -> None:
    for source in (*prepared.sources, *prepared.eval_sets):
        log.info(
            "%s: %s documents, %s tokens; %s documents, %s tokens held out",
            source.name,
            f"{source.train.num_documents:,}",
            f"{source.train.num_tokens:,}",
            f"{source.eval.num_documents:,}",
            f"{source.eval.num_tokens:,}",
        )
        for line in source.tally.lines():
            log.info("%s: %s", source.name, line)
    log.info("prepared data: %s", cache_dir)


def _cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
