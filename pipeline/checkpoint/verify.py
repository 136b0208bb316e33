"""Whether a checkpoint is what was written: sizes at once, then every byte; names file and tensors."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pipeline.checkpoint.manifest import MANIFEST, TABLE, FileRecord, Manifest, read_manifest
from pipeline.checkpoint.shard_file import hash_stretch, opened, read_exactly
from pipeline.errors import CheckpointError

THREADS = 4


@dataclass(frozen=True)
class Damage:
    """One file that is not what was written."""

    file: str
    what: str
    host: str = ""
    """Where it was written; empty: not known."""
    tensors: tuple[str, ...] = ()
    """Those that lie at the damaged place, such as `exp_avg of embed.weight`; none: not in a tensor."""

    def __str__(self) -> str:
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        tensors = f" ({', '.join(self.tensors[:3])}{more})" if self.tensors else ""
        written = f"; written on {self.host}" if self.host else ""
        return f"{self.file}: {self.what}{tensors}{written}"


def verify(folder: Path) -> list[Damage]:
    """Reads a checkpoint through; an empty list: it is whole."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [Damage(MANIFEST, str(error))]
    return check_sizes(manifest) or check_content(manifest)


def check_content(manifest: Manifest, files: Collection[str] | None = None) -> list[Damage]:
    """As verify, of the files that are there.

    Args:
        files: Names of those to read; None: all.
    """
    try:
        _ = manifest.table
    except CheckpointError as error:
        return [Damage(TABLE, str(error))]
    chosen = [file for file in manifest.files if files is None or file.name in files]
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda file: _check_content(manifest, file), chosen)
        return [damage for damage in found if damage is not None]


def check_sizes(manifest: Manifest) -> list[Damage]:
    """What can be seen without reading: files that are missing, no plain files, or of another size.

    Where nodes share no file system, a folder holds the files of its own place: other places, none of whose
    files are here, are no damage.
    """
    damages, absent = look(manifest)
    here = {file.place for file in manifest.files if file.name not in absent}
    for file in manifest.files:
        if file.name in absent and (file.place in here or not here):
            damages.append(_whole_file(manifest, file, "missing"))
    return _look_at_table(manifest) or damages


def _look_at_table(manifest: Manifest) -> list[Damage]:
    if manifest.shard_table is None:
        return []
    try:
        what = _other_size(manifest.folder / TABLE, manifest.shard_table.bytes)
    except OSError as error:
        what = "missing" if isinstance(error, FileNotFoundError) else str(error)
    return [] if what is None else [Damage(TABLE, what)]


def look(manifest: Manifest) -> tuple[list[Damage], set[str]]:
    """The files here that are not what they should be, by their size; the names of those not here."""
    damages, absent = [], set()
    for file in manifest.files:
        try:
            what = _other_size(manifest.folder / file.name, file.bytes)
            if what is not None:
                damages.append(_whole_file(manifest, file, what))
        except FileNotFoundError:
            absent.add(file.name)
        except OSError as error:
            damages.append(_whole_file(manifest, file, error.strerror or str(error)))
    return damages, absent


def _other_size(path: Path, written: int) -> str | None:
    """What is wrong with the size of a plain file; None: nothing."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
    return None if size == written else f"{size} bytes, {written} were written"


def _whole_file(manifest: Manifest, file: FileRecord, what: str) -> Damage:
    try:
        titles = tuple(dict.fromkeys(shard.title for shard in manifest.shards_of(file)))
    except CheckpointError:  # the table is no better
        titles = ()
    return Damage(file.name, what, file.host, titles)


def _check_content(manifest: Manifest, file: FileRecord) -> Damage | None:
    """None: nothing is wrong, or the file is not here."""
    try:
        with opened(manifest.folder / file.name) as descriptor:
            layout = manifest.layout_of(file)
            header = bytearray(len(layout.header))
            read_exactly(descriptor, 0, memoryview(header))
            right_header = bytes(header) == layout.header
            whole, damaged, at = xxhash.xxh3_128(header), list[str](), len(header)
            for shard, offset in zip(layout.shards, layout.offsets, strict=True):
                between = bytearray(offset - at)
                read_exactly(descriptor, at, memoryview(between))
                whole.update(between)
                own = hash_stretch(descriptor, offset, shard.num_bytes)
                at = offset + shard.num_bytes
                whole.update(own.digest())
                if own.hexdigest() != shard.checksum:
                    damaged.append(shard.title)
            if whole.hexdigest() == file.xxh3_128 and right_header and not damaged:
                return None
            part = "not" if right_header else "its header is not"
            what = f"{part} what was written, by its checksum"
            return Damage(file.name, what, file.host, tuple(dict.fromkeys(damaged)))
    except FileNotFoundError:
        return None
    except OSError as error:
        return Damage(file.name, error.strerror or str(error), file.host)
    except CheckpointError as error:
        return Damage(file.name, str(error), file.host)
