"""Fixtures: a small corpus of several parts, a tokenizer for it, and a data section that reads it."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from pipeline.config.data_schema import TextDataConfig
from pipeline.data.tokenizer import train_tokenizer

STDLIB = Path(sysconfig.get_path("stdlib"))


def stdlib_texts(pattern: str, characters: int) -> list[str]:
    """Return pieces of the standard library's modules, 200 to 2,000 characters each.

    Args:
        pattern: Glob of the modules' file names.
        characters: About so many characters in all.
    """
    texts = []
    for path in sorted(STDLIB.glob(pattern)):
        text = path.read_text("utf-8")
        while text and characters > 0:
            size = 200 + 137 * len(texts) % 1800
            texts.append(text[:size])
            text = text[size:]
            characters -= size
    return texts


@pytest.fixture(scope="session")
def cut_stdlib():
    """Give the function `stdlib_texts` to tests in other files."""
    return stdlib_texts


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory):
    """Write a BPE tokenizer of 500 entries, and give its file."""
    path = tmp_path_factory.mktemp("tokenizer") / "bpe.json"
    path.write_text(train_tokenizer(stdlib_texts("a*.py", 200_000), 500).backend_tokenizer.to_str())
    return path


@pytest.fixture(scope="session")
def make_corpus():
    """Give a function that writes JSONL files of about `characters` characters; each file becomes a part."""

    def make(folder: Path, files: int, characters: int) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for number, letter in enumerate("bcdefghijklm"[:files]):
            path = folder / f"{number}.jsonl"
            lines = [json.dumps({"text": text}) for text in stdlib_texts(f"{letter}*.py", characters)]
            path.write_text("\n".join(lines) + "\n")
            paths.append(path)
        return paths

    return make


@pytest.fixture(scope="session")
def make_config(tokenizer_json):
    """Give a function that makes a data section with one source per file."""

    def make(paths, cache_dir, **changes) -> TextDataConfig:
        settings = {
            "kind": "text",
            "sources": [{"name": path.stem, "paths": [str(path)]} for path in paths],
            "cache_dir": str(cache_dir),
            "eval_fraction": 0.2,
            "tokenizer": {"pretrained": str(tokenizer_json)},
            "prepare_workers": 1,
        }
        return TextDataConfig(**(settings | changes))

    return make


@pytest.fixture
def corpus(make_corpus, tmp_path):
    """Write four files of 20,000 characters, and give their paths."""
    return make_corpus(tmp_path / "corpus", 4, 20_000)
