"""Text as a bundle: rows of every source, what is held out, and the tokenizer."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from pipeline.config.data_schema import TextDataConfig, TokenizerConfig
from pipeline.data import prepare_data
from pipeline.errors import DataError

pytestmark = pytest.mark.slow

STDLIB = Path(sysconfig.get_path("stdlib"))


def config(files, cache_dir, **changes):
    settings = {
        "kind": "text",
        "paths": [str(path) for path in files],
        "cache_dir": str(cache_dir),
        "sequence_length": 32,
        "eval_fraction": 0.2,
        "tokenizer": TokenizerConfig(vocab_size=400),
    }
    return TextDataConfig(**{key: value for key, value in (settings | changes).items() if value is not None})


@pytest.fixture
def corpus(tmp_path):
    """The beginnings of twenty modules of the standard library."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for path in sorted(STDLIB.glob("[c-d]*.py"))[:20]:
        (folder / path.name).write_text(path.read_text("utf-8")[:6000], "utf-8")
    return folder


def tokens_of(dataset):
    """All its documents, one behind the other."""
    return [token for store in dataset.stores for part in store.parts for token in part.tokens.tolist()]


def test_rows_are_the_documents_each_with_its_end(corpus, tmp_path):
    bundle = prepare_data(config([corpus], tmp_path / "cache"))
    assert bundle.vocab_size == len(bundle.tokenizer) == 400
    assert bundle.num_classes is None
    (held_out,) = bundle.eval.values()
    found = [
        bundle.tokenizer.decode(tokens_of(split)).split("<|endoftext|>") for split in (bundle.train, held_out)
    ]
    assert all(len(texts) > 1 and texts[-1] == "" for texts in found)
    texts = [text for texts in found for text in texts[:-1]]
    assert sorted(texts) == sorted(path.read_text("utf-8") for path in corpus.iterdir())
    batch = bundle.collate(bundle.train.__getitems__([0, 1]))
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(
        ("input_ids", "shift_labels", "position_ids"), (2, 32)
    )


def test_documents_in_one_stream_on_request(corpus, tmp_path):
    apart = prepare_data(config([corpus], tmp_path / "cache")).train
    stream = prepare_data(config([corpus], tmp_path / "cache", separate_documents=False)).train
    one = apart.__getitems__(range(len(apart)))
    other = stream.__getitems__(range(len(stream)))
    assert set(other) == {"input_ids", "shift_labels"}
    assert torch.equal(one["input_ids"], other["input_ids"])
    differ = one["shift_labels"] != other["shift_labels"]
    assert differ.any()
    assert (one["shift_labels"][differ] == -100).all()


def test_several_sources_and_eval_sets(corpus, tmp_path):
    (tmp_path / "more.txt").write_text("another text " * 500)
    sources = [
        {"name": "code", "paths": [str(corpus)], "weight": 3},
        {"name": "more", "paths": [str(tmp_path / "more.txt")], "weight": 1},
    ]
    bundle = prepare_data(
        config(
            [],
            tmp_path / "cache",
            paths=None,
            sources=sources,
            eval_sets={"other": {"paths": [str(STDLIB / "argparse.py")]}},
        )
    )
    assert [(share.name, share.weight) for share in bundle.mixture] == [("code", 3), ("more", 1)]
    assert sum(share.num_samples for share in bundle.mixture) == len(bundle.train)
    assert set(bundle.eval) <= {"code", "more"}
    assert set(bundle.eval_sets) == {"other"}
    first_of_more = bundle.mixture[0].num_samples
    assert bundle.tokenizer.decode(bundle.train[first_of_more]["input_ids"]).startswith("another text")


def test_a_tokenizer_from_a_folder_or_a_file(corpus, tmp_path):
    trained = prepare_data(config([corpus], tmp_path / "cache"))
    folder = tmp_path / "tokenizer"
    trained.tokenizer.save_pretrained(str(folder))
    tokens = tokens_of(trained.train)
    for given in (folder, folder / "tokenizer.json"):
        loaded = prepare_data(
            config([corpus], tmp_path / "again", tokenizer=TokenizerConfig(pretrained=str(given)))
        )
        assert tokens_of(loaded.train) == tokens
    assert len(list((tmp_path / "again/tokenizers").iterdir())) == 1  # known by its content, not its name


def test_a_tokenizer_without_an_end_is_refused(corpus, tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "endless.json"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    given = config([corpus], tmp_path / "cache", tokenizer=TokenizerConfig(pretrained=str(path)))
    with pytest.raises(DataError, match=r"endless\.json has no end-of-document token; set eos_token"):
        prepare_data(given)


def test_no_evaluation_is_said(corpus, tmp_path, caplog):
    bundle = prepare_data(config([corpus], tmp_path / "cache", eval_fraction=1e-9))
    assert bundle.eval == {}
    assert "no evaluation on source1: 0 tokens in 0 documents are held out" in caplog.text


def test_an_eval_set_that_is_too_short_gets_advice_that_helps(corpus, tmp_path, caplog):
    (tmp_path / "short.txt").write_text("a few words")
    given = config(
        [corpus], tmp_path / "cache", eval_sets={"short": {"paths": [str(tmp_path / "short.txt")]}}
    )
    assert prepare_data(given).eval_sets == {}
    warning = next(line for line in caplog.messages if "no evaluation on short" in line)
    assert warning.endswith("tokens in 1 documents, and one sequence takes 33 tokens; add documents")
