"""Bits per byte of the held-out text: from the loss of its tokens, and the bytes that they stand for."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from parity.splits import SEQUENCE_2, TENSOR_2, TWO_STAGES, zero
from support.tiny import ALONE, VOCABULARY, MaskedTokens, make_engine, recipe, settings, token_bundle
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pipeline.config.batch_plan import plan_batch
from pipeline.config.data_schema import TextDataConfig
from pipeline.data import prepare_data
from pipeline.data.tokenizer import count_token_bytes, train_tokenizer
from pipeline.distributed.process_group import Job
from pipeline.evaluation.held_out import build_eval_loader, evaluate
from pipeline.objectives import build_objective

TEXTS = ["Grüße aus Köln, 東京!\n\tx = 1", "naïve café – 10 €", "plain words, plain words", "🙂 and ﬁ\u0301"]


def test_a_byte_level_vocabulary_counts_each_byte_once():
    tokenizer = train_tokenizer(TEXTS, 300, ["<|turn|>"])
    tokenizer.add_tokens([AddedToken("ÄÖ plain", special=False)])
    counts = count_token_bytes(tokenizer)
    for text in [*TEXTS, "unseen: Ω≈ç", "an ÄÖ plain token"]:
        ids = tokenizer(f"<|turn|>{text}<|endoftext|>")["input_ids"]
        assert counts[ids].sum() == len(text.encode())
    assert counts[tokenizer.eos_token_id] == counts[tokenizer.convert_tokens_to_ids("<|turn|>")] == 0


def test_a_vocabulary_of_sentencepiece_counts_its_space_and_its_bytes_as_one():
    pieces = ["<unk>", "</s>", "▁a", "é", "▁▁", "<0xE6>", "<0x97>", "<0xA5>", "<0xZZ>"]
    core = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=0, byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    counts = count_token_bytes(tokenizer)
    assert counts.tolist() == [0, 0, 2, 2, 2, 1, 1, 1, 6]
    assert counts[2:8].sum() == len(tokenizer.decode(range(2, 8)).encode())


def test_a_vocabulary_of_another_kind_is_not_counted():
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    assert count_token_bytes(PreTrainedTokenizerFast(tokenizer_object=core)) is None
    core.decoder = None
    assert count_token_bytes(PreTrainedTokenizerFast(tokenizer_object=core)) is None


def evaluated(job: Job, data, split=None, **changes):
    tree = recipe(batch={"micro_batch_size": 2}, **changes)
    config = settings(tree, split).config
    engine = make_engine(job, tree, split, data)
    loader = build_eval_loader(config, plan_batch(config.batch, engine.dp_world_size), data, engine)
    return evaluate(engine, build_objective(config), loader, job)


def written_data(folder):
    """Data whose held-out documents fit into a row each."""
    path = folder / "texts.jsonl"
    texts = [f"{number}: {TEXTS[number % len(TEXTS)]} {'日' * (number % 3)}" for number in range(60)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = prepare_data(
        TextDataConfig(
            kind="text",
            paths=[str(path)],
            sequence_length=128,
            packing="none",
            eval_fraction=0.3,
            cache_dir=str(folder / "cache"),
            tokenizer={"vocab_size": 270},
        )
    )
    return data, texts


def test_the_ratio_is_that_of_the_decoded_documents(tmp_path):
    data, texts = written_data(tmp_path)
    (held_out,) = data.eval.values()
    num_bytes = num_targets = 0
    for row in range(len(held_out)):
        length = int((held_out[row]["shift_labels"] != -100).sum())
        ids = held_out[row]["input_ids"][:length].tolist()
        text = data.tokenizer.decode(ids)
        assert text in texts
        # The first token of a document is no target; the one that ends it is, and stands for no text.
        first = data.tokenizer.decode(ids[:1])
        assert "\ufffd" not in first
        num_bytes += len(text.encode()) - len(first.encode())
        num_targets += length
    model = {**recipe()["model"], "max_sequence_length": 128}
    row = evaluated(ALONE, data, model=model)
    assert row["eval/bits_per_byte"] == row["eval/loss"] / math.log(2) * num_targets / num_bytes


SPLITS = {
    "ddp": ({"torch": {"parallel": "ddp"}}, 2),
    "zero3": (zero(3), 4),
    "tensor": (zero(1) | TENSOR_2, 2),
    "sequence": (zero(2) | SEQUENCE_2, 2),
    "stages": (zero(1) | TWO_STAGES, 4),
}
SETS = {"web": MaskedTokens(5, seed=1), "code": MaskedTokens(12, seed=2)}


def with_text():
    """Two sets whose ids are single bytes and, for 256 or 0, the end of a document."""
    return replace(token_bundle(), eval=SETS, tokenizer=train_tokenizer(TEXTS, VOCABULARY))


def on_this_rank(job: Job, split):
    return evaluated(job, with_text(), split)


@pytest.mark.slow
@pytest.mark.daily("ddp", "sequence")
@pytest.mark.parametrize("name", SPLITS)
def test_every_split_counts_the_same_text(ranks, name):
    """5 and 12 samples in batches of two: uneven on two ranks and on four."""
    data = with_text()
    end = data.tokenizer.eos_token_id
    targets = {}
    text = {}
    for key, dataset in SETS.items():
        labels = np.concatenate([dataset[row]["shift_labels"] for row in range(len(dataset))])
        targets[key] = int((labels != -100).sum())
        text[key] = int(((labels != -100) & (labels != end)).sum())
    split, world_size = SPLITS[name]
    for row in [evaluated(ALONE, data), *ranks(world_size).run(on_this_rank, split)]:
        expected = row["eval/loss"] / math.log(2) * sum(targets.values()) / sum(text.values())
        assert row["eval/bits_per_byte"] == expected
        for key in SETS:
            expected = row[f"eval/{key}/loss"] / math.log(2) * targets[key] / text[key]
            assert row[f"eval/{key}/bits_per_byte"] == expected
