"""Preparing text: split, tokenizer, what is kept; every bad input is one clear line."""

from __future__ import annotations

import logging
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.data_schema import TextDataConfig, TokenizerConfig
from pipeline.data import prepare_data
from pipeline.data.cache import read_index
from pipeline.data.tokenise import is_held_out
from pipeline.errors import DataError

STDLIB = Path(sysconfig.get_path("stdlib"))


def config(paths, cache_dir, **changes):
    settings = {
        "kind": "text",
        "paths": [str(path) for path in paths],
        "cache_dir": str(cache_dir),
        "sequence_length": 32,
        "eval_fraction": 0.2,
        "tokenizer": TokenizerConfig(vocab_size=400),
    }
    return TextDataConfig(**(settings | changes))


@pytest.fixture
def corpus(tmp_path):
    """Twenty modules of the standard library."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for path in sorted(STDLIB.glob("[c-d]*.py"))[:20]:
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def entries(cache_dir):
    return [path for path in cache_dir.iterdir() if path.is_dir()]


def split_texts(corpus, fraction):
    texts = [path.read_text("utf-8") for path in sorted(corpus.iterdir())]
    return [[text for text in texts if is_held_out(text, fraction) is side] for side in (False, True)]


def test_tokens_are_the_documents_each_with_its_end(corpus, tmp_path):
    bundle = prepare_data(config([corpus], tmp_path / "cache"))
    assert bundle.vocab_size == len(bundle.tokenizer) == 400
    assert bundle.num_classes is None
    (entry,) = entries(tmp_path / "cache")
    index = read_index(entry)
    for split, texts in zip(("train", "eval"), split_texts(corpus, 0.2), strict=True):
        tokens = np.load(entry / f"{split}.npy")
        assert (tokens.dtype, tokens.ndim) == (np.uint16, 1)
        assert index["tokens"][split] == len(tokens)
        assert index["documents"][split] == len(texts) == (tokens == bundle.tokenizer.eos_token_id).sum()
        assert bundle.tokenizer.decode(tokens).split("<|endoftext|>") == [*texts, ""]
    assert index["bytes"]["train.npy"] == (entry / "train.npy").stat().st_size
    batch = bundle.collate(bundle.train.__getitems__([0, 1]))
    assert batch["input_ids"].shape == batch["shift_labels"].shape == (2, 32)


def test_a_second_run_reads_the_cache(corpus, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    first = prepare_data(config([corpus], tmp_path / "cache"))
    assert "training the tokenizer on 0." in caplog.text
    assert "tokenising: " in caplog.text
    caplog.clear()
    second = prepare_data(config([corpus], tmp_path / "cache", sequence_length=64))
    assert "tokenising" not in caplog.text
    assert second.fingerprint == first.fingerprint
    assert len(second.train) == len(first.train) // 2
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()


def test_two_preparations_give_the_same_tokens(corpus, tmp_path):
    one = prepare_data(config([corpus], tmp_path / "one"))
    two = prepare_data(config([corpus], tmp_path / "two"))
    assert one.fingerprint == two.fingerprint
    for name in ("train.npy", "eval.npy", "tokenizer.json"):
        (first,), (second,) = entries(tmp_path / "one"), entries(tmp_path / "two")
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_what_changes_the_tokens_changes_the_key(corpus, tmp_path):
    def key(**changes):
        return prepare_data(config([corpus], tmp_path / "cache", **changes)).fingerprint

    keys = [
        key(),
        key(eval_fraction=0.3),
        key(tokenizer=TokenizerConfig(vocab_size=300)),
        key(text_field="body"),
    ]
    (corpus / "zz.txt").write_text("one more document")
    keys.append(key())
    assert len(set(keys)) == 5


def test_more_data_moves_no_document(corpus):
    train, held_out = split_texts(corpus, 0.3)
    assert train
    assert held_out
    more = STDLIB / "argparse.py"
    (corpus / "aaa.py").write_bytes(more.read_bytes())
    train_later, held_out_later = split_texts(corpus, 0.3)
    assert set(train) <= set(train_later)
    assert set(held_out) <= set(held_out_later)


def test_the_standard_library_by_name(tmp_path, monkeypatch):
    """A few of its files in place of all, which take 7 s."""
    library = tmp_path / "lib"
    for name in ("argparse.py", "json/decoder.py", "pydoc_data/topics.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes((STDLIB / name).read_bytes())
    for name in (
        "test/test_x.py",
        "json/tests/y.py",
        "site-packages/z.py",
        "_sysconfigdata_x.py",
        "config-3/a.py",
    ):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("left_out = 1")
    (library / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(library)}[name])
    bundle = prepare_data(config(["python_stdlib"], tmp_path / "cache"))
    (entry,) = entries(tmp_path / "cache")
    documents = read_index(entry)["documents"]
    from pydoc_data.topics import topics

    assert documents["train"] + documents["eval"] == 2 + len(topics)
    texts = "".join(bundle.tokenizer.decode(np.load(entry / name)) for name in ("train.npy", "eval.npy"))
    assert topics["with"] in texts
    assert "left_out" not in texts


def test_special_tokens_written_in_a_document_are_text(tmp_path):
    (tmp_path / "a.txt").write_text("what <|endoftext|> means: the end of a text " * 50)
    bundle = prepare_data(config([tmp_path / "a.txt"], tmp_path / "cache", eval_fraction=0.0))
    tokens = np.load(bundle.train.path)
    assert (tokens == bundle.tokenizer.eos_token_id).sum() == 1


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000, "[unk]": 70_001}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("w69999 w3 " * 100)
    bundle = prepare_data(
        config(
            [tmp_path / "a.txt"],
            tmp_path / "cache",
            eval_fraction=0.0,
            tokenizer=TokenizerConfig(pretrained=str(tmp_path / "words.json")),
        )
    )
    tokens = np.load(bundle.train.path)
    assert tokens.dtype == np.uint32
    assert tokens[[0, 1, -1]].tolist() == [69_999, 3, 70_000]
    assert bundle.vocab_size == 70_002


def test_a_tokenizer_from_a_folder_or_a_file(corpus, tmp_path):
    trained = prepare_data(config([corpus], tmp_path / "cache"))
    folder = tmp_path / "tokenizer"
    trained.tokenizer.save_pretrained(str(folder))
    for given in (folder, folder / "tokenizer.json"):
        loaded = prepare_data(
            config([corpus], tmp_path / "again", tokenizer=TokenizerConfig(pretrained=str(given)))
        )
        assert np.array_equal(np.load(loaded.train.path), np.load(trained.train.path))
    assert len(entries(tmp_path / "again")) == 1  # the key is the content, not the name


def prepare_error(*given, **changes):
    with pytest.raises(DataError) as caught:
        prepare_data(config(*given, **changes))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_bad_tokenizers(corpus, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def error(name):
        return prepare_error([corpus], tmp_path / "cache", tokenizer=TokenizerConfig(pretrained=str(name)))

    assert "missing.json does not exist" in error(tmp_path / "missing.json")
    (tmp_path / "empty").mkdir()
    assert "has no tokenizer.json" in error(tmp_path / "empty")
    (tmp_path / "bad.json").write_text("{}")
    assert "bad.json: " in error(tmp_path / "bad.json")
    assert "cannot load someone/no-such-model from the hub" in error("someone/no-such-model")

    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "endless.json"))
    assert "endless.json has no end-of-document token; set eos_token" in error(tmp_path / "endless.json")


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    message = prepare_error([tmp_path / "a.txt"], tmp_path / "cache", eval_fraction=0.0, sequence_length=100)
    assert "6 training tokens in 1 documents" in message
    assert "takes 101" in message


def test_no_evaluation_is_said(corpus, tmp_path, caplog):
    bundle = prepare_data(config([corpus], tmp_path / "cache", eval_fraction=1e-9))
    assert bundle.eval == {}
    assert "no evaluation: 0 tokens in 0 documents are held out" in caplog.text


def test_empty_files_only(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("\n \n")
    assert "no text in 2 files, all empty" in prepare_error([tmp_path], tmp_path / "cache")
    assert not entries(tmp_path / "cache")


def test_a_cache_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "data.cache_dir" in prepare_error([corpus], tmp_path / "file")
    assert "cannot be written: Not a directory" in prepare_error([corpus], tmp_path / "file" / "cache")


def test_a_malformed_file_leaves_nothing(corpus, tmp_path):
    (corpus / "zz.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert "zz.jsonl:2: not a line of JSON" in prepare_error([corpus], tmp_path / "cache")
    assert not entries(tmp_path / "cache")
