"""Parts: together they are the source, whatever is cut where; and what changes when a file does."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documents_support import COMPRESS, one_line, parts_of, read, source, texts, write
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.documents.part import find_parts, no_text_error, read_records
from pipeline.data.documents.records import Tally
from pipeline.data.documents.streams import DigestCache
from pipeline.errors import DataError

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)


def line(text):
    return json.dumps({"text": text}, ensure_ascii=False) + "\n"


def make(folder, files):
    """Files of lines or of text; returns the documents they hold, in order."""
    expected = []
    for number, (kind, content) in enumerate(files):
        name = folder / f"{number:03}{kind}"
        suffix = f".{kind.rsplit('.', 1)[1]}" if kind.count(".") == 2 else ""
        if ".jsonl" in kind:
            data = "".join(map(line, content))
            expected += [text for text in content if text.strip()]
        else:
            data = "".join(content)
            expected += [data.removeprefix("\ufeff")] if data.removeprefix("\ufeff").strip() else []
        write(name, COMPRESS[suffix](data.encode()))
    return expected


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    files=st.lists(
        st.tuples(
            st.sampled_from([".jsonl", ".txt", ".py", ".jsonl.gz", ".txt.zst"]), st.lists(TEXT, max_size=12)
        ),
        min_size=1,
        max_size=8,
    ),
    part_size=st.integers(4, 2000),
)
def test_the_parts_together_are_the_files_in_order(tmp_path_factory, files, part_size):
    folder = tmp_path_factory.mktemp("files")
    expected = make(folder, files)
    config = source(folder)
    if not any(path.stat().st_size for path in folder.iterdir()):
        assert "files, all empty" in one_line(config, folder)
        return
    assert texts(config, folder / ".cache", part_size=part_size) == expected


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    content=st.lists(st.binary(max_size=20), max_size=12), ending=st.booleans(), part_size=st.integers(4, 99)
)
def test_ranges_of_lines_are_the_lines_with_their_numbers(tmp_path_factory, content, ending, part_size):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = [line(item.hex()) if len(item) % 3 else "\n" for item in content]
    write(path, "".join(lines).removesuffix("" if ending else "\n"))
    expected = [
        (f"{path}:{number}", json.loads(text)) for number, text in enumerate(lines, start=1) if text.strip()
    ]
    if expected:
        assert read(source(path), path.parent, part_size=part_size) == expected


def test_a_parquet_file_is_cut_by_row_groups(tmp_path):
    rows = [{"text": f"document {number} " * 20} for number in range(50)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    config = source(path)
    assert len(parts_of(config, tmp_path, part_size=3000)) > 4
    found = read(config, tmp_path, part_size=3000)
    assert found == [(f"{path}: row {number}", row) for number, row in enumerate(rows, start=1)]


def some_files(folder, count, seed=0):
    numbers = random.Random(seed)
    for index in range(count):
        write(folder / f"{index:04}.txt", f"{index} " + "x" * numbers.randrange(200))


def digests(folder, **settings):
    parts = parts_of(source(folder, **settings), folder / ".cache", part_size=2000)
    return {part.digest: part for part in parts}


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), changed=st.integers(0, 39), size=st.integers(0, 1000))
def test_a_change_leaves_other_parts_alone(tmp_path_factory, seed, changed, size):
    folder = tmp_path_factory.mktemp("changes")
    some_files(folder, 40, seed)
    before = digests(folder)
    assert len(before) > 2
    path = write(folder / f"{changed:04}.txt", "new" + "y" * size)
    after = digests(folder)
    # A part that holds the file, and the rest of one that now ends with it.
    assert len(after.keys() - before.keys()) <= 3
    new = [piece.span.path for key in after.keys() - before.keys() for piece in after[key].pieces]
    assert str(path) in new
    write(folder / f"{changed:04}b.txt", "one more" + "z" * size)
    assert len(digests(folder).keys() - after.keys()) <= 3


def test_small_files_share_parts_and_large_ones_do_not(tmp_path):
    some_files(tmp_path, 300)
    write(tmp_path / "0100b.txt", "large" * 1000)
    parts = parts_of(source(tmp_path), tmp_path, part_size=4000)
    assert 10 < len(parts) < 100
    [large] = [part for part in parts if any("0100b" in piece.span.path for piece in part.pieces)]
    assert len(large.pieces) == 1


def test_what_is_added_behind_a_file_of_lines_changes_its_last_part(tmp_path):
    path = write(tmp_path / "a.jsonl", "".join(line(f"{number}" * 20) for number in range(200)))
    before = [part.digest for part in parts_of(source(path), tmp_path, part_size=1000)]
    with path.open("a") as file:
        file.write(line("one more"))
    after = [part.digest for part in parts_of(source(path), tmp_path, part_size=1000)]
    assert after[: len(before) - 1] == before[:-1]
    assert after != before


def test_the_digest_is_of_content_order_and_reading(tmp_path):
    def digest(folder, **settings):
        [part] = parts_of(source(tmp_path / folder, **settings), tmp_path / "cache")
        return part.digest, part.size

    write(tmp_path / "1/a.txt", "one")
    write(tmp_path / "1/b.txt", "two")
    write(tmp_path / "2/x.txt", "one")
    write(tmp_path / "2/y.md", "two")
    write(tmp_path / "3/x.txt", "two")
    write(tmp_path / "3/y.txt", "one")
    write(tmp_path / "4/x.txt", "onetwo")
    write(tmp_path / "5/x.jsonl", "one")
    write(tmp_path / "5/y.txt", "two")
    assert digest("1") == digest("2")
    assert digest("1")[1] == 6
    changed = [{"text_field": "body"}, {"bad_records": "skip"}, {"max_documents": 2}]
    others = [digest(folder)[0] for folder in "1345"] + [digest("1", **setting)[0] for setting in changed]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize("count", [1, 7, 99])
def test_max_documents_are_the_first_ones(tmp_path, count):
    content = [str(number) * 20 for number in range(50)]
    write(tmp_path / "a.jsonl", "".join(map(line, content)))
    write(tmp_path / "b.txt", "last")
    found = texts(source(tmp_path, max_documents=count), tmp_path / "cache", part_size=100)
    assert found == [*content, "last"][:count]


def test_a_source_without_text(tmp_path):
    for name in ("a.txt", "b.jsonl", "c.csv"):
        write(tmp_path / name, "")
    message = one_line(source(tmp_path), tmp_path / "cache")
    assert message == f"data.paths: 3 files, all empty (first: {tmp_path}/a.txt); add text"
    assert str(no_text_error(source(tmp_path), Tally({"bad records": 3}))) == (
        f"data source web: no document of {tmp_path} has any text; 3 bad records were skipped "
        "(bad_records: error shows the first); add text, or remove the source"
    )


@pytest.mark.parametrize("harm", ["changed", "replaced", "gone"])
def test_a_file_that_changes_after_it_was_found(tmp_path, harm):
    path = write(tmp_path / "a.txt", "one")
    [part] = find_parts(source(path), DigestCache(tmp_path / "cache"))
    if harm == "changed":
        path.write_text("other")
    elif harm == "replaced":
        write(tmp_path / "b", "two").replace(path)
    else:
        path.unlink()
    expected = "No such file" if harm == "gone" else "changed since its digest was computed"
    with pytest.raises(DataError, match=f"a.txt: .*{expected}"):
        list(read_records(part, Tally()))


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = write(tmp_path / "a.jsonl", line("one") + line("two"))
    [part] = find_parts(source(path), DigestCache(tmp_path / "cache"))
    records = read_records(part, Tally())
    next(records)
    path.write_text(line("one") + line("three"))
    with pytest.raises(DataError, match="changed since"):
        list(records)
