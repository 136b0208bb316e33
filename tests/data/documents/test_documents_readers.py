"""Reading files of every kind, compressed and not; and what a bad record, row or file leads to."""

from __future__ import annotations

import io
import json
import re

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from documents_support import COMPRESS, one_line, parts_of, read, source, texts, write
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.documents import streams
from pipeline.data.documents.readers import read_csv
from pipeline.data.documents.records import BadRecordPolicy, Tally
from pipeline.data.documents.streams import FileSpan
from pipeline.errors import DataError

ROWS = [{"text": "one\nline two", "id": 1}, {"text": 'é "quoted", 😀', "id": 2}, {"text": "last", "id": 3}]


def as_csv(delimiter):
    lines = ["text", "id"], *([row["text"].replace('"', '""'), row["id"]] for row in ROWS)
    return "".join(f'"{text}"{delimiter}{number}\r\n' for text, number in lines).encode()


def as_arrow(stream):
    sink = io.BytesIO()
    table = pa.Table.from_pylist(ROWS)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


def as_parquet(rows=ROWS, **settings):
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, **settings)
    return sink.getvalue()


def as_feather():
    sink = io.BytesIO()
    pyarrow.feather.write_feather(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


FILES = {
    "a.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "b.csv": as_csv(","),
    "c.tsv": as_csv("\t"),
    "d.parquet": as_parquet(row_group_size=2),
    "e.arrow": as_arrow(stream=True),
    "f.arrow": as_arrow(stream=False),
    "g.feather": as_feather(),
}


FORMS = [
    (name, compression) for name in FILES for compression in (COMPRESS if name[0] in "abc" else ("",))
]  # tables have compression of their own


@pytest.mark.parametrize(("name", "compression"), FORMS)
def test_rows_are_the_same_in_every_format(tmp_path, name, compression):
    path = write(tmp_path / (name + compression), COMPRESS[compression](FILES[name]))
    found = read(source(path), tmp_path)
    values = [{**record, "id": int(record["id"])} for _, record in found]  # CSV knows text alone
    assert values == ROWS
    assert [where.rsplit(":", 1)[1] for where, _ in found] in (
        ["1", "2", "3"],  # lines
        ["2", "4", "5"],  # the first row of a CSV names the fields
        [" row 1", " row 2", " row 3"],
    )


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_file_of_text_is_one_document(tmp_path, compression):
    path = write(tmp_path / f"a.md{compression}", COMPRESS[compression]("\ufeffone\r\ntwo é\n".encode()))
    assert read(source(path), tmp_path) == [(str(path), "one\r\ntwo é\n")]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_may_be_put_together(tmp_path, suffix):
    halves = [b'{"text": "a', b'b"}\n{"text": "c"}\n']
    path = write(tmp_path / f"a.jsonl{suffix}", b"".join(map(COMPRESS[suffix], halves)))
    assert texts(source(path), tmp_path) == ["ab", "c"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("harm", ["flipped", "behind", "none"])
def test_damaged_compression(tmp_path, suffix, harm):
    line = b'{"text": "%s"}\n' % b" ".join(str(number).encode() for number in range(9000))
    whole = COMPRESS[suffix](line)
    damaged = {
        "flipped": whole[:5000] + bytes([whole[5000] ^ 255, whole[5001] ^ 255]) + whole[5002:],
        "behind": whole + b"something else",
        "none": b"",
    }[harm]
    path = write(tmp_path / f"a.jsonl{suffix}", damaged)
    message = one_line(source(path, bad_records="skip"), tmp_path)
    assert str(path) in message
    if harm == "behind":
        assert "compression is damaged or cut short" in message


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_small_file_that_decompresses_without_an_end(tmp_path, monkeypatch, suffix):
    path = write(tmp_path / f"a.jsonl{suffix}", COMPRESS[suffix](b'{"text": "' + bytes(20_000_000)))
    monkeypatch.setattr(streams, "UNCHECKED_BYTES", 1 << 20)
    assert f"{path}: decompresses to more than 200 times its size" in one_line(source(path), tmp_path)
    few = write(tmp_path / f"b.txt{suffix}", COMPRESS[suffix](b"a" * 1_000_000))
    assert len(texts(source(few), tmp_path)[0]) == 1_000_000


def test_what_has_no_text_is_left_out_or_known(tmp_path):
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.txt", " \n\u2003")
    write(tmp_path / "c.txt", "")
    write(tmp_path / "d.jsonl", '\n{"text": "é"}\n  \n{"text": " "}\n{"text": "last", "id": 3}')
    assert texts(source(tmp_path), tmp_path) == ["one", "é", "last"]


def test_bad_records_are_skipped_and_counted_where_that_is_asked_for(tmp_path):
    write(
        tmp_path / "a.jsonl",
        b'{"text": "1"}\n{"text": "caf\xe9"}\n[]\n{"text"\n{"text": 2}\n{}\n{"text": "2"}\n',
    )
    write(tmp_path / "b.csv", b'text,id\n3,1\ncaf\xe9,2\n4,1,5\n"5"6,7\n8,9\n"open')
    write(tmp_path / "c.txt", b"\xff")
    write(tmp_path / "d.txt", b"good")
    write(tmp_path / "e.json", '[{"text": "row"}, 3]')
    write(tmp_path / "f.txt.gz", COMPRESS[".gz"](b"caf\xe9"))
    tally = Tally()
    found = texts(source(tmp_path, bad_records="skip"), tmp_path / "cache", tally)
    assert found == ["1", "2", "3", "8", "good", "row"]
    assert tally == {"bad records": 5 + 4 + 1 + 1 + 1}
    first = f"{tmp_path}/a.jsonl:2: not UTF-8: byte 0xe9 at byte offset 27; convert the file (iconv -t UTF-8)"
    assert tally.format_lines() == [f"bad records: 12 (first: {first} or remove it)"]


JSON_ROWS = [{"text": "one", "n": 1}, {"text": "[two]", "n": None}]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(
    ("content", "place"),
    [
        (json.dumps(JSON_ROWS), ": row "),
        ("\ufeff \n" + json.dumps(JSON_ROWS, indent=2) + "\n", ": row "),
        ("\n".join(map(json.dumps, JSON_ROWS)), ":"),
    ],
    ids=["list", "spaced list", "lines"],
)
def test_a_file_of_json_is_a_list_of_rows_or_a_row_a_line(tmp_path, suffix, content, place):
    path = write(tmp_path / f"rows.json{suffix}", COMPRESS[suffix](content.encode()))
    found = read(source(path), tmp_path)
    assert found == [(f"{path}{place}{number}", row) for number, row in enumerate(JSON_ROWS, start=1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text" "b"}]', ": not JSON: Expecting ':' delimiter: line 1 column 25"),
        ('[{"text": "a"}] [1]', ": not JSON: Extra data: line 1 column 17"),
        ('[{"text": "a"}, "b"]', ": row 2: is a string; expected an object with fields"),
    ],
)
def test_a_bad_file_of_json(tmp_path, content, message):
    path = write(tmp_path / "rows.json", content)
    assert one_line(source(path), tmp_path).startswith(f"{path}{message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'text,id\n"a\nb",1\nc\n', ":4: 1 fields, where the first row names 2"),
        (b'text,id\n"a"b,1\n', ":2: not a row of CSV: ',' expected after '\"'"),
        (b"text,id\na,\xff\n", ":2: not UTF-8; convert the file"),
        (b"te\xffxt\n", ":1: not UTF-8"),
    ],
)
def test_a_bad_row_of_csv(tmp_path, content, message):
    path = write(tmp_path / "data.csv", content)
    assert f"{path}{message}" in one_line(source(path), tmp_path)


def test_a_field_of_csv_may_be_long(tmp_path):
    path = write(tmp_path / "data.csv", "text\n" + "x" * 300_000)
    assert texts(source(path), tmp_path) == ["x" * 300_000]


@pytest.mark.slow
@given(
    rows=st.lists(
        st.lists(
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), min_size=2, max_size=2
        )
    ),
    ending=st.sampled_from(["\n", "\r\n"]),
)
def test_csv_comes_back_as_it_was_written(tmp_path_factory, rows, ending):
    import csv

    path = tmp_path_factory.mktemp("csv") / "data.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator=ending, quoting=csv.QUOTE_ALL).writerows([["a", "b"], *rows])
    span = FileSpan(str(path), "csv")
    found = [record for _, record in read_csv(span, BadRecordPolicy(False, Tally()), None)]
    assert found == [{"a": first, "b": second} for first, second in rows]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", as_parquet([{"text": "x"}, {"text": None}]), "row 2: field 'text' is a null"),
        ("a.parquet", as_parquet([{"text": b"x"}]), "row 1: field 'text' is a bytes; expected a string"),
        ("a.arrow", as_arrow(stream=True)[:-300], "cannot be read as Arrow"),
        ("a.feather", b"FEA1....", "cannot be read as Arrow"),  # version 1 of Feather
    ],
)
def test_a_bad_table(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    found = one_line(source(path), tmp_path)
    assert found.startswith(str(path))
    assert message in found


def test_a_text_in_a_table_that_is_not_utf8(tmp_path):
    column = pa.array([b"good", b"caf\xe9"]).view(pa.utf8())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path)
    assert str(path) in one_line(source(path), tmp_path)


