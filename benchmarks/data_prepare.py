"""Text into tokens on disk, against the bare tokeniser with all texts in memory; part of benchmarks/data.py.

The texts are every Python file of this interpreter and its packages, each once: nothing is repeated that a
tokeniser's cache could know from before. `tokenizers` encode_batch_fast takes them in one call, on all cores.
The preparation starts from files and an empty cache: finds, hashes, reads, tokenises, checks, writes, syncs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

VOCAB_SIZE = 32_000
TRAINING_CHARACTERS = 30_000_000  # of text for the tokenizer; about 10 s
ROW_GROUP = 500  # rows
RAW = "tokenizers, texts in memory"
STANDARD = "prepare, tokenizers, parquet"
FAST = "prepare, gigatoken, "
TARGETS = {"standard": 0.9, "fast": 10.0}  # over encode_batch_fast


@dataclass(frozen=True)
class Corpus:
    """The same texts in memory, and in files of several formats.

    Attributes:
        texts: A file each.
        few: The first of `texts`: as many as the standard tokeniser is measured on.
        files: By format; `few` holds those alone, as parquet.
        tokenizer: A BPE trained on a part of the texts.
    """

    texts: list[str]
    few: list[str]
    files: dict[str, Path]
    tokenizer: Path


def python_texts() -> Iterator[str]:
    """The text of Python files, in a shuffled order that is the same each time; equal ones once."""
    roots = sorted({sysconfig.get_path(name) for name in ("stdlib", "purelib")})
    paths = sorted({path for root in roots for path in Path(root).rglob("*.py")})
    random.Random(0).shuffle(paths)
    seen: set[bytes] = set()
    for path in paths:
        try:
            text = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield text


def take(texts: Sequence[str] | Iterator[str], megabytes: float) -> list[str]:
    """The first texts, until they are so large."""
    taken, size = [], 0
    for text in texts:
        taken.append(text)
        size += len(text.encode())
        if size >= megabytes * 1e6:
            break
    return taken


def megabytes_of(texts: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def write_corpus(arguments: argparse.Namespace, folder: Path) -> Corpus:
    """Writes the files and trains the tokenizer."""
    from pipeline.data.tokenizer import train_tokenizer

    texts = take(python_texts(), arguments.megabytes)
    few = take(texts, arguments.standard_megabytes)
    files = {name: folder / f"corpus.{name}" for name in ("parquet", "jsonl", "text")}
    files["few"] = folder / "few.parquet"
    write_parquet(files["parquet"], texts)
    write_parquet(files["few"], few)
    with files["jsonl"].open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    files["text"].mkdir()
    for number, text in enumerate(texts):
        # No line ends are translated: the same bytes as in memory.
        (files["text"] / f"{number:06}.py").write_bytes(text.encode())
    lengths = accumulate(len(text) for text in texts)
    learned = [text for text, end in zip(texts, lengths, strict=True) if end <= TRAINING_CHARACTERS]
    tokenizer = folder / "bpe.json"
    tokenizer.write_text(train_tokenizer(learned, VOCAB_SIZE).backend_tokenizer.to_str(), "utf-8")
    return Corpus(texts, few, files, tokenizer)


def write_parquet(path: Path, texts: list[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts}), path, row_group_size=ROW_GROUP)


def raw_seconds(corpus: Corpus) -> float:
    """Of one call for the few texts; a new tokenizer, so that its cache is empty, as in a preparation."""
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(corpus.tokenizer))
    begin = time.perf_counter()
    encodings = core.encode_batch_fast(corpus.few, add_special_tokens=False)
    seconds = time.perf_counter() - begin
    assert len(encodings) == len(corpus.few)
    return seconds


def prepare_seconds(corpus: Corpus, source: str, cache: Path) -> tuple[float, int]:
    """Seconds from the call to the return, with nothing in the cache before, and tokens."""
    from pipeline.config.data_schema import TextDataConfig
    from pipeline.data.prepared import prepare_documents

    config = TextDataConfig(
        kind="text",
        paths=[str(corpus.files[source])],
        tokenizer={"pretrained": str(corpus.tokenizer)},  # type: ignore[arg-type]
        cache_dir=str(cache),
    )
    begin = time.perf_counter()
    (prepared,) = prepare_documents(config).sources
    seconds = time.perf_counter() - begin
    tokens = prepared.train.num_tokens + prepared.eval.num_tokens
    shutil.rmtree(cache)
    return seconds, tokens


@contextmanager
def without_gigatoken() -> Iterator[None]:
    """As where it is not installed."""
    before = sys.modules.get("gigatoken")
    sys.modules["gigatoken"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["gigatoken"]
        if before is not None:
            sys.modules["gigatoken"] = before


def measure_prepare(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """MB of text a second of each participant, a number a round. The bare tokeniser goes first and last:
    a machine that slows down meanwhile slows both.
    """
    corpus = write_corpus(arguments, folder)
    few, all_of_it = megabytes_of(corpus.few), megabytes_of(corpus.texts)
    counts: dict[str, int] = {}

    def standard() -> float:
        with without_gigatoken():
            seconds, _ = prepare_seconds(corpus, "few", folder / "cache")
        return few / seconds

    def fast(source: str) -> Callable[[], float]:
        def measure() -> float:
            seconds, counts[source] = prepare_seconds(corpus, source, folder / "cache")
            return all_of_it / seconds

        return measure

    participants = {STANDARD: standard}
    participants |= {FAST + source: fast(source) for source in ("parquet", "jsonl", "text")}
    prepare_seconds(corpus, "few", folder / "cache")  # imports, and files into the page cache
    found: dict[str, list[float]] = {name: [] for name in (RAW, *participants)}
    for turn in range(arguments.prepare_rounds):
        first = raw_seconds(corpus)
        for name in list(participants)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(participants[name]())
        found[RAW].append(2 * few / (first + raw_seconds(corpus)))
    assert len(set(counts.values())) == 1, f"not the same tokens from every format: {counts}"
    return found


def ratios(speeds: dict[str, list[float]], name: str) -> list[float]:
    """Over the bare tokeniser, round by round."""
    return [ours / raw for ours, raw in zip(speeds[name], speeds[RAW], strict=True)]


def target_of(name: str) -> float:
    return TARGETS["standard" if name == STANDARD else "fast"]


def print_prepare(console: Console, speeds: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    table = Table(
        title=f"text into tokens: {arguments.megabytes:g} MB of Python, "
        f"{arguments.standard_megabytes:g} MB with tokenizers; BPE of {VOCAB_SIZE:,}"
    )
    for column in ("participant", "MB/s", "it / tokenizers  (min-max)", "wanted"):
        table.add_column(column, justify="left" if column == "participant" else "right", no_wrap=True)
    for name, rounds in speeds.items():
        each = ratios(speeds, name)
        cells = ["", ""]
        if name != RAW:
            cells = [f"{median(each):.2f}  ({min(each):.2f}-{max(each):.2f})", f">= {target_of(name):g}"]
        table.add_row(name, f"{median(rounds):.2f}", *cells)
    console.print(table)


def missed_prepare(speeds: dict[str, list[float]]) -> list[str]:
    """What was wanted and not reached, by the median of the rounds."""
    found: dict[str, Any] = {name: median(ratios(speeds, name)) for name in speeds if name != RAW}
    return [
        f"{name}: {ratio:.3g} times tokenizers, wanted {target_of(name):g}"
        for name, ratio in found.items()
        if ratio < target_of(name)
    ]
