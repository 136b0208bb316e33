"""Finding and reading text: what is taken, in which order, and one clear line for what cannot be."""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path

import pytest

from pipeline.data.sources import digest_sources, find_sources, read_documents
from pipeline.errors import DataError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def names(paths):
    return [source.path.name for source in find_sources([str(path) for path in paths])]


def documents(*paths, text_field="text"):
    return list(read_documents(find_sources([str(path) for path in paths]), text_field))


def test_a_folder_is_read_in_sorted_order_with_all_below_it(tmp_path):
    for name in ("b.md", "a/z.txt", "a/c.PY", "c.rst", "d.jsonl", "x.bin", ".hidden.txt", ".git/e.txt"):
        write(tmp_path / name, "x")
    assert names([tmp_path]) == ["c.PY", "z.txt", "b.md", "c.rst", "d.jsonl"]


def test_globs_and_overlapping_entries_take_a_file_once(tmp_path):
    write(tmp_path / "one.txt", "1")
    write(tmp_path / "sub/two.txt", "2")
    assert names([tmp_path / "*.txt"]) == ["one.txt"]
    assert names([tmp_path / "**" / "*.txt"]) == ["one.txt", "two.txt"]
    assert names([tmp_path / "sub", tmp_path, tmp_path / "one.txt"]) == ["two.txt", "one.txt"]
    write(tmp_path / "odd[1].txt", "a name, no glob")
    assert names([tmp_path / "odd[1].txt"]) == ["odd[1].txt"]


def test_one_document_a_file_or_a_line(tmp_path):
    write(tmp_path / "a.txt", "\ufeffone\r\ntwo\n")
    write(tmp_path / "b.txt", " \n")
    write(tmp_path / "c.jsonl", '{"text": "é"}\n\n{"text": ""}\n{"text": "last", "id": 3}')
    assert documents(tmp_path) == ["one\r\ntwo\n", "é", "last"]


def test_the_digest_is_of_content_and_order(tmp_path):
    def digest(folder):
        return digest_sources(find_sources([str(folder)]))

    write(tmp_path / "1/a.txt", "one")
    write(tmp_path / "1/b.txt", "two")
    write(tmp_path / "2/x.txt", "one")
    write(tmp_path / "2/y.md", "two")
    write(tmp_path / "3/x.txt", "onetwo")
    write(tmp_path / "3/y.txt", "")
    assert digest(tmp_path / "1") == digest(tmp_path / "2")
    assert digest(tmp_path / "1") != digest(tmp_path / "3")
    assert digest(tmp_path / "1")[1] == 6


def test_the_standard_library_is_source_and_topics_without_tests():
    sources = find_sources(["python_stdlib"])
    root = Path(sysconfig.get_path("stdlib"))
    relative = {source.path.relative_to(root).as_posix(): source.kind for source in sources}
    assert relative["argparse.py"] == "stdlib_source"
    assert relative["pydoc_data/topics.py"] == "stdlib_topics"
    assert not [name for name in relative if re.search(r"(^|/)(tests?|idle_test|site-packages)/", name)]
    assert 300 < len(sources) < 1500
    topics = [source for source in sources if source.kind == "stdlib_topics"]
    texts = list(read_documents(topics, "text"))
    assert len(texts) > 50
    assert any('The "with" statement' in text for text in texts)


def one_line(paths, text_field="text"):
    """The error of reading `paths`: a DataError of one line."""
    with pytest.raises(DataError) as caught:
        documents(*paths, text_field=text_field)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_path_names_its_neighbour(tmp_path):
    write(tmp_path / "corpus/train.txt", "x")
    message = one_line([tmp_path / "corpus/trian.txt"])
    assert "trian.txt does not exist" in message
    assert message.endswith(f"did you mean {tmp_path}/corpus/train.txt?")
    assert one_line([tmp_path / "corpsu/train.txt"]).endswith(f"did you mean {tmp_path}/corpus?")
    assert "did you mean" not in one_line([tmp_path / "zzz"])
    assert one_line(["python_stdlb"]).endswith("did you mean python_stdlib?")


def test_no_usable_file(tmp_path):
    write(tmp_path / "a.parquet", "x")
    (tmp_path / "empty").mkdir()
    assert "only 1 other files; expected files that end in .txt .md .rst .py .jsonl" in one_line([tmp_path])
    assert "the folder" in one_line([tmp_path / "empty"])
    assert "the glob" in one_line([tmp_path / "*.txt"])
    assert "expected one of .txt .md" in one_line([tmp_path / "a.parquet"])


def test_not_utf8(tmp_path):
    path = write(tmp_path / "latin.txt", b"caf" + b"\xe9 au lait")
    assert f"{path}: not UTF-8: byte 0xe9 at byte offset 3" in one_line([path])
    lines = write(tmp_path / "lines.jsonl", b'{"text": "good"}\n{"text": "caf\xe9"}\n')
    assert f"{lines}: not UTF-8: byte 0xe9 at byte offset 30" in one_line([lines])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not a line of JSON: Expecting ',' delimiter"),
        ("[1, 2]", "is a list; expected an object with a field 'text'"),
        ("null", "is a null; expected an object"),
        ('{"body": "a", "id": 1}', "no field 'text'; its fields: 'body', 'id'"),
        ("{}", "its fields: none"),
        ('{"text": 3}', "field 'text' is a number; expected a string"),
        ('{"text": null}', "field 'text' is a null"),
        ('{"text": "\\ud800"}', "no valid text: surrogates not allowed"),
        ('{"text": ' + "9" * 5000 + "}", "not a line of JSON"),
    ],
)
def test_a_bad_line_of_jsonl(tmp_path, line, message):
    path = write(tmp_path / "data.jsonl", json.dumps({"text": "good"}) + "\n\n" + line + "\n")
    found = one_line([path])
    assert found.startswith(f"{path}:3: ")
    assert message in found


def test_another_text_field(tmp_path):
    path = write(tmp_path / "data.jsonl", '{"body": "a"}\n')
    assert documents(path, text_field="body") == ["a"]