def test_only_the_wanted_column_of_a_table_is_read(tmp_path):
    for name in ("d.parquet", "f.arrow"):
        path = write(tmp_path / name, FILES[name])
        [part] = parts_of(source(path), tmp_path)
        for wanted, expected in (("text", ["text"]), ("missing", ["text", "id"]), (None, ["text", "id"])):
            rows = part.pieces[0].read(BadRecordPolicy(False, Tally()), wanted)
            assert [list(row) for _, row in rows] == [expected] * 3


def test_another_text_field(tmp_path):
    path = write(tmp_path / "data.jsonl", '{"body": "a"}\n')
    assert texts(source(path, text_field="body"), tmp_path) == ["a"]


@pytest.mark.slow
def test_topics_of_the_standard_library(tmp_path):
    found = read(source("python_stdlib"), tmp_path)
    topics = [record for where, record in found if "topics.py: " in where]
    assert len(topics) > 50
    assert any('The "with" statement' in text for text in topics)


def test_a_cell_of_csv_with_turns_is_these_turns_unless_it_is_the_text_that_is_wanted(tmp_path):
    turns = '[{"role": "user", "content": "a"}]'
    turn = '{"from": "gpt", "value": "b"}'
    cells = [turns, turn, "[]", '[{"name": "a"}]', '{"a": 1}', '["role"]', "[role]", '{"role": ']
    rows = "".join('"' + cell.replace('"', '""') + '"\n' for cell in cells)
    path = write(tmp_path / "data.csv", "text\n" + rows)
    found = [record["text"] for _, record in read(source(path), tmp_path)]
    assert found == [json.loads(turns), json.loads(turn), *cells[2:]]
    assert texts(source(path), tmp_path) == cells


def test_json_in_a_table_is_what_it_stands_for(tmp_path):
    path = tmp_path / "data.parquet"

    def json_array(*values):
        return pa.ExtensionArray.from_storage(pa.json_(), pa.array(values, pa.string()))

    lists = pa.ListArray.from_arrays(
        pa.array([0, None, 4, 4], pa.int32()), json_array('{"c": [1]}', "null", None, '"d"')
    )
    structs = pa.StructArray.from_arrays(
        [lists, pa.array(['"d"', None, "e"])], ["a", "b"], mask=pa.array([False, False, True])
    )
    pq.write_table(pa.table({"text": structs}), path)
    found = [record["text"] for _, record in read(source(path), tmp_path)]
    assert found == [{"a": [{"c": [1]}, None, None, "d"], "b": '"d"'}, {"a": None, "b": None}, None]
    pq.write_table(pa.table({"text": json_array("{}", "{")}), path)
    message = (
        f"{path}: row 2: column 'text' has the type JSON and contains invalid JSON: Expecting property name"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        read(source(path), tmp_path)
