"""Files: replaced in one step, made by others, and messages that repeat what is in them."""

from __future__ import annotations

import errno
import logging
import os
import socket
from pathlib import Path

import pytest

from pipeline.cli.screen import Screen
from pipeline.distributed.ranks import Ranks
from pipeline.errors import MAX_LINE_LENGTH, ConfigError, escape_unprintable
from pipeline.files import (
    atomic_write,
    find_path_inside,
    find_unsafe_files,
    format_bytes,
    format_duration,
    open_regular_file,
    publish_folder,
    read_regular_file,
    replace_file,
)
from pipeline.monitoring.logs import log_to_console, log_to_file


def test_what_is_no_plain_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        (tmp_path / "link").symlink_to("pipe")
        for name, what in [
            ("pipe", "a pipe"),
            ("link", "a pipe"),
            ("socket", "not a regular file"),
        ]:
            with pytest.raises(OSError, match=f"it is {what}"):
                open_regular_file(tmp_path / name)
    with pytest.raises(OSError, match="it is a device"):
        read_regular_file("/dev/zero", 10)


def test_no_more_is_read_than_such_a_file_may_have(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than the 1 KiB"):
        read_regular_file(tmp_path / "large", 1 << 10)
    (tmp_path / "small").write_bytes(b"x" * 1024)
    assert len(read_regular_file(tmp_path / "small", 1 << 10)) == 1 << 10


def test_no_name_and_no_link_leads_out_of_a_folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "link").symlink_to("deep")
    (folder / "out").symlink_to(tmp_path)
    (folder / "round").symlink_to("round")
    for name in ("file", "deep/file", "link/file", "round", "a\0b"):
        assert find_path_inside(folder, name) == folder / name
    for name in ("../file", "deep/../../file", "/etc/passwd", "out/file"):
        assert find_path_inside(folder, name) is None, name


def test_links_of_the_hubs_cache_are_no_way_out(tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    (tmp_path / "models--x" / "blobs" / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert list(find_unsafe_files(snapshot)) == []
    assert find_path_inside(snapshot, "config.json") == snapshot / "config.json"
    os.mkfifo(snapshot / "pipe")
    (snapshot / "additional_chat_templates").mkdir()
    (snapshot / "additional_chat_templates" / "a.jinja").symlink_to("/dev/zero")
    assert list(find_unsafe_files(snapshot)) == [
        "'pipe' is a pipe, not a file",
        "'a.jinja' is a device, not a file",
    ]


def test_numbers_of_bytes_and_of_seconds():
    sizes = (0, 600, 1.6 * 2**20, 999 * 2**20, 2.25 * 2**30, 1234 * 2**30)
    told = ["0 KiB", "1 KiB", "2 MiB", "999 MiB", "2.25 GiB", "1234.00 GiB"]
    assert [format_bytes(size) for size in sizes] == told
    times = (0.4, 59.6, 245, 3725, 270_000)
    assert [format_duration(seconds) for seconds in times] == ["0s", "1m00s", "4m05s", "1h02m", "3d03h"]


def test_a_file_has_its_old_content_or_the_new_one(tmp_path):
    file = tmp_path / "file"
    replace_file(file, "old")

    def fail():
        with atomic_write(file) as partial:
            partial.write_text("half")
            assert file.read_text() == "old"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert file.read_text() == "old"
    replace_file(file, b"new")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_has_its_name_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    partial = tmp_path / "partial"
    final = tmp_path / "final"
    partial.mkdir()
    (partial / "file").write_text("content")
    fsync = os.fsync

    def fail(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) == tmp_path:
            raise OSError(errno.EIO, "the disk fails")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk fails"):
        publish_folder(partial, final, partial.iterdir())
    assert list(tmp_path.iterdir()) == [partial]
    monkeypatch.undo()
    publish_folder(partial, final, partial.iterdir())
    assert (final / "file").read_text() == "content"


def test_a_message_moves_no_cursor_and_has_an_end():
    hostile = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m\udc80\rerror: nothing"
    message = str(ConfigError(f"recipe.yaml:3: name: {hostile!s} and {'x' * 10**6}; write a name"))
    assert escape_unprintable(message) == message
    assert "\\x1b[2J" in message
    assert message.startswith("recipe.yaml:3: name: ")
    assert message.endswith("; write a name")
    assert len(message) <= MAX_LINE_LENGTH + 100
    spaced = str(ConfigError(f"{'a b ' * 10**5}; write less"))
    assert len(spaced) <= MAX_LINE_LENGTH
    assert spaced.endswith("; write less")


def test_a_message_has_three_lines_at_most():
    assert str(ConfigError("\n".join("abc"))) == "a\nb\nc"
    assert str(ConfigError("\n".join("abcdefg"))) == "a\nb\n... and 5 more lines"


def test_no_line_of_a_log_and_no_table_moves_a_cursor(capfd, tmp_path):
    hostile = "\x1b[2J\x9b31m\u202e"
    log_to_console(Ranks(0, 0, 1, 1))
    log_to_file(tmp_path, Ranks(0, 0, 1, 1))
    logging.getLogger("pipeline.tests").warning("%s and %s", hostile, "x" * 10**6)
    screen = Screen(no_color=True)
    screen.title(hostile)
    screen.line(hostile)
    screen.table([hostile], [[hostile * 10_000]])
    out, err = capfd.readouterr()
    logged = (tmp_path / "logs" / "rank00000.log").read_text()
    assert len(out + err) < 5000
    for text in (out, err, logged):
        assert "\\x1b[2J" in text
        assert escape_unprintable(text) == text
