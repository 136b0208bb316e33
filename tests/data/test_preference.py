"""Judged answers: whatever the layout, ids are the template's or the text's, and the answers alone count."""

from __future__ import annotations

import json
import logging
from collections import Counter

import numpy as np
import pytest
import torch
from support.launch import write_recipe

from pipeline.__main__ import main
from pipeline.cli.train import main as train
from pipeline.config.data_schema import PreferenceDataConfig
from pipeline.data import prepare_data
from pipeline.data.bundle import JoinedDataset
from pipeline.data.chat_template import BUILT_IN
from pipeline.data.documents.records import Tally
from pipeline.data.preference_layouts import CHOSEN, MISMATCHED, REJECTED
from pipeline.data.prepared.encoder import EncoderSettings
from pipeline.data.prepared.preference_encoder import TOO_LONG, PreferenceEncoder
from pipeline.data.tokenizer import get_token_id_bound, train_tokenizer
from pipeline.errors import ConfigError, DataError

END = "<|endoftext|>"
WORDS = ["what is the sky?", "it is blue", "it is green, of course", "be kind", "a word and another one"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = train_tokenizer(WORDS * 3, 300, ["<|im_start|>", "<|im_end|>"])
    made.chat_template = BUILT_IN["chatml"]
    made.save_pretrained(str(tmp_path_factory.mktemp("tokenizer")))
    return made


@pytest.fixture(scope="module")
def make_encoder(tokenizer, tmp_path_factory):
    def make(template: str | None = BUILT_IN["chatml"], **changes) -> PreferenceEncoder:
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer.chat_template = template
        tokenizer.save_pretrained(str(folder))
        given = {"kind": "preference", "paths": ["x"], "sequence_length": 1000} | changes
        end = tokenizer.eos_token_id
        config = PreferenceDataConfig(**given)
        return PreferenceEncoder(EncoderSettings(config, folder, end, get_token_id_bound(tokenizer), 1))

    return make


@pytest.fixture(scope="module")
def encoder(make_encoder):
    return make_encoder()


def user(content):
    return {"role": "user", "content": content}


def bot(content):
    return {"role": "assistant", "content": content}


def gpt(content):
    return {"from": "gpt", "value": content}


def written(said, *before):
    """(text before the answer, the answer up to its end) as ChatML has it."""
    turns = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in before)
    return f"{turns}<|im_start|>assistant\n", f"{said}<|im_end|>\n{END}"


def sides_of(document, tokenizer):
    """(kind, text that does not count, text that does) of each segment; the first must come before."""
    found = []
    at = 0
    for kind, prompt, length in document.segments.tolist():
        ids = document.ids[at : at + length]
        mask = document.loss_mask[at : at + length]
        assert mask[prompt:].all()
        assert not mask[:prompt].any()
        found.append((kind, tokenizer.decode(ids[:prompt]), tokenizer.decode(ids[prompt:])))
        at += length
    assert at == len(document.ids)
    return found


