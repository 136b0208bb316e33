"""Every string of a row is in its tokens, or its field is named in the tally with the first row's place."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from pipeline.config.data_schema import ChatDataConfig, PreferenceDataConfig
from pipeline.data.chat_layouts import find_unwritten_fields
from pipeline.data.chat_template import BUILT_IN
from pipeline.data.documents.records import Tally
from pipeline.data.prepared import chat_encoder, preference_encoder
from pipeline.data.prepared.chat_encoder import ChatEncoder
from pipeline.data.prepared.encoder import EncoderSettings
from pipeline.data.prepared.preference_encoder import PreferenceEncoder
from pipeline.data.tokenizer import get_token_id_bound, train_tokenizer

pytestmark = pytest.mark.slow

TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}TURN{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = "{% for call in m.tool_calls or [] %}CALL{% endfor %}"
AS_JSON = "{{ m.reasoning_content }}{{ m.content | trim }}{{ m.tool_calls | tojson if m.tool_calls }}"
AS_TAGS = (
    "{{ '<' + call.function.name + '>' }}"
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}"
)
AS_TEXT = "{{ {'call': call.function.name + call.function.arguments} | tojson }}"
TEMPLATES = {
    "chatml": BUILT_IN["chatml"],  # contents alone
    "calls as JSON": "{% if tools %}{{ tools | tojson }}{% endif %}" + TURNS.replace("TURN", AS_JSON),
    "calls as tags": "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    + TURNS.replace("TURN", "{{ m.name }}{{ m.content }}" + CALLS.replace("CALL", AS_TAGS)),
    "arguments as text": TURNS.replace("TURN", "{{ m.content }}" + CALLS.replace("CALL", AS_TEXT)),
}
ROWS = 10  # of each layout with each template
WORD = re.compile(r"w\d{4}")


class Rows:
    """Draws rows whose strings are of words that stand nowhere else."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def maybe(self, *options):
        return self._random.choice(options)

    def text(self):
        words = [f"w{next(self._numbers):04}" for _ in range(self.maybe(1, 1, 2, 3))]
        between = self.maybe(" ", "\n", '"', "é\\", "\n\n", "<|im_end|>", "', '")
        return between.join(words) + self.maybe("", "", "\n")

    def content(self):
        pieces = [{"type": "text", "text": self.text()} for _ in range(self.maybe(1, 2))]
        return self.maybe(self.text(), pieces)

    def some(self, **fields):
        """Some of the fields."""
        return {name: make() for name, make in fields.items() if self.maybe(True, False)}

    def call(self):
        arguments = self.some(city=self.text, days=lambda: [1, self.text()], hour=lambda: 7)
        inside = {"name": self.text(), "arguments": self.maybe(arguments, json.dumps(arguments))}
        return self.maybe(inside, {"type": "function", "function": inside, **self.some(id=self.text)})

    def tools(self):
        properties = {"city": {"type": "string", "description": self.text()}}
        tool = {"name": self.text(), "parameters": {"type": "object", "properties": properties}}
        tools = [self.maybe(tool, {"type": "function", "function": tool})]
        return self.maybe(tools, json.dumps(tools))

    def turns(self, names=("role", "content"), end="assistant"):
        roles = [self.maybe("user", "assistant", "tool") for _ in range(self.maybe(0, 1, 2))]
        found = []
        for role in [self.maybe("system", "user"), "user", *roles, end]:
            further = self.some(name=self.text, note=self.text, meta=lambda: {"of": [self.text()]})
            if role == "assistant":
                further |= self.some(reasoning_content=self.text, tool_calls=lambda: [self.call()])
            if role == "tool":
                further |= self.some(tool_call_id=self.text)
            found.append(dict(zip(names, (role, self.content()), strict=True)) | further)
        return found

    def further(self):
        return self.some(
            id=self.text, tools=self.tools, tags=lambda: [self.text(), 3, None, {"a": self.text()}]
        )


CHAT_LAYOUTS = {
    "messages": lambda rows: {"messages": rows.turns(), **rows.some(prompt=rows.text)},
    "sharegpt": lambda rows: {
        "conversations": rows.turns(("from", "value")),
        **rows.some(system=rows.text),
    },
    "alpaca": lambda rows: {
        "instruction": rows.text(),
        "output": rows.text(),
        **rows.some(input=rows.text, system=rows.text, text=rows.text),
    },
    "prompt_completion": lambda rows: {
        "prompt": rows.maybe(rows.text(), rows.turns(end="user")),
        "completion": rows.maybe(rows.text(), rows.turns()[-1:]),
    },
}


def pair(rows):
    return {"chosen": rows.text(), "rejected": rows.text()}


