"""prepare_documents: which tokens, which split, what is made again and what is not; bad input."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import re

import numpy as np
import pytest
from prepare_command import bytes_of
from tokenizers import Tokenizer

from pipeline.data.prepared import TokenStore, part_files, pool, prepare_documents
from pipeline.errors import DataError


@pytest.fixture
def told(caplog, monkeypatch):
    """The log as one text."""
    monkeypatch.setattr(logging.getLogger("pipeline"), "propagate", True)
    caplog.set_level(logging.INFO, "pipeline")

    def told():
        text = "\n".join(record.getMessage() for record in caplog.records)
        caplog.clear()
        return text

    return told


def texts_of(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def documents_of(store):
    """(ids, hash) of every document."""
    found = []
    for part in store.parts:
        starts = [0, *part.ends[:-1].tolist()]
        for start, end, value in zip(starts, part.ends.tolist(), part.hashes.tolist(), strict=True):
            found.append((part.tokens[start:end].tolist(), value))
    return found


def made_parts(cache_dir):
    return {path.name: path.stat().st_ino for path in (cache_dir / "parts").iterdir()}


def test_tokens_are_the_documents_each_with_its_end_and_split_by_hash(
    corpus, tmp_path, make_config, tokenizer_json
):
    prepared = prepare_documents(make_config(corpus, tmp_path / "cache"))
    core = Tokenizer.from_file(str(tokenizer_json))
    end = prepared.tokenizer.eos_token_id
    assert [source.name for source in prepared.sources] == ["0", "1", "2", "3"]
    assert prepared.vocab_size == 500
    held_out = 0
    for path, source in zip(corpus, prepared.sources, strict=True):
        expected = {"train": [], "eval": []}
        for text in texts_of(path):
            value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
            ids = [*core.encode(text, add_special_tokens=False).ids, end]
            expected["eval" if value < 0.2 * 2**64 else "train"].append((ids, value))
        assert documents_of(source.train) == expected["train"]
        assert documents_of(source.eval) == expected["eval"]
        assert source.train.num_documents == len(expected["train"])
        assert source.train.num_tokens == sum(len(ids) for ids, _ in expected["train"])
        assert not source.train.has_loss_mask
        held_out += source.eval.num_documents
    assert 0 < held_out < sum(source.train.num_documents for source in prepared.sources)


def test_an_end_written_in_a_document_is_text(tmp_path, make_config):
    path = tmp_path / "text.jsonl"
    texts = ["a<|endoftext|>b", "<|endoftext|>", "<|endoftext|> <|endoftext|>\n"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared = prepare_documents(make_config([path], tmp_path / "cache", eval_fraction=0))
    documents = documents_of(prepared.sources[0].train)
    assert [prepared.tokenizer.decode(ids[:-1]) for ids, _ in documents] == texts
    assert all(ids.count(prepared.tokenizer.eos_token_id) == 1 for ids, _ in documents)


@pytest.mark.slow
def test_workers_and_threads_do_not_change_a_byte(corpus, tmp_path, make_config):
    one = prepare_documents(make_config(corpus, tmp_path / "one"))
    pool = prepare_documents(make_config(corpus, tmp_path / "pool", prepare_workers=2))
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "pool")
    assert one.fingerprint == pool.fingerprint


@pytest.mark.slow
@pytest.mark.usefixtures("told")
def test_what_workers_have_done_of_their_parts_is_told_meanwhile(tmp_path, make_config, caplog, monkeypatch):
    """A compressed file is one part, and may take an hour."""
    monkeypatch.setattr(pool, "PROGRESS_LOG_SECONDS", 0)
    monkeypatch.setattr(pool, "COUNT_POLL_SECONDS", 0.01)
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for number, path in enumerate(paths):
        path.write_text((json.dumps({"text": f"{number} word" * 1000}) + "\n") * 700)  # batches of 150
    prepare_documents(make_config(paths, tmp_path / "cache", prepare_workers=2))
    assert re.search("preparing: 0 of 2 parts, [1-9][0-9]* documents", caplog.text)
    assert "tokenised 1,400 documents" in caplog.text


def test_ids_beyond_16_bits_take_32(tmp_path, make_config):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{number}": number for number in range(70_000)} | {"<|endoftext|>": 70_000}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<|endoftext|>"])
    core.save(str(tmp_path / "words.json"))
    (tmp_path / "text.txt").write_text("w1 w65535 w65536 w69999")
    config = make_config(
        [tmp_path / "text.txt"],
        tmp_path / "cache",
        eval_fraction=0,
        tokenizer={"pretrained": str(tmp_path / "words.json")},
    )
    (part,) = prepare_documents(config).sources[0].train.parts
    assert part.tokens.dtype == np.dtype("<u4")
    assert part.tokens.tolist() == [1, 65535, 65536, 69999, 70_000]


def test_an_unchanged_set_is_read_nowhere_and_altered_tokens_are_found_when_asked(
    corpus, tmp_path, make_config, told
):
    config = make_config(corpus, tmp_path / "cache")
    os.utime(corpus[0], ns=(0, 10**18))  # long ago: what changes within a clock tick is always read
    first = prepare_documents(config)
    content = bytes_of(tmp_path / "cache")
    tokens = first.sources[0].train.parts[0].folder / "train.tokens"
    for path in (corpus[0], tokens):  # other bytes; the size and the time of change stay
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(20)
            other = bytes([file.read(1)[0] ^ 1])
            file.seek(20)
            file.write(other)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    told()
    assert prepare_documents(config).fingerprint == first.fingerprint
    assert "tokenis" not in told()
    assert bytes_of(tmp_path / "cache") != content

    with corpus[0].open("r+b") as file:
        file.seek(20)
        file.write(b"?")  # the source is another now: another part
    prepare_documents(config, verify=True)
    assert "checksum" not in told()
    config = make_config(corpus[1:], tmp_path / "cache")
    victim = first.sources[1].train.parts[0].folder / "train.tokens"
    before = victim.stat()
    victim.write_bytes(bytes(before.st_size))
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare_documents(config)
    assert "damaged" not in told()
    prepare_documents(config, verify=True)
    assert told().count("the content of train.tokens does not match its checksum") == 1
    name = str(victim.relative_to(tmp_path / "cache"))
    assert bytes_of(tmp_path / "cache")[name] == content[name]


def truncate(path):
    os.truncate(path, path.stat().st_size - 2)


def alter(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (truncate, "train.tokens"),
        (alter, "train.tokens"),
        (lambda path: path.unlink(), "eval.ends"),
        (lambda path: path.write_text("{"), "part.json"),
        (lambda path: path.unlink(), "part.json"),
    ],
    ids=["truncated", "altered", "gone", "index", "no index"],
)
def test_a_damaged_part_is_said_and_made_again(damage, name, corpus, tmp_path, make_config, told):
    config = make_config(corpus[:2], tmp_path / "cache")
    folder = prepare_documents(config).sources[0].train.parts[0].folder
    content = bytes_of(tmp_path / "cache")
    made = made_parts(tmp_path / "cache")
    told()
    damage(folder / name)
    prepare_documents(config)
    text = told()
    assert text.count("is damaged") == 1
    assert name in text
    assert bytes_of(tmp_path / "cache") == content
    changed = {key for key, inode in made_parts(tmp_path / "cache").items() if made[key] != inode}
    assert changed == {folder.name}


def test_a_copied_cache_is_read_once_and_then_trusted(corpus, tmp_path, make_config, told, monkeypatch):
    config = make_config(corpus[:1], tmp_path / "cache")
    folder = prepare_documents(config).sources[0].train.parts[0].folder
    for path in folder.iterdir():
        os.utime(path)
    prepare_documents(config)
    monkeypatch.setattr(part_files, "compute_checksum", None)  # nothing is read now
    prepare_documents(config)
    assert "damaged" not in told()


def test_a_damaged_part_whose_source_is_gone_is_an_error(corpus, tmp_path, make_config):
    config = make_config(corpus[:2], tmp_path / "cache")
    folder = prepare_documents(config).sources[0].train.parts[0].folder
    truncate(folder / "train.tokens")
    corpus[0].unlink()
    with pytest.raises(DataError, match=r"0\.jsonl"):
        prepare_documents(config)


def test_only_what_changed_is_made_again(corpus, tmp_path, make_config, told):
    prints = [prepare_documents(make_config(corpus[:3], tmp_path / "cache")).fingerprint]
    before = made_parts(tmp_path / "cache")
    told()
    prints.append(prepare_documents(make_config(corpus, tmp_path / "cache")).fingerprint)
    assert "3 of 4 parts are prepared already" in told()
    after = made_parts(tmp_path / "cache")
    assert len(after) == 4
    assert before.items() <= after.items()
    longer = prepare_documents(make_config(corpus, tmp_path / "cache", sequence_length=512))
    assert longer.fingerprint == prints[-1]
    assert made_parts(tmp_path / "cache") == after
    prints.append(prepare_documents(make_config(corpus, tmp_path / "cache", eval_fraction=0.3)).fingerprint)
    assert len(made_parts(tmp_path / "cache")) == 8
    assert len(set(prints)) == 3


def test_another_tokenizer_is_another_set(corpus, tmp_path, make_config, tokenizer_json):
    tokenizer = tmp_path / "mine.json"
    tokenizer.write_bytes(tokenizer_json.read_bytes())
    config = make_config(corpus, tmp_path / "cache", tokenizer={"pretrained": str(tokenizer)})
    first = prepare_documents(config)
    description = json.loads(tokenizer.read_text())
    description["model"]["merges"].pop()
    tokenizer.write_text(json.dumps(description))
    second = prepare_documents(config)
    assert second.fingerprint != first.fingerprint
    assert len(made_parts(tmp_path / "cache")) == 8


def test_a_tokenizer_trained_on_the_data_is_trained_once_and_leaves_out_what_is_held_out(
    corpus, tmp_path, make_config, told
):
    config = make_config(corpus, tmp_path / "cache", tokenizer={"vocab_size": 300})
    first = prepare_documents(config)
    assert told().count("trained a tokenizer of 300 entries") == 1
    second = prepare_documents(config)
    assert "trained a" not in told()
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer.backend_tokenizer.to_str() == second.tokenizer.backend_tokenizer.to_str()
    other = prepare_documents(config.model_copy(update={"cache_dir": str(tmp_path / "other")}))
    assert other.fingerprint == first.fingerprint
    (folder,) = (tmp_path / "cache" / "tokenizers").iterdir()
    alter(folder / "tokenizer.json")
    told()
    assert prepare_documents(config).fingerprint == first.fingerprint
    assert told().count("the tokenizer in") == 1


def test_shards_together_are_the_whole(corpus, tmp_path, make_config, told):
    prepare_documents(make_config(corpus, tmp_path / "whole"))
    config = make_config(corpus, tmp_path / "shards")
    parts = [prepare_documents(config, shard=(index, 3)) for index in range(3)]
    assert [sum(s.train.num_documents > 0 for s in part.sources) for part in parts] == [2, 1, 1]
    told()
    prepare_documents(config)
    assert "tokenis" not in told()
    assert bytes_of(tmp_path / "shards") == bytes_of(tmp_path / "whole")


def test_eval_sets_are_held_out_whole(corpus, tmp_path, make_config):
    eval_sets = {"other": {"paths": [str(corpus[3])]}}
    prepared = prepare_documents(make_config(corpus[:3], tmp_path / "cache", eval_sets=eval_sets))
    (other,) = prepared.eval_sets
    assert (other.name, other.train.num_documents) == ("other", 0)
    assert other.eval.num_documents == len(texts_of(corpus[3]))


def test_an_eval_set_that_is_trained_on_is_told(corpus, tmp_path, make_config, told):
    eval_sets = {"other": {"paths": [str(corpus[3])]}, "seen": {"paths": [str(p) for p in corpus[2:]]}}
    prepare_documents(make_config(corpus[:3], tmp_path / "cache", eval_sets=eval_sets))
    (line,) = [line for line in told().splitlines() if "unseen text" in line]
    assert "data.eval_sets.seen: 1 of its 2 files are also in the training source 2, so its loss" in line


@pytest.mark.slow
def test_bad_records_stop_with_their_place_or_are_counted(corpus, tmp_path, make_config):
    with corpus[1].open("a") as file:
        file.write('{"txt": "no text"}\n{broken\n')
    line = len(corpus[1].read_text().splitlines())
    for workers in (1, 2):
        with pytest.raises(DataError, match=rf"1\.jsonl:{line - 1}: no field 'text'"):
            prepare_documents(make_config(corpus, tmp_path / "cache", prepare_workers=workers))
    sources = [{"name": path.stem, "paths": [str(path)], "bad_records": "skip"} for path in corpus]
    prepared = prepare_documents(make_config(corpus, tmp_path / "cache", sources=sources))
    assert [source.tally for source in prepared.sources] == [{}, {"bad records": 2}, {}, {}]


def test_no_text_at_all_is_an_error(tmp_path, make_config):
    path = tmp_path / "blank.jsonl"
    path.write_text('{"text": " "}\n')
    with pytest.raises(DataError, match=r"no document of .* has any text"):
        prepare_documents(make_config([path], tmp_path / "cache"))


def test_a_store_goes_to_other_processes_without_its_tokens(corpus, tmp_path, make_config):
    store = prepare_documents(make_config(corpus, tmp_path / "cache")).sources[0].train
    assert store.parts[0].tokens.flags.writeable is False
    assert len(pickle.dumps(store)) < 1000
    again = pickle.loads(pickle.dumps(store))
    assert documents_of(again) == documents_of(store)
    assert TokenStore([], "train").num_tokens == 0
