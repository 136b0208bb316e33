"""Documents from a function of the user's own."""

from __future__ import annotations

import sys

import pytest
from documents_support import one_line, parts_of, read, source, write

MODULE = """
def texts(count, word="text"):
    for number in range(count):
        yield f"{word} {number}" if number % 2 else {"text": f"{word} {number}"}

def mixed():
    return ["a", 3, {"text": "b"}]

def nothing():
    return None

def one():
    return "a string is iterable, but meant as one document"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(tmp_path / "own_documents.py", MODULE)
    yield "own_documents"
    sys.modules.pop("own_documents", None)


def test_texts_and_dicts(module, tmp_path):
    config = source(iterable=f"{module}:texts", args={"count": 3})
    assert read(config, tmp_path) == [
        ("own_documents:texts: item 1", {"text": "text 0"}),
        ("own_documents:texts: item 2", "text 1"),
        ("own_documents:texts: item 3", {"text": "text 2"}),
    ]
    assert len(read(config.model_copy(update={"max_documents": 2}), tmp_path)) == 2


def test_the_digest_is_of_path_arguments_and_source(module, tmp_path):
    def digest(name="texts", **args):
        [part] = parts_of(source(iterable=f"{module}:{name}", args=args), tmp_path)
        return part.digest

    found = [digest(count=3), digest(count=4), digest(count=3, word="x"), digest("mixed")]
    assert digest(count=3) == found[0]
    write(tmp_path / "own_documents.py", MODULE + "\n# another source\n")
    found.append(digest(count=3))
    assert len(set(found)) == 5


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("texs", {}, "did you mean 'texts'?"),
        ("texts", {}, "cannot be called with (): missing a required argument: 'count'; change args"),
        ("texts", {"count": 1, "colour": 2}, "unexpected keyword argument 'colour'"),
        ("nothing", {}, "returned a null; expected an iterable"),
        ("one", {}, "returned a string; expected an iterable"),
        ("mixed", {}, "item 2 is a number; expected a string or a dict"),
    ],
)
def test_what_cannot_be_read(module, tmp_path, name, args, message):
    assert message in one_line(source(iterable=f"{module}:{name}", args=args), tmp_path)


def test_an_item_of_another_type_can_be_skipped(module, tmp_path):
    found = read(source(iterable=f"{module}:mixed", bad_records="skip"), tmp_path)
    assert [record for _, record in found] == ["a", {"text": "b"}]


def test_an_argument_that_is_no_plain_value(module, tmp_path):
    config = source(iterable=f"{module}:texts", args={"count": {1, 2}})
    assert "args contain a value that is not JSON" in one_line(config, tmp_path)
