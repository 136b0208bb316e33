"""The manifest comes back as it was written, and refuses whatever does not hold together."""

from __future__ import annotations

import json
import math
import os
import pickle
import tempfile
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_engine import PlainEngine
from support.checkpoints import write_checkpoint

from pipeline.checkpoint.manifest import MANIFEST, TABLE, ShardTable, decode_manifest, read_manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.shards import Region, Shard, overlap
from pipeline.errors import CheckpointError

HERE = Path("step-00000001") / MANIFEST


@pytest.fixture(scope="module")
def content():
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), [PlainEngine(rank, 2) for rank in range(2)])
        return (Path(folder) / MANIFEST).read_bytes()


def resealed(content: bytes, change) -> bytes:
    """The manifest after a change by someone who knows how checksums go."""
    tree = json.loads(content)
    change(tree["manifest"])
    inner = json.dumps(tree["manifest"], separators=(",", ":")).encode()
    digest = xxhash.xxh3_128_hexdigest(inner)
    head = f'{{"format":2,"xxh3_128":"{digest}","manifest":'
    return head.encode() + inner + b"}\n"


def test_it_comes_back_as_it_was(content):
    manifest = decode_manifest(content, HERE)
    assert manifest.encode() == content
    assert manifest.scalars == {"step": 0, "loss_scale": 65536.0, "searching": True}
    assert [type(value) for value in manifest.scalars.values()] == [int, float, bool]
    assert decode_manifest(resealed(content, lambda m: None), HERE) == manifest


def test_numbers_that_json_has_no_word_for_come_back(tmp_path):
    write_checkpoint(tmp_path, [PlainEngine(0, 1)], state={"eval_loss": math.inf, "other": math.nan})
    state = read_manifest(tmp_path).state
    assert state["eval_loss"] == math.inf
    assert math.isnan(state["other"])


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_every_changed_byte_is_noticed(content, data):
    place = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda value: value != content[place]))
    with pytest.raises(CheckpointError):
        decode_manifest(content[:place] + bytes([other]) + content[place + 1 :], HERE)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_every_cut_is_noticed(content, data):
    with pytest.raises(CheckpointError):
        decode_manifest(content[: data.draw(st.integers(0, len(content) - 1))], HERE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (lambda m, name=name: m["files"][0].update(name=name), r"files\.0\.name")
            for name in (
                "../rank.safetensors",
                "/etc/rank.safetensors",
                "a/b.safetensors",
                "..safetensors",
                "",
                "rank.pt",
            )
        ),
        (lambda m: m.update(extra=1), "extra"),
        (lambda m: m["files"].append(m["files"][0]), "listed twice"),
        (lambda m: m["files"][0].update(name="shards.safetensors"), "listed twice"),
        (lambda m: m.update(shard_table=None), "shard_table"),
        (lambda m: m["files"][0].update(bytes=-1), "greater than or equal to 0"),
        (lambda m: m["files"][0].update(shards="0"), "integer"),
    ],
)
def test_what_does_not_hold_together_is_refused(content, change, said):
    with pytest.raises(CheckpointError, match=said) as caught:
        decode_manifest(resealed(content, change), HERE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["files"].pop(), "the table has 9 shards, and the files have 2;"),
        (lambda m: m["shard_table"].update(bytes=7), "size or checksum differs"),
        (lambda m: m["shard_table"].update(xxh3_128="0" * 32), "size or checksum differs"),
        (lambda m: m["files"][0].update(bytes=7), "states 7 bytes, and the shards of this file take"),
    ],
)
def test_a_table_that_does_not_go_with_the_manifest_is_refused(tmp_path, change, said):
    write_checkpoint(tmp_path, [PlainEngine(rank, 2) for rank in range(2)])
    (tmp_path / MANIFEST).write_bytes(resealed((tmp_path / MANIFEST).read_bytes(), change))
    manifest = read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        manifest.layout_of(manifest.files[0])


def test_a_table_without_an_end_is_not_read_to_its_end(tmp_path):
    write_checkpoint(tmp_path, [PlainEngine(0, 1)])
    os.truncate(tmp_path / TABLE, 1 << 40)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="size or checksum differs"):
        _ = read_manifest(tmp_path).table
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tensor", 1),
        ("tensor", -1),
        ("box", 0),
        ("box", -2),
        ("start", -1),
        ("start", 1),
        ("length", -1),
        ("length", 7),
        ("length", 2**62),
    ],
)
def test_a_row_that_points_elsewhere_is_refused(column, value):
    table = table_of(Region((2, 3), None, 0, 6))
    table.check()
    table.columns[column][0] = value
    with pytest.raises(ValueError, match=r"points|values"):
        table.check()


