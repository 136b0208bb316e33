"""Damage is found before anything is loaded, and named: the file, and the tensors at that place."""

from __future__ import annotations

import os
import random

import pytest
from plain_engine import PlainEngine
from support.checkpoints import verify, write_checkpoint

from pipeline.checkpoint.manifest import MANIFEST, TABLE, Manifest
from pipeline.checkpoint.reader import check_content


@pytest.fixture
def checkpoint(tmp_path):
    manifest = write_checkpoint(tmp_path, [PlainEngine(rank, 3) for rank in range(3)])
    assert verify(tmp_path) == []
    return tmp_path, manifest


def tensors_at(manifest: Manifest, name: str, place: int) -> set[str]:
    """The tensor that has a byte at this place; none in a header or in padding."""
    file = next(file for file in manifest.files if file.name == name)
    return {
        piece.title
        for piece, offset in zip(manifest.shards_of(file), manifest.layout_of(file).offsets, strict=True)
        if offset <= place < offset + piece.num_bytes
    }


def test_every_corruption_is_found_and_named(checkpoint):
    folder, manifest = checkpoint
    corruptions = 60
    dice = random.Random(0)
    named = 0
    originals = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(originals) == {file.name for file in manifest.files} | {MANIFEST, TABLE}
    for number in range(corruptions):
        name = sorted(originals)[number % len(originals)]
        content = bytearray(originals[name])
        place = dice.randrange(len(content))
        content[place] ^= dice.choice([1 << dice.randrange(8), dice.randrange(1, 256)])
        (folder / name).write_bytes(content)
        damages = verify(folder)
        assert [damage.file for damage in damages] == [name]
        if name not in (MANIFEST, TABLE):
            expected = tensors_at(manifest, name, place)
            assert set(damages[0].tensors) == expected
            assert damages[0].host in str(damages[0])
            named += bool(expected)
        (folder / name).write_bytes(originals[name])
    assert named > corruptions / 10
    assert verify(folder) == []


def test_several_damaged_files_are_all_named(checkpoint):
    folder, manifest = checkpoint
    for file in manifest.files:
        content = bytearray((folder / file.name).read_bytes())
        content[-1] ^= 1
        (folder / file.name).write_bytes(content)
    assert [damage.file for damage in verify(folder)] == [file.name for file in manifest.files]
    of_one = check_content(manifest, ["rank-00001.safetensors"])
    assert [damage.file for damage in of_one] == ["rank-00001.safetensors"]


@pytest.mark.parametrize("what", ["shorter", "longer", "empty", "missing", "folder", "pipe", "link"])
def test_what_can_be_seen_without_reading(checkpoint, what):
    folder, _ = checkpoint
    path = folder / "rank-00001.safetensors"
    content = path.read_bytes()
    path.unlink()
    if what == "shorter":
        path.write_bytes(content[:-1])
    if what == "longer":
        path.write_bytes(content + b"\0")
    if what == "empty":
        path.touch()
    if what == "folder":
        path.mkdir()
    if what == "pipe":
        os.mkfifo(path)
    if what == "link":
        (folder / "other").write_bytes(content)
        path.symlink_to("other")
    damages = verify(folder)
    assert [damage.file for damage in damages] == [path.name]
    assert "written on node1" in str(damages[0])
