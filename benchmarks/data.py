"""Compares tokenizing text and loading tokens, side by side: `python benchmarks/data.py`.

It takes about ten minutes on two cores, and measures in this order:

1. preparing data against the bare tokeniser with all texts in memory;
2. the loader against nanoGPT's, and against `datasets` with torch's DataLoader (data_loader.py);
3. the time for which the default run waits for data.

The texts are every Python file of this interpreter and its packages, each once, so that the tokeniser's cache
cannot profit from repeated text. Preparing starts from files and an empty cache: it finds, hashes, reads,
tokenises, checks, writes and syncs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from report import machine, new_console, print_table, write_json
from workload import REPOSITORY

VOCAB_SIZE = 32_000
TRAINING_CHARACTERS = 30_000_000  # most characters to train the tokenizer on, which takes about 10 s
RAW = "tokenizers, texts in memory"
PREPARATIONS = ["prepare, jsonl", "prepare, text"]
WAIT_STEPS = 20  # steps of the default run


def python_texts() -> Iterator[str]:
    """Yield the text of each different Python file, in a shuffled order that is always the same."""
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


def first_texts(texts: Iterable[str], megabytes: float) -> list[str]:
    """Return the first texts that together have at least so many megabytes."""
    first = []
    size = 0
    for text in texts:
        first.append(text)
        size += len(text.encode())
        if size >= megabytes * 1e6:
            break
    return first


def megabytes_of(texts: list[str]) -> float:
    """Return the size of the texts in UTF-8, in MB."""
    return sum(len(text.encode()) for text in texts) / 1e6


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """Write a line of JSON for each text."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    return path


def raw_seconds(tokenizer: Path, texts: list[str]) -> float:
    """Return the seconds in which the bare tokeniser encodes all texts in one call.

    A new tokenizer has an empty cache, as in a preparation.
    """
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(tokenizer))
    start = time.perf_counter()
    core.encode_batch_fast(texts, add_special_tokens=False)
    return time.perf_counter() - start


def prepare_seconds(source: Path, tokenizer: Path, cache: Path) -> tuple[float, int]:
    """Return the seconds of a preparation with an empty cache, and the number of tokens."""
    from pipeline.config.data_schema import TextDataConfig
    from pipeline.data.prepared import prepare_documents

    config = TextDataConfig(
        kind="text",
        paths=[str(source)],
        tokenizer={"pretrained": str(tokenizer)},  # type: ignore[arg-type]
        cache_dir=str(cache),
    )
    start = time.perf_counter()
    (prepared,) = prepare_documents(config).sources
    seconds = time.perf_counter() - start
    tokens = prepared.train.num_tokens + prepared.eval.num_tokens
    shutil.rmtree(cache)
    return seconds, tokens


def measure_prepare(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return MB of text per second of each participant, one number per round.

    The bare tokeniser runs first and last in each round, so that a machine that slows down slows it too.
    """
    from pipeline.data.tokenizer import train_tokenizer

    texts = first_texts(python_texts(), arguments.megabytes)
    jsonl = write_jsonl(folder / "all.jsonl", texts)
    files = folder / "files"
    files.mkdir()
    for number, text in enumerate(texts):
        (files / f"{number:06}.py").write_bytes(text.encode())  # bytes, so that line ends are not translated
    ends = accumulate(len(text) for text in texts)
    training_texts = [text for text, end in zip(texts, ends, strict=True) if end <= TRAINING_CHARACTERS]
    tokenizer = folder / "bpe.json"
    cache = folder / "cache"
    tokenizer.write_text(train_tokenizer(training_texts, VOCAB_SIZE).backend_tokenizer.to_str(), "utf-8")
    # A warm-up imports the modules and reads the files into the page cache.
    prepare_seconds(jsonl, tokenizer, cache)
    speeds: dict[str, list[float]] = {name: [] for name in (RAW, *PREPARATIONS)}
    for turn in range(arguments.prepare_rounds):
        first = raw_seconds(tokenizer, texts)
        counts = set()
        for name in PREPARATIONS[:: 1 if turn % 2 == 0 else -1]:
            source = jsonl if name.endswith("jsonl") else files
            seconds, tokens = prepare_seconds(source, tokenizer, cache)
            counts.add(tokens)
            speeds[name].append(megabytes_of(texts) / seconds)
        assert len(counts) == 1, f"the formats gave different numbers of tokens: {counts}"
        speeds[RAW].append(2 * megabytes_of(texts) / (first + raw_seconds(tokenizer, texts)))
    return speeds


def measure_wait(folder: Path) -> dict[str, float]:
    """Return median seconds of a step of the default run, and of its wait for data, without the first row.

    Raises:
        RuntimeError: The run failed.
    """
    words = [f"runs_dir={folder}", "name=wait", f"max_steps={WAIT_STEPS}", "log.every=5"]
    words += ["eval.max_samples=8", "wandb.mode=disabled", "sample.max_new_tokens=0"]
    command = [sys.executable, "launch/train.py", "--deepspeed", "ds_configs/zero2.json", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}\n{done.stderr}")
    (metrics,) = folder.glob("wait-*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "perf/step_time_seconds" in row][1:]
    return {
        "step_seconds": median(row["perf/step_time_seconds"] for row in steps),
        "wait_seconds": median(row["perf/data_time_seconds"] for row in steps),
    }


def main() -> None:
    """Run the chosen measurements, and print and write their results."""
    arguments = parse_arguments()
    console = new_console()
    about = machine()
    logging.getLogger("pipeline").setLevel(logging.WARNING)
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    results: dict[str, Any] = {"machine": about, "command": sys.argv[1:]}
    if arguments.prepare_rounds:
        with tempfile.TemporaryDirectory(prefix="data-prepare-", dir=arguments.folder) as folder:
            speeds = measure_prepare(arguments, Path(folder))
        results["prepare_megabytes_per_second"] = speeds
        lines = [
            [name, f"{median(rounds):.2f}", f"{median(map(truediv, rounds, speeds[RAW])):.2f}"]
            for name, rounds in speeds.items()
        ]
        title = f"text into tokens: {arguments.megabytes:g} MB of Python"
        print_table(console, title, ["participant", "MB/s", f"over {RAW}"], lines)
    if arguments.loader_rounds:
        # Imported only now: data_loader needs torch, which the tokenising processes would import too.
        import data_loader

        with tempfile.TemporaryDirectory(prefix="data-loader-", dir=arguments.folder) as folder:
            rates = data_loader.measure(Path(folder), arguments.loader_megabytes, arguments.loader_rounds)
        results["loader_tokens_per_second"] = rates
        data_loader.print_rates(console, rates)
    if arguments.wait:
        with tempfile.TemporaryDirectory(prefix="data-wait-", dir=arguments.folder) as folder:
            medians = measure_wait(Path(folder))
        results["default_run"] = medians
        share = medians["wait_seconds"] / medians["step_seconds"]
        print(f"the default run waits for data {share:.2%} of a step's time")
    write_json(arguments.output, results)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--megabytes", type=float, default=66, help="size of the text to prepare, in MB")
    add("--prepare-rounds", type=int, default=2, help="rounds of preparing; 0 skips it")
    add("--loader-rounds", type=int, default=7, help="rounds of loading; 0 skips it")
    add("--loader-megabytes", type=int, default=200, help="size of the tokens to load, in MB")
    add(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure for how long the default run waits for data",
    )
    add("--folder", type=Path, help="folder for texts and caches; default: the system's temporary folder")
    add("--output", type=Path, help="JSON file for all numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