SKY = "what is the sky?"
BLUE = "it is blue"
GREEN = "it is green"
KIND = "be kind"
CHAT = [(CHOSEN, *written(BLUE, user(SKY))), (REJECTED, *written(GREEN, user(SKY)))]
SYSTEM = {"role": "system", "content": KIND}
GUIDED = [(CHOSEN, *written(BLUE, SYSTEM, user(SKY))), (REJECTED, *written(GREEN, SYSTEM, user(SKY)))]
SPACED = [(CHOSEN, SKY, f" {BLUE}{END}"), (REJECTED, SKY, f" {GREEN}{END}")]
FROM = [{"from": "human", "value": SKY}]
SIDES = {"chosen": BLUE, "rejected": GREEN}
LISTS = {"chosen": [bot(BLUE)], "rejected": [bot(GREEN)]}
WHOLE = {"chosen": [user(SKY), bot(BLUE)], "rejected": [user(SKY), bot(GREEN)]}
ROWS = {
    # TRL's
    "plain": ({"prompt": SKY, "chosen": f" {BLUE}", "rejected": f" {GREEN}"}, SPACED),
    "plain, ended": ({"prompt": SKY, "chosen": f" {BLUE}{END}", "rejected": f" {GREEN}"}, SPACED),
    "plain, shared": (
        {"chosen": f"{SKY} it is", "rejected": f"{SKY} a word"},
        [(CHOSEN, SKY, f" it is{END}"), (REJECTED, SKY, f" a word{END}")],
    ),
    "plain, shared, a space is a token": (
        {"chosen": f"{SKY} 1", "rejected": f"{SKY} 2"},
        [(CHOSEN, SKY, f" 1{END}"), (REJECTED, SKY, f" 2{END}")],
    ),
    "turns": ({"prompt": [user(SKY)], **LISTS}, CHAT),
    "turns after a string": ({"prompt": SKY, **LISTS}, CHAT),
    "turns and a string": ({"prompt": [user(SKY)], **SIDES}, CHAT),
    "turns, shared": (WHOLE, CHAT),
    # LLaMA-Factory's
    "sharegpt": ({"conversations": FROM, "chosen": gpt(BLUE), "rejected": gpt(GREEN)}, CHAT),
    "sharegpt, system": (
        {"conversations": FROM, "system": KIND, "chosen": gpt(BLUE), "rejected": gpt(GREEN)},
        GUIDED,
    ),
    "alpaca": ({"instruction": SKY, "input": "", **SIDES}, CHAT),
    # Axolotl's
    "argilla": ({"instruction": SKY, "chosen_response": BLUE, "rejected_response": GREEN}, CHAT),
    "intel": ({"system": KIND, "question": SKY, **SIDES}, GUIDED),
    "icr": ({"system": "", "input": SKY, **SIDES}, CHAT),
    "messages": ({"messages": [user(SKY)], "chosen": bot(BLUE), "rejected": bot(GREEN)}, CHAT),
    # both of the prompt and whole conversations, as in HuggingFaceH4/ultrafeedback_binarized
    "ultra": ({"prompt": SKY, "messages": WHOLE["chosen"], **WHOLE}, CHAT),
    "a table's nulls": ({"prompt": None, "messages": None, "conversations": FROM, **SIDES}, CHAT),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_layout_gives_the_ids_of_the_template_or_the_text(encoder, tokenizer, name):
    row, expected = ROWS[name]
    (document,) = encoder([("rows:1", row)], Tally())
    assert sides_of(document, tokenizer) == expected
    texts = [before + answer for _, before, answer in expected]
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert document.ids.tolist() == plain[0] + plain[1]
    assert document.margin is None


def test_strings_that_the_template_is_to_write(make_encoder, tokenizer):
    (document,) = make_encoder(layout="prompt_pairs")([("rows:1", {"prompt": SKY, **SIDES})], Tally())
    assert sides_of(document, tokenizer) == CHAT


def test_only_the_judged_turns_count(encoder, tokenizer):
    """Not what the assistant said before, nor what it was asked in between."""
    before = [user(SKY), bot(GREEN), user(KIND)]
    row = {"chosen": [*before, bot(BLUE), user(SKY), bot(KIND)], "rejected": [*before, bot(GREEN)]}
    (document,) = encoder([("rows:1", row)], Tally())
    (_, prompt, length), rejected = document.segments.tolist()
    learned = document.ids[:length][document.loss_mask[:length]]
    assert tokenizer.decode(learned) == f"{BLUE}<|im_end|>\n{KIND}<|im_end|>\n{END}"
    assert tokenizer.decode(document.ids[:prompt]) == written(BLUE, *before)[0]
    assert (prompt, rejected[0]) == (rejected[1], REJECTED)


def test_a_text_begins_as_the_tokenizer_begins_it(tmp_path, tokenizer):
    from tokenizers import processors

    own = train_tokenizer(WORDS * 3, 300, ["<|begin|>"])
    own.bos_token = "<|begin|>"
    begin = ("<|begin|>", own.convert_tokens_to_ids("<|begin|>"))
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[begin]
    )
    own.save_pretrained(str(tmp_path))
    config = PreferenceDataConfig(kind="preference", paths=["x"], sequence_length=1000)
    settings = EncoderSettings(config, tmp_path, own.eos_token_id, get_token_id_bound(own), 1)
    row = {"prompt": SKY, "chosen": " <|begin|>", "rejected": " it is"}
    tally = Tally()
    (document,) = PreferenceEncoder(settings)([("rows:1", row)], tally)
    ids, (_, prompt, length) = document.ids.tolist(), document.segments[0].tolist()
    assert ids[0] == begin[1]
    assert ids[1:length].count(begin[1]) == 0, "a special token that somebody wrote is text"
    assert own.decode(ids[1:prompt]) == SKY
    assert ids[length] == begin[1]
    assert tally == {"examples with a special token read as text": 1}


