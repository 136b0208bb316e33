"""Text that a run writes: after a prompt of its own kind of data, which is shown once."""

from __future__ import annotations

import json
import re

import pytest
from support.base_model import ANSWERS, conversations, write_base_model
from support.launch import write_recipe

import pipeline

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base_model(tmp_path_factory.mktemp("base"))


def judged():
    """The conversations, each with a wrong answer beside the right one."""
    for each in conversations():
        question, answer = each["messages"]
        yield {"prompt": [question], "chosen": [answer], "rejected": [{**answer, "content": "It is loud."}]}


def sampled(folder, base, kind="chat", prompt=None, **data):
    """The samples of a run of one step, its event of an evaluation, and the text that it was trained on."""
    path = folder / "rows.jsonl"
    rows = judged() if kind == "preference" else conversations()
    if kind == "text":
        rows = ({"text": each["messages"][0]["content"]} for each in rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"kind": kind, "paths": [str(path)], "sequence_length": 96, "packing": "none"} | data
    recipe = write_recipe(
        folder,
        max_steps=1,
        run_dir=str(folder / "run"),
        model={"kind": "causal_lm", "pretrained": str(base)},
        data={"eval_fraction": 0.2, "cache_dir": str(folder / "cache")} | data,
        objective={"kind": "simpo" if kind == "preference" else "causal_lm"},
        eval={"every": 1},
        sample={"max_new_tokens": 4, "every_eval": True} | ({} if prompt is None else {"prompt": prompt}),
    )
    with pipeline.Run(pipeline.load_settings(recipe)) as run:
        run.train()
        ids = [run._data.train[index]["input_ids"] for index in range(len(run._data.train))]
        trained = "".join(run._data.tokenizer.decode(row) for row in ids)
        text = run.sample()
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    events = [row for row in rows if row.get("event") == "sample"]
    return text, events[-1] if events else None, trained


@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_a_held_out_prompt_is_asked_through_the_template_and_shown_once(tmp_path, base, kind):
    text, event, trained = sampled(tmp_path, base, kind)
    question = re.match(r"user\n(What colour is .*\? \(\d+\))\nassistant\n", text)
    assert question, text
    assert question[1] not in trained
    assert question[1].split("?")[0].removeprefix("What colour is ") in ANSWERS
    assert event["prompt"] == question[0]
    assert event["prompt"] + event["text"] == text
    assert text.count("What colour") == 1


def test_what_the_recipe_asks_is_a_question_in_the_template(tmp_path, base):
    text, event, _ = sampled(tmp_path, base, prompt="What colour is snow?")
    assert event["prompt"] == "user\nWhat colour is snow?\nassistant\n"
    assert text.startswith(event["prompt"])


def test_data_without_an_answer_of_their_own_are_asked_in_the_template_too(tmp_path, base):
    text, _, _ = sampled(tmp_path, base, learn_from="all")
    assert text.startswith("user\nHello!\nassistant\n")


def test_a_training_prompt_is_asked_where_nothing_is_held_out(tmp_path, base):
    text, _, trained = sampled(tmp_path, base, eval_fraction=0.0, eval_sets={})
    assert text.split("\n")[1] in trained


def test_a_model_of_texts_continues_its_prompt(tmp_path, base):
    text, event, _ = sampled(tmp_path, base, "text", prompt="What colour")
    assert (event["prompt"], text) == ("What colour", "What colour" + event["text"])
