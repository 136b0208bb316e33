"""Finding files: what is taken, in which order, and one clear line for what cannot be."""

from __future__ import annotations

import gzip
import re
import sysconfig
from pathlib import Path

import pytest
from documents_support import write

from pipeline.data.documents.part import find_files
from pipeline.errors import DataError


def names(*paths):
    return [Path(span.path).name for span in find_files([str(path) for path in paths])]


def test_a_folder_is_read_in_sorted_order_with_all_below_it(tmp_path):
    for name in ("b.md", "a/z.txt", "a/c.PY", "c.rst", "d.jsonl", "x.bin", ".hidden.txt", ".git/e.txt"):
        write(tmp_path / name, "x")
    assert names(tmp_path) == ["c.PY", "z.txt", "b.md", "c.rst", "d.jsonl"]


def test_globs_and_overlapping_entries_take_a_file_once(tmp_path):
    write(tmp_path / "one.txt", "1")
    write(tmp_path / "sub/two.txt", "2")
    write(tmp_path / ".hidden/three.txt", "3")
    assert names(tmp_path / "*.txt") == ["one.txt"]
    assert names(tmp_path / "**" / "*.txt") == ["one.txt", "two.txt"]
    assert names(tmp_path / "s*") == ["two.txt"]
    assert names(tmp_path / ".hid*" / "*.txt") == ["three.txt"]
    assert names(tmp_path / "sub", tmp_path, tmp_path / "one.txt") == ["two.txt", "one.txt"]
    write(tmp_path / "odd[1].txt", "a name, no glob")
    assert names(tmp_path / "odd[1].txt") == ["odd[1].txt"]
    with pytest.raises(DataError, match="is not a valid glob"):
        names(tmp_path / "a**b")


def test_the_suffixes_say_how_a_file_is_read(tmp_path):
    kinds = {
        "a.txt": ("text", ""),
        "b.CU": ("text", ""),
        "c.jsonl.gz": ("jsonl", "gzip"),
        "d.NDJSON.ZST": ("jsonl", "zstd"),
        "e.v2.csv": ("csv", ""),
        "f.tsv.gz": ("tsv", "gzip"),
        "g.parquet": ("parquet", ""),
        "h.feather": ("arrow", ""),
    }
    for name in (*kinds, "i.tar.gz", "j.gz", "g.parquet.gz", "txt", "k.json", "l.pdf"):
        write(tmp_path / name, "x")
    found = {Path(span.path).name: (span.kind, span.compression) for span in find_files([str(tmp_path)])}
    assert found == kinds


def test_links_to_folders_are_not_followed(tmp_path):
    write(tmp_path / "a/one.txt", "1")
    for name in ("back", "again"):  # followed, two of them make 2 ** 40 paths
        (tmp_path / "a" / name).symlink_to(tmp_path)
    assert names(tmp_path) == names(tmp_path / "**" / "*.txt") == ["one.txt"]
    (tmp_path / "file.txt").symlink_to(tmp_path / "a/one.txt")
    assert names(tmp_path) == ["one.txt"]


def test_a_folder_gives_its_json_lists_and_a_named_file_of_json_is_always_read(tmp_path):
    write(tmp_path / "rows.json", b"\xef\xbb\xbf \n[{}]")
    write(tmp_path / "more.json.gz", gzip.compress(b"[]"))
    write(tmp_path / "settings.json", '{"text": "a"}')
    assert names(tmp_path) == ["more.json.gz", "rows.json"]
    assert names(tmp_path / "settings.json") == ["settings.json"]
    assert names(tmp_path / "*.json") == ["rows.json", "settings.json"]


def test_the_standard_library_is_source_and_topics_without_tests():
    root = Path(sysconfig.get_path("stdlib"))
    files = find_files(["python_stdlib"])
    kinds = {Path(span.path).relative_to(root).as_posix(): span.kind for span in files}
    assert kinds["argparse.py"] == "stdlib_source"
    assert kinds["pydoc_data/topics.py"] == "stdlib_topics"
    assert not [name for name in kinds if re.search(r"(^|/)(tests?|idle_test|site-packages)/", name)]
    assert 300 < len(files) < 1500