@pytest.mark.parametrize(
    ("scores", "margin"),
    [
        ({"score_chosen": 8.5, "score_rejected": 6}, 2.5),
        ({"chosen_score": 1, "rejected_score": 4}, -3.0),
        ({"margin": 0.25, "score_chosen": 9, "score_rejected": 1}, 0.25),
        ({"score_chosen": 8.5}, None),
    ],
)
def test_scores_are_a_margin(encoder, scores, margin):
    (document,) = encoder([("rows:1", WHOLE | scores)], Tally())
    assert document.margin == margin


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": SKY, "chosen": BLUE}, "one side missing: there is no 'rejected'"),
        ({"prompt": SKY, "chosen": " \n", "rejected": BLUE}, "the chosen answer is empty"),
        ({"chosen": WHOLE["chosen"], "rejected": [user(SKY)]}, "the rejected answer is empty"),
        ({"prompt": SKY, "chosen": BLUE, "rejected": BLUE}, "are the same; nothing is preferred"),
        ({"prompt": SKY, "chosen": BLUE, "rejected": BLUE + END}, "have the same tokens"),
        (
            {"chosen": WHOLE["chosen"], "rejected": [user(KIND), bot(GREEN)]},
            "do not share a prompt: their first turns differ",
        ),
        ({"chosen": "a b", "rejected": "c b"}, "do not share a prompt"),
        ({"prompt": KIND, **WHOLE}, "conversations that do not begin with the prompt in 'prompt'"),
        ({"prompt": "", **SIDES}, "the prompt is empty"),
        ({"text": SKY}, "no prompt in any known layout; the row's fields: 'text'; expected 'prompt' or"),
        ({"prompt": SKY, "completion": BLUE}, "no answers; the row's fields: 'prompt', 'completion'"),
        ({"prompt": SKY, "completion": BLUE, "label": True}, "set data.examples: unpaired"),
        ({"prompt": [{"role": "me", "content": ""}], **LISTS}, "has the role 'me'"),
        (WHOLE | {"margin": "much"}, "field 'margin' is 'much'; expected a number"),
        (WHOLE | {"margin": float("nan")}, "field 'margin' is nan; expected a number"),
        ({"prompt": SKY, "chosen": "\ud800", "rejected": BLUE}, "not valid text"),
    ],
)
def test_a_bad_pair_is_named_by_its_place(encoder, row, message):
    with pytest.raises(DataError, match=r"^rows:7: ") as refused:
        encoder([("rows:7", row)], Tally())
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