PAIR_LAYOUTS = {
    "trl": lambda rows: {**pair(rows), "prompt": rows.turns(end="user"), "chosen": rows.turns()[-1:]},
    "trl, strings": lambda rows: {"prompt": rows.text(), **pair(rows)},
    "sharegpt": lambda rows: {
        "conversations": rows.turns(("from", "value"), end="user"),
        "chosen": rows.turns(("from", "value"))[-1],
        "rejected": {"from": "gpt", "value": rows.text()},
        **rows.some(system=rows.text),
    },
    "alpaca": lambda rows: {
        "instruction": rows.text(),
        **pair(rows),
        **rows.some(input=rows.text, system=rows.text),
    },
    "intel": lambda rows: {"question": rows.text(), "system": rows.text(), **pair(rows)},
    "messages": lambda rows: {
        "messages": rows.turns(end="user"),
        "chosen": rows.turns()[-1],
        "rejected": rows.turns()[-1],
    },
}


def words_of(value, name=""):
    """(field, word) of all strings in a row; of JSON without strings the names of its fields."""
    if isinstance(value, str):
        if value[:1] in ("{", "["):
            inside = json.loads(value)
            yield from list(words_of(inside, name)) or ((name, key) for key in inside)
        else:
            yield from ((name, word) for word in WORD.findall(value))
    elif isinstance(value, list):
        for each in value:
            yield from words_of(each, f"{name}[]")
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from words_of(each, f"{name}.{key}".lstrip("."))


def dropped(tally, prefix):
    """Fields that a tally names, after a look at the rest of its entries."""
    assert set(tally.values()) == {1} or not tally
    assert tally.first == dict.fromkeys(tally, "rows:7")
    return {what.removeprefix(f"{prefix}: ") for what in tally if what.startswith(prefix)}


def check(row, text, fields):
    """A field is named if, and only if, some of its words are not there."""
    assert fields == {name for name, word in words_of(row) if word not in text}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = train_tokenizer(["hello there, questions and answers"] * 3, 300, ["<|im_start|>", "<|im_end|>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(str(folder))
    return made, folder


@pytest.fixture(scope="module")
def encoders(tokenizer):
    """One for each template and each of the two kinds."""
    own, folder = tokenizer
    found = {}
    for name, template in TEMPLATES.items():
        file = folder / f"{name}.jinja"
        file.write_text(template)
        given = {"paths": ["x"], "chat_template": str(file), "sequence_length": 100_000}
        for encoder, config in (
            (ChatEncoder, ChatDataConfig(kind="chat", **given)),
            (PreferenceEncoder, PreferenceDataConfig(kind="preference", **given)),
        ):
            made = EncoderSettings(config, folder, own.eos_token_id, get_token_id_bound(own), 1)
            found[name, encoder] = encoder(made)
    return found


@pytest.mark.parametrize("layout", CHAT_LAYOUTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_no_string_of_a_chat_row_is_lost_silently(tokenizer, encoders, template, layout):
    kept = 0
    for seed in range(ROWS):
        rows = Rows(f"{layout} {seed}")
        row = CHAT_LAYOUTS[layout](rows) | rows.further()
        tally = Tally()
        documents = encoders[template, ChatEncoder]([("rows:7", row)], tally)
        named = dropped(tally, chat_encoder.UNWRITTEN)
        for document in documents:
            check(row, tokenizer[0].decode(document.ids), named)
        # Else all that the assistant says are calls, which are not written.
        assert documents or chat_encoder.NO_ANSWER in tally
        kept += len(documents)
    assert kept > ROWS // 2


@pytest.mark.parametrize("layout", PAIR_LAYOUTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_no_string_of_a_pair_is_lost_silently(tokenizer, encoders, template, layout):
    for seed in range(ROWS):
        rows = Rows(f"{layout} {seed}")
        row = PAIR_LAYOUTS[layout](rows) | rows.further() | {"score_chosen": "2.5", "score_rejected": 1}
        tally = Tally()
        (document,) = encoders[template, PreferenceEncoder]([("rows:7", row)], tally)
        check(row, tokenizer[0].decode(document.ids), dropped(tally, preference_encoder.UNWRITTEN))


def test_a_number_in_an_unknown_field_of_a_turn_is_named():
    call = {"name": "add", "arguments": {"role": "sum", "value": 0}}
    turn = {"role": "assistant", "content": "0", "weight": 0, "wieght": 0, "train": False, "masked": True}
    row = {"messages": [turn, turn | {"tool_calls": [call]}], "tools": [{"type": "function", "strict": True}]}
    assert find_unwritten_fields(row, "assistant 0 add sum") == ["messages[].wieght", "messages[].masked"]
