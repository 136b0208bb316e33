"""The same rows give the same tokens and the same loss mask, whatever container holds them."""

from __future__ import annotations

import csv
import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config.data_schema import ChatDataConfig, PreferenceDataConfig
from pipeline.data.prepared import prepare_documents
from pipeline.data.tokenizer import train_tokenizer

pytestmark = pytest.mark.slow

# Writes tools, thoughts, calls with their ids, and results.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(content):
    return {"role": "user", "content": content}


def bot(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"To {name}", "parameters": parameters},
    }


# Keys of objects are in one order throughout: a table has one order for all rows.
CITY = {"type": "string", "enum": ["Oslo", "Bergen"]}
HOUR = {"type": "integer", "description": "0 to 23"}
RESULT = {"role": "tool", "content": '{"leaves": "07:30", "late": null}', "name": "find"}
CHAT = [
    {
        "messages": [
            user("Oslo?"),
            bot(None, tool_calls=[call("find", city="Oslo", hour=7), call("find", hour=8)]),
            RESULT,
            bot("Half past seven, as “07:30”.\n", reasoning_content="It is\nearly."),
        ],
        "tools": [tool("find", city=CITY, hour=HOUR), tool("stop")],
    },
    {"messages": [user("Hi, you"), bot("Hello.", weight=0), user("Bye"), bot("Bye.", weight=1)]},
    {"messages": [user('[{"a": "b"}]'), bot("It is JSON.")], "tools": [tool("find", hour=HOUR)]},
    {"messages": [user("Now?"), bot("", tool_calls=[call("now")]), bot("It is 1.")], "tools": [tool("now")]},
]
PAIRS = [
    {"prompt": [user("Oslo?")], "chosen": [bot("", tool_calls=[call("find", city="Oslo")])],
     "rejected": [bot("No.")], "tools": [tool("find", city=CITY)], "score_chosen": 8.5, "score_rejected": 2},
    {"prompt": [{"role": "system", "content": "Be kind."}, user("Hi, you")], "chosen": [bot("Hello.\n")],
     "rejected": [bot("Go."), user("Why?"), bot("“So.”")]},
]  # fmt: skip
STRINGS = [
    {"prompt": "Say [1] ", "chosen": '{"a": 1}', "rejected": "[1]", "margin": 0.5},
    {"prompt": "Say “two”,\nnow: ", "chosen": "two", "rejected": "2"},
]
LABELLED = [
    {"prompt": [user("Oslo?")], "completion": [bot("It is, yes.")], "label": True},
    {"prompt": [user("Hi, you")], "completion": [bot("Go.\n")], "label": False},
]
KINDS = {
    "chat": (CHAT, ChatDataConfig, {"kind": "chat"}),
    "pairs": (PAIRS, PreferenceDataConfig, {"kind": "preference"}),
    "pairs of strings": (STRINGS, PreferenceDataConfig, {"kind": "preference"}),
    "labels": (LABELLED, PreferenceDataConfig, {"kind": "preference", "examples": "unpaired"}),
}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_csv(path, rows, delimiter=","):
    """A cell for each field of any row: text as it is, nested fields as JSON, nothing for null."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(names)
        for row in rows:
            values = [row.get(name) for name in names]
            writer.writerow(
                json.dumps(value) if isinstance(value, (list, dict)) else value for value in values
            )


def table(rows):
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])


def write_arrow(path, rows, make_writer):
    found = table(rows)
    with pa.OSFile(str(path), "wb") as file, make_writer(file, found.schema) as writer:
        writer.write_table(found, max_chunksize=1)


def save(path, rows):
    """Rows given to `datasets`: their structs become one."""
    datasets.Dataset.from_list(rows).save_to_disk(str(path))


def load_and_save(path, rows):
    """JSON lines as `datasets` reads them: values that differ in type become JSON text in the table."""
    file = path.with_suffix(".jsonl")
    file.write_bytes(lines(rows))
    cache = path.with_suffix(".cache")
    found = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))
    found.save_to_disk(str(path))
    found.to_parquet(str(path.with_suffix(".parquet")))


CONTAINERS = {
    "rows.jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "rows.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "rows.jsonl.zst": lambda path, rows: path.write_bytes(zstandard.compress(lines(rows))),
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1), "utf-8"),
    "lines.json": lambda path, rows: path.write_bytes(lines(rows)),
    "rows.csv": write_csv,
    "rows.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "rows.parquet": lambda path, rows: pq.write_table(table(rows), path),
    "file.arrow": lambda path, rows: write_arrow(path, rows, pa.ipc.new_file),
    "stream.arrow": lambda path, rows: write_arrow(path, rows, pa.ipc.new_stream),
    "rows.feather": lambda path, rows: pyarrow.feather.write_feather(table(rows), str(path)),
    "saved": save,
    "saved/data-00000-of-00001.arrow": lambda path, rows: save(path.parent, rows),
    "loaded": load_and_save,
    "loaded.parquet": lambda path, rows: load_and_save(path.with_suffix(""), rows),
}


TABLES = ("rows.csv", "rows.parquet")
EVERY_KIND = [f"{kind}-{name}" for kind in ("pairs", "labels") for name in TABLES]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = train_tokenizer(["hello there, questions and answers"] * 3, 300, ["<|im_start|>", "<|im_end|>"])
    made.chat_template = TEMPLATE
    made.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def prepare(tokenizer):
    """Write rows into a container and return all that is prepared of them."""

    def prepare(kind, container, folder):
        rows, config, given = KINDS[kind]
        folder.mkdir()
        CONTAINERS[container](folder / container, rows)
        place = str(folder / container)
        source = {"paths": [place]} if "." in container else {"dataset": place}
        prepared = prepare_documents(
            config(
                **given,
                sources=[source],
                tokenizer={"pretrained": str(tokenizer)},
                cache_dir=str(folder / "cache"),
                sequence_length=3000,
                eval_fraction=0,
                prepare_workers=1,
            )
        )
        (source,) = prepared.sources
        (part,) = source.train.parts
        files = {file.name: file.read_bytes() for file in part.folder.glob("train.*")}
        return {"text": prepared.tokenizer.decode(part.tokens), "tally": dict(source.tally), **files}

    return prepare


@pytest.fixture(scope="module")
def expected(prepare, tmp_path_factory):
    return {kind: prepare(kind, "rows.jsonl", tmp_path_factory.mktemp("rows") / "x") for kind in KINDS}


@pytest.mark.daily(*(f"chat-{name}" for name in CONTAINERS if name != "rows.jsonl"), *EVERY_KIND)
@pytest.mark.parametrize("container", [name for name in CONTAINERS if name != "rows.jsonl"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_container_does_not_change_a_token(prepare, expected, kind, container, tmp_path):
    assert prepare(kind, container, tmp_path / "x") == expected[kind]


def test_the_rows_are_read_as_they_are_meant(expected):
    """Else all containers could be equally wrong."""
    assert {kind: len(found["train.hashes"]) // 8 for kind, found in expected.items()} == {
        kind: len(rows) for kind, (rows, *_) in KINDS.items()
    }
    find = {"type": "function", "function": {"name": "find", "arguments": {"city": "Oslo", "hour": 7}}}
    assert f"<|im_start|>assistant\n{json.dumps(find)}{{" in expected["chat"]["text"]
    assert f"<|im_start|>system\n{json.dumps(CHAT[0]['tools'])}<|im_end|>" in expected["chat"]["text"]
    assert expected["pairs of strings"]["text"].startswith('Say [1] {"a": 1}<|endoftext|>Say [1] [1]<')