UNPAIRED = {
    "plain": ({"prompt": SKY, "completion": f" {BLUE}", "label": True}, CHOSEN),
    "turns": ({"prompt": [user(SKY)], "completion": [bot(BLUE)], "label": False}, REJECTED),
    "sharegpt": ({"messages": [user(SKY), bot(BLUE)], "kto_tag": True}, CHOSEN),
    "alpaca": ({"instruction": SKY, "output": BLUE, "kto_tag": False}, REJECTED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNPAIRED)
def test_answers_without_a_pair(make_encoder, tokenizer, name):
    row, kind = UNPAIRED[name]
    (document,) = make_encoder(examples="unpaired")([("rows:1", row)], Tally())
    ((found, before, answer),) = sides_of(document, tokenizer)
    assert found == kind
    assert before + answer == "".join(written(BLUE, user(SKY)) if name != "plain" else (SKY, f" {BLUE}{END}"))
    with pytest.raises(DataError, match="expected true or false"):
        make_encoder(examples="unpaired")([("a:1", row | dict.fromkeys(("label", "kto_tag"), 2))], Tally())


def test_without_a_template_plain_text_is_read_and_turns_are_an_error(make_encoder):
    encoder = make_encoder(None)
    assert len(encoder([("rows:1", ROWS["plain"][0])], Tally())) == 1
    with pytest.raises(ConfigError, match=r"rows:2: a row with turns needs a chat template: the tokenizer"):
        encoder([("rows:2", WHOLE)], Tally())


@pytest.mark.slow
def test_what_does_not_fit_is_dropped_whole_and_counted(make_encoder):
    size = len(make_encoder()([("rows:1", WHOLE)], Tally())[0].ids)
    assert len(make_encoder(sequence_length=size)([("rows:1", WHOLE)], Tally())) == 1
    tally = Tally()
    assert make_encoder(sequence_length=size - 1)([("rows:1", WHOLE)], tally) == []
    assert tally == {TOO_LONG: 1}
    (_, prompt, _), (_, _, length) = make_encoder()([("rows:1", WHOLE)], Tally())[0].segments.tolist()
    alone = {"messages": WHOLE["rejected"], "kto_tag": False}
    for missing in (0, 1):  # beside it, the prompt and a token of another's answer
        encoder = make_encoder(sequence_length=length + prompt + 1 - missing, examples="unpaired")
        assert len(encoder([("rows:1", alone)], Tally())) == 1 - missing
    for key, least in (("sequence_length", size), ("answer_length", length)):
        with pytest.raises(ConfigError, match=r"rows:1: the answers, each with its prompt") as refused:
            make_encoder(**{key: least - 1}, too_long="error")([("rows:1", WHOLE)], Tally())
        assert f"data.{key} is {least - 1:,}; set data.{key}={least}, or data.too_long=drop" in str(
            refused.value
        )
        made = make_encoder(**{key: least}, too_long="error")([("rows:1", WHOLE)], Tally())
        assert len(made) == 1, "what the line advises works"


def test_what_no_token_shows_is_counted_with_the_first_place(make_encoder):
    encoder = make_encoder()
    tally = Tally()
    row = WHOLE | {"source": "web", "tools": [{"name": "add"}], "score_chosen": "2", "score_rejected": "1"}
    encoder([("rows:1", WHOLE), ("rows:2", row), ("rows:3", row), ("rows:4", ROWS["plain"][0])], tally)
    what = "examples with a field that the tokens do not contain in full"
    assert tally == {f"{what}: source": 2, f"{what}: tools[].name": 2}
    assert set(tally.first.values()) == {"rows:2"}


def test_a_weight_in_the_prompt_changes_neither_the_prompt_nor_the_key(make_encoder, tokenizer):
    chosen = [*WHOLE["chosen"], user(KIND), bot(BLUE)]
    rejected = [*WHOLE["chosen"], user(KIND), bot(GREEN)]
    (expected,) = make_encoder()([("rows:1", {"chosen": chosen, "rejected": rejected})], Tally())
    weighted = [chosen[0], chosen[1] | {"weight": 0}, *chosen[2:]]
    (found,) = make_encoder()([("rows:1", {"chosen": weighted, "rejected": rejected})], Tally())
    assert sides_of(found, tokenizer) == sides_of(expected, tokenizer)
    assert found.key == expected.key


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": path.stem, "paths": [str(path)]}


def prepare(tmp_path, sources, **changes):
    given = {"kind": "preference", "chat_template": "chatml", "sequence_length": 96, "eval_fraction": 0.2}
    given |= {"tokenizer": {"vocab_size": 300}, "cache_dir": str(tmp_path / "cache"), "sources": sources}
    return prepare_data(PreferenceDataConfig(**(given | changes)))


def segments_of(batch, row):
    """(kind, ids, labels, margin) of each segment of a row; what is not theirs must be padding."""
    kinds = batch["segment_kinds"][row]
    segments = batch["segments"][row]
    number = int((kinds > 0).sum())
    assert set(segments.tolist()) - {-1} == set(range(number))
    assert not kinds[number:].any()
    found = []
    for index in range(number):
        (own,) = torch.where(segments == index)
        assert own.tolist() == list(range(own[0], own[-1] + 1))
        assert batch["position_ids"][row][own].tolist() == list(range(len(own)))
        margin = float(batch["margins"][row, index]) if "margins" in batch else 0.0
        ids = batch["input_ids"][row][own].tolist()
        labels = batch["shift_labels"][row][own].tolist()
        found.append((int(kinds[index]), ids, labels, margin))
    padding = segments == -1
    assert (batch["shift_labels"][row][padding] == -100).all()
    begun = (batch["position_ids"][row][padding] == 0).nonzero()[:2].flatten().tolist()
    longest = [*begun, int(padding.sum()), 1][1]
    assert batch["position_ids"][row][padding].tolist() == [i % longest for i in range(int(padding.sum()))]
    return found


def pairs(count, first=0):
    return [{"prompt": f"count to {i}: ", "chosen": "one " * (1 + i % 7), "rejected": f"no {i}"}
            for i in range(first, first + count)]  # fmt: skip


def documents_of(dataset):
    return [
        (ids, mask, part.segments[number].tolist())
        for store in dataset.stores
        for part in store.parts
        for number, (ids, mask) in enumerate(
            zip(np.split(part.tokens, part.ends)[:-1], np.split(part.loss_mask, part.ends)[:-1], strict=True)
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_rows_hold_whole_pairs_apart_from_each_other(tmp_path, packing):
    scored = [row | {"margin": 3} for row in pairs(20, 100)] + [WHOLE]
    sources = [write(tmp_path / "one.jsonl", pairs(60)), write(tmp_path / "two.jsonl", scored)]
    bundle = prepare(tmp_path, sources, packing=packing)
    assert isinstance(bundle.train, JoinedDataset)
    batch = bundle.collate(bundle.train.__getitems__(range(len(bundle.train))))
    (held_out,) = {len(rows[0]["segment_kinds"]) for rows in bundle.eval.values()}
    assert held_out == batch["segment_kinds"].shape[1], "shapes are the same for all data"
    assert {key: value.dtype for key, value in batch.items()} == dict.fromkeys(
        ("input_ids", "shift_labels", "position_ids", "segments", "segment_kinds"), torch.int64
    ) | {"margins": torch.float32}
    found = []
    rows = [segments_of(batch, row) for row in range(len(bundle.train))]
    for row in rows:
        assert packing == "best_fit" or len(row) == 2
        assert [kind for kind, *_ in row] == [CHOSEN, REJECTED] * (len(row) // 2)
        found += zip(row[::2], row[1::2], strict=True)
    assert batch["segment_kinds"].shape[1] == max(map(len, rows))
    expected = []
    for ids, mask, ((_, _, first), _) in (
        each for rows in bundle.train.datasets for each in documents_of(rows)
    ):
        labels = [int(token) if counts else -100 for token, counts in zip(ids, mask, strict=True)]
        expected.append((ids[:first].tolist(), labels[1:first], ids[first:].tolist(), labels[first + 1 :]))
    given = [(c[1], c[2][:-1], r[1], r[2][:-1]) for c, r in found]
    assert sorted(given) == sorted(expected)
    assert all(side[2][-1] == -100 for pair in found for side in pair)
    assert {(c[3], r[3]) for c, r in found} == {(0.0, 0.0), (3.0, 0.0)}
    assert len(expected) + sum(len(documents_of(rows)) for rows in bundle.eval.values()) == 81


def test_unpaired_answers_stand_beside_those_of_the_next_example(tmp_path):
    rows = [{"prompt": f"count to {i}: ", "completion": f"{i} is it", "label": i % 2 == 0} for i in range(30)]
    rows += pairs(10, 50)
    bundle = prepare(
        tmp_path, [write(tmp_path / "a.jsonl", rows)], examples="unpaired", eval_fraction=0.0, packing="none"
    )
    documents = documents_of(bundle.train)
    batch = bundle.train.__getitems__(range(len(bundle.train)))
    for row, (ids, _, segments) in enumerate(documents):
        there = [each for each in segments if each[0]]
        found = segments_of(batch, row)
        assert [kind for kind, *_ in found] == [kind for kind, *_ in there] + [MISMATCHED] * len(there)
        other, _, theirs = documents[(row + 1) % len(documents)]
        starts = np.cumsum([0, *(length for *_, length in theirs)])
        at = 0
        for place, (_, prompt, length) in enumerate(there):
            behind = place if theirs[place][0] else 0
            answer = other[starts[behind] + theirs[behind][1] : starts[behind + 1]].tolist()
            _, given, labels, _ = found[len(there) + place]
            assert given == ids[at : at + prompt].tolist() + answer
            assert labels == [-100] * (prompt - 1) + answer + [-100]
            at += length


def digits(folder):
    """A tokenizer of bytes."""
    train_tokenizer([], 257).save_pretrained(str(folder / "digits"))
    return folder / "digits"


def test_answers_of_others_are_cut_where_the_row_ends(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    long = "0123456789"  # a token each, in this tokenizer
    rows = [
        {
            "prompt": (long if i % 2 else "8") + ":",
            "completion": "7" if i % 2 else f"{i}{long * 2}",
            "label": True,
        }
        for i in range(8)
    ]
    source = write(tmp_path / "a.jsonl", rows)
    tokenizer = {"pretrained": str(digits(tmp_path))}
    given = {"examples": "unpaired", "eval_fraction": 0.0, "tokenizer": tokenizer}
    bundle = prepare(tmp_path, [source], sequence_length=45, **given)
    batch = bundle.train.__getitems__(range(len(bundle.train)))
    found = [each for row in range(len(bundle.train)) for each in segments_of(batch, row)]
    assert [kind for kind, *_ in found].count(MISMATCHED) == 8
    assert "4 mismatched answers (of another example than their prompt, to estimate" in caplog.text
    ends = Counter(ids[-1] == bundle.tokenizer.eos_token_id for kind, ids, *_ in found if kind == MISMATCHED)
    assert ends == {True: 4, False: 4}


RECIPE = """\
name: judged
max_steps: 2
model: {kind: causal_lm, architecture: llama, hidden_size: 32, num_layers: 2, num_heads: 2}
objective: {kind: "support.step_samples:loss"}
batch: {micro_batch_size: 2}
"""


@pytest.mark.slow
def test_both_sides_are_shown_and_a_bad_row_is_one_line(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    recipe = tmp_path / "recipe.yaml"
    rows = [*pairs(12), {"prompt": "say ", "chosen": "a"}]
    write(path, rows)
    data = (
        f"data: {{kind: preference, paths: [{path}], chat_template: chatml, cache_dir: {tmp_path}/cache}}\n"
    )
    recipe.write_text(RECIPE + data)
    command = ["inspect", "--config", str(recipe), f"runs_dir={tmp_path}"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"error: {path}:13: a pair with one side missing: there is no 'rejected'\n")
    recipe.write_text(
        RECIPE + data.replace("paths: [", "sources: [{bad_records: skip, paths: [").replace("],", "]}],", 1)
    )
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "bad records: 1" in shown
    assert "--- chosen ---\ncount to " in shown
    assert shown.count("--- chosen ---") == shown.count("--- rejected ---")
    assert "⟦no " in shown
    assert main([*command, "objective.kind=kto"]) == 0
    kto = capsys.readouterr().out
    segments = [each.partition(" ---\n") for each in kto.partition("row 1: ")[2].split("--- ")[1:]]
    in_loss = {kind: {"⟦" in text for name, _, text in segments if name == kind} for kind, *_ in segments}
    assert (in_loss["chosen"], in_loss["rejected"], in_loss["mismatched"]) == ({True}, {True}, {False})


@pytest.mark.slow
def test_answers_of_one_kind_alone_are_an_error_until_the_recipe_says_so(tmp_path, capsys):
    path = tmp_path / "judged.jsonl"
    recipe = tmp_path / "recipe.yaml"
    write(path, [{"prompt": f"count to {i}: ", "completion": f"{i} is it", "label": True} for i in range(40)])
    data = (
        f"data: {{kind: preference, paths: [{path}], eval_fraction: 0, sequence_length: 64, "
        f"cache_dir: {tmp_path}/cache}}\n"
    )
    recipe.write_text(RECIPE.replace('"support.step_samples:loss"', "kto") + data)
    command = ["--config", str(recipe), f"runs_dir={tmp_path}", "wandb.mode=disabled"]
    assert train(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "the training data has 40 desirable and 0 undesirable ones" in error
    assert "objective.undesirable_weight: 0" in error
    assert train([*command, "objective.undesirable_weight=0"]) == 0
    assert train([*command, "objective.undesirable_weight=0", "objective.desirable_weight=0"]) == 2
    assert "so nothing is learned; give one of them a weight above 0" in capsys.readouterr().err


POSITIONS = 64


def judge(folder, *overrides, kind="dpo", longest=50, **data):
    """The exit code of a run over rows of 240 tokens, of a model with learned positions for 64 of them."""
    rows = [
        {"prompt": f"{i}:", "chosen": "1" * (20 + i), "rejected": "2" * (longest - 4)} for i in range(10, 30)
    ]
    write(folder / "pairs.jsonl", rows)
    data = {"kind": "preference", "paths": [str(folder / "pairs.jsonl")], "sequence_length": 240} | data
    data |= {"eval_fraction": 0.3, "tokenizer": {"pretrained": str(digits(folder))}}
    model = {"kind": "causal_lm", "architecture": "gpt2", "num_layers": 1, "num_heads": 2, "hidden_size": 16}
    recipe = write_recipe(
        folder,
        max_steps=2,
        model=model | {"max_sequence_length": POSITIONS},
        data=data | {"cache_dir": str(folder / "cache")},
        objective={"kind": kind},
        run_dir=str(folder / "run"),
        eval={"every": 2},
    )
    return train(["--config", str(recipe), *overrides])


@pytest.mark.slow
@pytest.mark.parametrize(
    "packing", ["best_fit", "none"]
)  # in the second, padding is longer than the positions
def test_a_row_may_be_longer_than_the_positions_which_restart_at_each_answer(tmp_path, packing):
    assert judge(tmp_path, packing=packing, longest=POSITIONS) == 0
    assert main(["evaluate", str(tmp_path / "run")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_an_answer_that_the_positions_do_not_reach_is_refused_and_left_out_as_advised(tmp_path, capsys, kind):
    assert judge(tmp_path, kind=kind, longest=POSITIONS + 1) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "the longest answer has 65 tokens with its prompt, but the model has 64 positions" in error
    assert "set data.answer_length=64 to leave such examples out and count them" in error
    assert judge(tmp_path, "data.answer_length=64", kind=kind, longest=POSITIONS + 1) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "20 examples dropped" in error
    assert "data.too_long=error names the first" in error
    strict = ("data.answer_length=64", "data.too_long=error")
    assert judge(tmp_path, *strict, kind=kind, longest=POSITIONS + 1) == 2
    assert "pairs.jsonl:1: the answers, each with" in capsys.readouterr().err.splitlines()[-1]


def test_too_few_examples_are_no_lack_of_text(tmp_path):
    with pytest.raises(
        DataError, match=r"^data has 0 examples to train on \(20 more are held out\): add exam"
    ):
        prepare(tmp_path, [write(tmp_path / "a.jsonl", pairs(20))], eval_fraction=0.999)
    with pytest.raises(
        DataError, match=r"has 1 examples .*; unpaired answers need two examples, because each is"
    ):
        prepare(tmp_path, [write(tmp_path / "b.jsonl", pairs(1))], eval_fraction=0.0, examples="unpaired")


def test_a_template_can_read_judged_rows_itself(make_encoder, tokenizer):
    template = (
        "{% for turn in messages %}{% if turn.role == 'user' %}{{ turn.row.ask }}{% else %}"
        "{% generation %} {{ turn.row[turn.content] }}{{ eos_token }}{% endgeneration %}"
        "{% endif %}{% endfor %}"
    )
    row = {"ask": "what is the sky?", "chosen": "it is blue", "rejected": "it is green", "margin": 3}
    [document] = make_encoder(template, layout="row", append_eos=False)([("rows:1", row)], Tally())
    assert document.margin is None  # of the row the template alone knows what it means
    texts = [f"what is the sky? it is {colour}{END}" for colour in ("blue", "green")]
    assert document.ids.tolist() == [id for text in texts for id in tokenizer.encode(text)]
    assert tokenizer.decode(document.ids[document.loss_mask]) == f" it is blue{END} it is green{END}"
    liked = {"ask": "be kind", "completion": "it is", "label": False}
    encoder = make_encoder(template, layout="row", append_eos=False, examples="unpaired")
    [document] = encoder([("rows:1", liked)], Tally())
    assert document.segments[0].tolist()[0] == REJECTED
    assert tokenizer.decode(document.ids[document.loss_mask]) == f" it is{END}"


def test_of_an_answer_its_content_can_count_alone(make_encoder, tokenizer):
    ended = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token + '\n' }}{% endfor %}"
    answers = [{"role": "assistant", "content": said} for said in ("it is blue", "it is")]
    row = {"prompt": [user("be kind")], "chosen": answers[:1], "rejected": answers[1:]}
    encoder = make_encoder(ended, learn_from="content", append_eos=False)
    [document] = encoder([("rows:1", row)], Tally())
    assert tokenizer.decode(document.ids[document.loss_mask]) == f"it is blue{END}it is{END}"
    assert document.ids[-1] == tokenizer.eos_token_id  # nothing stands behind it
