"""The cache of digests: an unchanged file is not read again, a changed one always is."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from documents_support import write

from pipeline.data.documents.streams import DATABASE_NAME, DigestCache
from pipeline.errors import DataError


class Look:
    """Reads files and remembers which."""

    def __init__(self):
        self.seen = []

    def __call__(self, path):
        self.seen.append(os.path.basename(path))
        with open(path) as file:
            return [file.read()]


def settled(path, content):
    """A file that was written a while ago."""
    write(path, content)
    long_ago = time.time_ns() - 10**11
    os.utime(path, ns=(long_ago, long_ago))
    return str(path)


def values(cache, paths, look, what="text"):
    return [value for _, value in cache.get_or_compute(paths, what, look).values()]


def test_a_file_is_read_once_until_it_changes(tmp_path):
    look = Look()
    cache = DigestCache(tmp_path / "new/cache")
    paths = [settled(tmp_path / name, name) for name in "abc"]
    assert values(cache, paths, look) == [["a"], ["b"], ["c"]]
    assert values(DigestCache(tmp_path / "new/cache"), paths, look) == [["a"], ["b"], ["c"]]
    assert sorted(look.seen) == ["a", "b", "c"]
    settled(tmp_path / "b", "longer")
    assert values(cache, paths, look) == [["a"], ["longer"], ["c"]]
    assert look.seen[3:] == ["b"]
    assert values(cache, paths[:1], look, "something else") == [["a"]]
    assert look.seen[4:] == ["a"]


def test_equal_size_and_time_do_not_hide_another_file(tmp_path):
    look = Look()
    cache = DigestCache(tmp_path)
    path = settled(tmp_path / "a", "one")
    assert values(cache, [path], look) == [["one"]]
    times = os.stat(path)
    write(tmp_path / "b", "two").replace(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert values(cache, [path], look) == [["two"]]


def test_a_file_written_just_now_may_change_within_a_tick(tmp_path):
    look = Look()
    cache = DigestCache(tmp_path)
    path = str(write(tmp_path / "a", "one"))
    values(cache, [path], look)
    values(cache, [path], look)
    assert look.seen == ["a", "a"]


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = settled(tmp_path / "a", "one")

    def look(path):
        settled(Path(path), "longer")
        return 1

    with pytest.raises(DataError, match="a: changed while it was read"):
        DigestCache(tmp_path).get_or_compute([path], "text", look)


def test_a_cache_that_cannot_be_used_costs_time_alone(tmp_path, caplog):
    path = settled(tmp_path / "a", "one")
    write(tmp_path / DATABASE_NAME, "no database, and long enough to be taken for a damaged one" * 100)
    assert values(DigestCache(tmp_path), [path], Look()) == [["one"]]
    assert "cannot be used (file is not a database)" in caplog.text
    write(tmp_path / "file", "")
    assert values(DigestCache(tmp_path / "file"), [path], Look()) == [["one"]]
    assert caplog.text.count("cannot be used") == 4  # to look and to write, of both


def recall_many(folder, paths):
    cache = DigestCache(folder)
    look = Look()
    for _ in range(5):
        assert values(cache, paths, look, str(os.getpid())) == [["x"]] * len(paths)
    assert len(look.seen) == len(paths)


@pytest.mark.slow
def test_many_processes_at_once(tmp_path):
    paths = [settled(tmp_path / f"{number}", "x") for number in range(20)]
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=recall_many, args=(tmp_path / "cache", paths)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
