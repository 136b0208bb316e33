"""Text, JSONL, CSV, Parquet, Arrow, data sets, conversations and tokenizers."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

from bad_inputs.case import Case, Content, nightly


def paths(wrong: str, path: str, *says: str, **files: Content) -> Case:
    """One path is wrong."""
    given = {"data.paths": [path], "data.eval_fraction": 0}
    return Case(
        wrong, says, recipe=given, files={name.replace("__", "."): each for name, each in files.items()}
    )


def file(wrong: str, name: str, content: Content, *says: str, **recipe: Any) -> Case:
    """One file is wrong: the error names it, and the line or row."""
    given = {"data.paths": ["{here}/" + name], "data.eval_fraction": 0}
    given |= {f"data.{key}": each for key, each in recipe.items()}
    return Case(wrong, [name, *says], recipe=given, files={name: content})


def table(**columns: list[Any]) -> Content:
    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.feather
        import pyarrow.parquet

        given = pa.table(columns)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(given, path)
        else:
            pyarrow.feather.write_feather(given, path, compression="uncompressed")

    return write


def cut(make: Content, share: float) -> Content:
    def write(path: Path) -> None:
        assert callable(make)
        make(path)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return write


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(target: str) -> Content:
    return lambda path: path.symlink_to(target)


GOOD = '{"text": "first"}\n{"text": "second"}\n'
LONG = {"text": ["a few words " * 50] * 10}

PATHS = [
    paths(
        "a folder that is not there",
        "{home}/text",
        "data.paths: {home}/text does not exist",
        "did you mean {home}/texts?",
    ),
    paths("an empty path", "", "data.paths: '' does not exist"),
    paths("a glob that finds nothing", "{here}/*.txt", "the glob {here}/*.txt has no files"),
    paths("a folder of other files", "{here}/f", "only files of other types (.pdf)", **{"f/a__pdf": "%PDF"}),
    paths("the library under another name", "python_stdlb", "does not exist", "did you mean python_stdlib?"),
    paths("a path of 5000 letters", "{here}/" + "a" * 5000, "data.paths", "File name too long"),
    paths(
        "a link to nothing",
        "{here}/f",
        "is a link to a file that does not exist",
        **{"f/a__txt": link("/nowhere")},
    ),
    paths("a pipe among the data", "{here}/p.txt", "p.txt is a pipe, a socket or a device", p__txt=pipe),
    paths("a device among the data", "/dev/zero", "/dev/zero is a pipe, a socket or a device"),
    paths("a folder with nothing but a pipe", "{here}/f", "expected files that end in", **{"f/a__txt": pipe}),
]

FILES = [
    file("an empty text", "a.txt", "", "data.paths: 1 files, all empty"),
    Case(
        "text shorter than a sequence",
        ["one sequence takes 33", "lower data.sequence_length"],
        recipe={"data.paths": ["{here}/a.txt"], "data.eval_fraction": 0},
        files={"a.txt": "a few words"},
    ),
    file(
        "text in latin-1",
        "a.txt",
        "caf\xe9 au lait".encode("latin-1"),
        "not UTF-8: byte 0xe9 at byte offset 3",
    ),
    file("a PDF", "a.pdf", "%PDF", "has no suffix that can be read"),
    file("a .json file of no rows", "a.json", "[]", "has any text"),
    file(
        "a .json file of one object", "a.json", '{"data": []}', "a.json: is one JSON object; expected a list"
    ),
    file("a .json file cut short", "a.json", '[{"text": "a"}, {"te', "a.json: not JSON"),
    file("a .json file of deep JSON", "a.json", "[" * 100_000, "a.json: not JSON"),
    file("a line of JSON cut off", "a.jsonl", GOOD + '{"text": "un', ":3: not a line of JSON"),
    file(
        "a line of JSON that is a list", "a.jsonl", GOOD + '["text"]\n', ":3: is a list; expected an object"
    ),
    file(
        "a line without the field",
        "a.jsonl",
        GOOD + '{"body": "x"}\n',
        ":3: no field 'text'",
        "data.text_field",
    ),
    file("a line whose text is a number", "a.jsonl", GOOD + '{"text": 3}\n', ":3: field 'text' is a number"),
    file("a line whose text is null", "a.jsonl", '{"text": null}\n', ":1: field 'text' is a null"),
    file("a text_field that is not there", "a.jsonl", GOOD, ":1: no field 'body'", text_field="body"),
    file("half a surrogate pair", "a.jsonl", '{"text": "\\ud800"}\n', ":1: field 'text' is no valid text"),
    file("a deep line of JSON", "a.jsonl", '{"text": ' + "[" * 100_000 + "\n", ":1: not a line of JSON"),
    file("a number of 5000 digits in a line", "a.jsonl", '{"text": ' + "9" * 5000 + "}\n", ":1: not a line"),
    file("a field's name of escapes", "a.jsonl", '{"\\u001b[2J": "x"}\n', ":1: no field 'text'", "\\x1b[2J"),
    file(
        "a thousand fields",
        "a.jsonl",
        json.dumps({f"field{n}": n for n in range(3000)}) + "\n",
        ":1: no field 'text'",
        "Set data.text_field",
    ),
    file("no gzip at all", "a.txt.gz", "text", "compression is damaged"),
    file("gzip cut short", "a.txt.gz", gzip.compress(os.urandom(5000))[:2000], "damaged or cut short"),
    file("no zstd at all", "a.jsonl.zst", "text", "damaged or cut short"),
    file("CSV without the field", "a.csv", "a,b\n1,2\n", "no field 'text'", "data.text_field"),
    file("CSV with a field too many", "a.csv", "text\na\na,b\n", ":3: 2 fields, where the first row names 1"),
    file("CSV that names a field twice", "a.csv", "text,text\na,b\n", ":1:", "'text' twice"),
    file("CSV with an open quote", "a.csv", 'text\n"a\n', "not a row of CSV"),
    file("no parquet at all", "a.parquet", b"PAR1", "cannot be read as parquet"),
    file(
        "parquet cut short",
        "a.parquet",
        cut(table(**LONG), 0.6),
        "cannot be read as parquet",
        "it may be incomplete",
    ),
    file("parquet without the field", "a.parquet", table(body=["x"]), "no field 'text'", "data.text_field"),
    file("parquet of numbers", "a.parquet", table(text=[1, 2]), "field 'text' is a number"),
    file("an empty Arrow file", "a.arrow", "", "is empty, so no Arrow file"),
    file("no Arrow at all", "a.arrow", b"ARROW1 and more", "cannot be read as Arrow"),
    file(
        "Arrow cut short",
        "a.feather",
        cut(table(**LONG), 0.6),
        "cannot be read as Arrow",
        "it may be incomplete",
    ),
]


def dataset(wrong: str, name: str, *says: str, split: str = "train", **files: Content) -> Case:
    source = {"dataset": name, "split": split}
    given = {"data.paths": None, "data.sources": [source], "data.eval_fraction": 0}
    return Case(
        wrong, says, recipe=given, files={key.replace("__", "."): each for key, each in files.items()}
    )


STATE = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "x", "_split": None}


def state(*names: str) -> str:
    return json.dumps(STATE | {"_data_files": [{"filename": name} for name in names]})


DATASETS = [
    dataset("a data set's folder that is not there", "{here}/d", "{here}/d: there is no such folder"),
    dataset(
        "a split that is not saved",
        "{here}/d",
        "has no split 'train'; its splits: test",
        **{"d/dataset_dict__json": '{"splits": ["test"]}'},
    ),
    dataset("a state that is no JSON", "{here}/d", "state.json: cannot be read", **{"d/state__json": "{"}),
    dataset("a state without rows", "{here}/d", "has no rows", **{"d/state__json": state()}),
    dataset(
        "a state that names nothing there",
        "{here}/d",
        "state.json: names 'x.arrow', which is not a file",
        **{"d/state__json": state("x.arrow")},
    ),
    dataset(
        "a state that points upwards",
        "{here}/d",
        "state.json: points outside of its folder: '../x.arrow'",
        **{"d/state__json": state("../x.arrow"), "x__arrow": "x"},
    ),
    dataset(
        "a state that points elsewhere",
        "{here}/d",
        "state.json: points outside of its folder: '/etc/passwd'",
        **{"d/state__json": state("/etc/passwd")},
    ),
    dataset(
        "a link in a state that leads elsewhere",
        "{here}/d",
        "points outside of its folder: 'x.arrow'",
        **{"d/state__json": state("x.arrow"), "d/x__arrow": link("/etc/passwd")},
    ),
    dataset(
        "a split that points upwards",
        "{here}/d",
        "dataset_dict.json: points outside of its folder",
        split="../../x",
        **{"d/dataset_dict__json": '{"splits": ["train", "../../x"]}', "d/train/state__json": state()},
    ),
    dataset(
        "a pipe in a state",
        "{here}/d",
        "names 'x.arrow', which is not a file in the folder",
        **{"d/state__json": state("x.arrow"), "d/x__arrow": pipe},
    ),
    dataset(
        "a card that points upwards",
        "{here}/d",
        "README.md: points outside of its folder",
        **{
            "d/README__md": "---\nconfigs:\n- config_name: default\n  data_files: ../secret.jsonl\n---\n",
            "secret__jsonl": GOOD,
        },
    ),
    dataset(
        "a card that points elsewhere",
        "{here}/d",
        "README.md: points outside of its folder",
        **{
            "d/README__md": "---\nconfigs:\n- config_name: default\n  data_files: {here}/secret.jsonl\n---\n",
            "secret__jsonl": GOOD,
        },
    ),
    dataset("an empty folder as a data set", "{here}/d", "cannot be loaded", **{"d/x/y": ""}),
    dataset("a data set that only the hub could have", "nobody/nothing", "nobody/nothing", "the hub"),
]

TURNS = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]


def chat(wrong: str, rows: Any, *says: str, **recipe: Any) -> Case:
    """Rows of conversations; recipe: further keys of data."""
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    given = {"data.paths": ["{here}/c.jsonl"], "data.eval_fraction": 0, "data.sequence_length": 64}
    given |= {f"data.{key}": each for key, each in recipe.items()}
    return Case(wrong, ["c.jsonl", *says], base="chat", recipe=given, files={"c.jsonl": text})


def template(wrong: str, text: Content, *says: str) -> Case:
    given = {"data.chat_template": "{here}/template.jinja", "data.eval_fraction": 0}
    return Case(wrong, says, base="chat", recipe=given, files={"template.jinja": text})


CHATS = [
    chat("a conversation of no known layout", [{"text": "x"}], ":1"),
    chat("messages that are a text", [{"messages": "hello"}], ":1", "expected a list of turns"),
    chat(
        "a turn that is a text", [{"messages": ["hello"]}], ":1", "turn 1 of 'messages'", "expected an object"
    ),
    chat(
        "an unknown role",
        [{"messages": [{"role": "narrator", "content": "x"}]}],
        ":1",
        "'narrator'",
        "system",
    ),
    chat("a turn without a role", [{"messages": [{"content": "x"}]}], ":1", "the role None"),
    chat(
        "a turn of a number",
        [{"messages": [{"role": "user", "content": 3}]}],
        ":1",
        "a number in place of text",
    ),
    chat(
        "a turn with a picture",
        [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
        ":1",
        "'image'",
        "has content of type 'image'; expected text",
    ),
    chat("a role of escapes", [{"messages": [{"role": "\x1b[2J", "content": "x"}]}], ":1", "x1b"),
    chat("another layout than the recipe's", [{"messages": TURNS}], ":1", layout="alpaca"),
    chat(
        "a conversation longer than a sequence",
        [{"messages": [TURNS[0], {**TURNS[1], "content": "a " * 500}]}],
        "tokens",
        "data.too_long: shorten",
        too_long="error",
    ),
    template(
        "a template that is not valid Jinja", "{% for x in %}", "the chat template is not valid Jinja: line 1"
    ),
    template(
        "a template that refuses", "{{ raise_exception('never') }}", "the chat template refuses", "never"
    ),
    template(
        "a template that divides by zero", "{{ 1 / 0 }}", "the chat template refuses", "division by zero"
    ),
    template(
        "a template that calls itself",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "the chat template refuses",
        "recursion",
    ),
    template(
        "a template that reaches for Python", "{{ messages.__class__.__mro__ }}", "the chat template refuses"
    ),
    template("a template that shows no answers", "{{ messages | length }}", "{% generation %}"),
    template("a template of a terabyte", "{{ 'a' * 10 ** 12 }}", "too much memory", "data.chat_template"),
    template("a pipe as a template", pipe, "data.chat_template", "it is a pipe", "chatml"),
    template("a template in latin-1", "caf\xe9".encode("latin-1"), "data.chat_template", "cannot be read"),
    Case(
        "a template that is not there",
        ["data.chat_template: chatlm cannot be read", "chatml"],
        base="chat",
        recipe={"data.chat_template": "chatlm"},
    ),
    Case(
        "no template at all",
        ["has no chat template", "set data.chat_template: chatml"],
        base="chat",
        recipe={"data.chat_template": None},
    ),
    *nightly(
        template(
            "a template without end",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "the chat template",
            "did not end within",
            "data.chat_template",
        ),
        template(
            "a template of an endless number",
            "{{ 10 ** (10 ** 10) }}",
            "did not end within",
            "data.chat_template",
        ),
        template(
            "a template of a hundred megabytes",
            "{% for a in range(1000) %}{{ 'a' * 100000 }}{% endfor %}",
            " characters, more than the limit of ",
            "data.chat_template",
        ),
    ),
]


def tokenizer(wrong: str, given: str, *says: str, **files: Content) -> Case:
    return Case(
        wrong,
        ["data.tokenizer.pretrained", *says],
        recipe={"data.tokenizer": {"pretrained": given}},
        files={name.replace("__", "."): each for name, each in files.items()},
    )


TOKENIZERS = [
    tokenizer("a tokenizer that is not there", "./nowhere", "./nowhere does not exist"),
    tokenizer("a tokenizer's file that is not there", "{here}/tokenizer.json", "does not exist"),
    tokenizer(
        "a folder without a tokenizer", "{here}/t", "has no tokenizer; name the one", **{"t/a__txt": "x"}
    ),
    tokenizer("a tokenizer that is no JSON", "{here}/tokenizer.json", "cannot load", tokenizer__json="{"),
    tokenizer("a tokenizer of other JSON", "{here}/tokenizer.json", "cannot load", tokenizer__json="[]"),
    tokenizer(
        "a tokenizer of deep JSON", "{here}/tokenizer.json", "cannot load", tokenizer__json="[" * 100_000
    ),
    tokenizer("an empty tokenizer", "{here}/tokenizer.json", "cannot load", tokenizer__json=""),
    tokenizer("a pipe as a tokenizer", "{here}/tokenizer.json", "a pipe or a device", tokenizer__json=pipe),
    tokenizer(
        "a pipe in a tokenizer's folder",
        "{here}/t",
        "'tokenizer.json' is a pipe",
        **{"t/tokenizer__json": pipe},
    ),
    tokenizer(
        "a device in a tokenizer's folder",
        "{here}/t",
        "'vocab.json' is a device",
        **{"t/vocab__json": link("/dev/zero"), "t/tokenizer__json": "{}"},
    ),
    tokenizer("a tokenizer that only the hub could have", "nobody/nothing", "nobody/nothing", "the hub"),
]

CASES = [*PATHS, *FILES, *DATASETS, *CHATS, *TOKENIZERS]