@pytest.mark.parametrize(
    "tensors",
    [
        b"[]",
        b"{}",
        b"7",
        b"[7]",
        b"[[]]",
        b'[["a","weight","O",[2,3]]]',
        b'[["a","weight","F32",[-2,-3]]]',
        b'[["a","weight","F32",["2",3]]]',
        b'[["a",[],"F32",[2,3]]]',
        b'[["a","weight","F32",[4611686018427387904,2]]]',
        b'[["a","weight","F32",[2,3]],["a","weight","F64",[2,3]]]',
        b"[" * 100_000,
    ],
)
def test_names_that_are_none_are_refused(tensors):
    table = replace(table_of(Region((2, 3), None, 0, 6)), tensors=tensors)
    with pytest.raises(ValueError, match=r"."):
        table.check()


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_what_is_no_table_is_refused(data):
    raw = bytearray(table_of(Region((2, 3), None, 0, 4), Region((2, 3), None, 4, 2)).encode())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        table = ShardTable.decode(bytes(raw))
        table.check()
        assert sum(table.shard(row).region.length for row in range(len(table))) == 6


def table_of(*regions: Region) -> ShardTable:
    """One tensor in these shards, each a rank's."""
    return ShardTable.concatenate(
        [ShardTable.of([Shard("a", "weight", region, torch.float32)]) for region in regions]
    )


def test_ranks_rows_come_back_joined():
    engines = [PlainEngine(rank, 3, by) for by in ("values", "columns") for rank in range(3)]
    parts = [[shard.without_values("1" * 16) for shard in engine.shards()] for engine in engines]
    joined = ShardTable.decode(ShardTable.concatenate([ShardTable.of(part) for part in parts]).encode())
    assert [joined.shard(row) for row in range(len(joined))] == [shard for part in parts for shard in part]
    assert joined.shard(0).checksum == "1" * 16
    assert joined.rows_of("no", "weight") is None
    rows = joined.rows_of("embed.weight", "exp_avg")
    assert sorted(rows) == [
        row for row in range(len(joined)) if joined.shard(row).title == "exp_avg of embed.weight"
    ]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_rows_that_meet_a_region_are_found(data):
    by = data.draw(st.sampled_from(["values", "columns"]))
    engines = [PlainEngine(rank, 3, by) for rank in range(3)]
    table = ShardTable.concatenate([ShardTable.of(engine.shards()) for engine in engines])
    box = data.draw(st.sampled_from([None, ((0, 11), (2, 4)), ((0, 11), (1, 5))]))
    size = 66 if box is None else 11 * (box[1][1] - box[1][0])
    start = data.draw(st.integers(0, size))
    region = Region((11, 6), box, start, data.draw(st.integers(0, size - start)))
    rows = table.rows_of("embed.weight", "weight")
    found = table.rows_of("embed.weight", "weight", region)
    there = [row for row in rows if len(overlap(table.shard(row).region, region))]
    assert set(there) <= set(found) <= set(rows)
    if by == "values" and box is None and region.length:
        assert found == there


def test_each_value_comes_once():
    left, right = (Region((2, 3), ((0, 2), columns), 0, n) for columns, n in (((0, 2), 4), ((2, 3), 2)))
    middle = Region((2, 3), ((0, 2), (1, 2)), 0, 2)
    flat, rest, late = (Region((2, 3), None, *stretch) for stretch in ((0, 4), (4, 2), (3, 2)))
    empty = Region((2, 3), ((1, 1), (0, 3)), 0, 0)
    boxed = Region((2, 3), ((0, 2), (0, 3)), 3, 2)
    for good in ([left, right], [right, empty, left], [rest, flat]):
        table_of(*good).check()
    for bad, said in (
        ([left, middle], "overlap"),
        ([flat, late], "stored twice"),
        ([flat, boxed], "stored twice"),
        ([left], "4 values of 6"),
        ([left, left, right], "stored twice"),
        ([flat, Region((3, 2), None, 4, 2)], "listed with 2 shapes or dtypes"),
    ):
        with pytest.raises(ValueError, match=said):
            table_of(*bad).check()


def test_another_format_is_refused_in_one_line(content):
    with pytest.raises(CheckpointError, match="format 3, and this version reads format 2") as caught:
        decode_manifest(content.replace(b'"format":2', b'"format":3'), HERE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b"[" * 100_000, b"\xff\xfe", b"9" * 5000, pickle.dumps({})]
)
def test_what_is_no_manifest_is_refused(raw):
    with pytest.raises(CheckpointError):
        decode_manifest(raw, HERE)


def test_a_file_whose_header_says_something_else_is_not_loaded(tmp_path):
    manifest = write_checkpoint(tmp_path, [PlainEngine(0, 1)])
    path = tmp_path / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with CheckpointReader(manifest) as reader:
        for _ in range(2):  # the second time too
            with pytest.raises(CheckpointError, match="header"):
                reader.read("embed.weight", "weight", manifest.table.shard(0).region, torch.empty(66))
