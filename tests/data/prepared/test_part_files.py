"""The files of a part: what is appended comes back, however it was divided; a full disk is one line."""

from __future__ import annotations

import errno
import itertools
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.prepared import part_files
from pipeline.data.prepared.encoder import TokenizedDocument
from pipeline.data.prepared.part_files import (
    FORMAT_VERSION,
    MTIMES_FILE,
    PartWriter,
    TokenStore,
    explain_write_errors,
    fill_folder,
    hash_keys,
    hold_lock,
    select_held_out,
)
from pipeline.errors import DataError

FACTS = {"identity": {"format": FORMAT_VERSION}}
keys = st.lists(st.binary(max_size=12), max_size=30)


def document(key: bytes, with_loss_mask: bool) -> TokenizedDocument:
    ids = np.frombuffer(key + b"\xff", dtype=np.uint8).astype(np.uint16)
    return TokenizedDocument(ids, ids % 2 == 0 if with_loss_mask else None, key)


def write(
    folder: Path, documents: list[TokenizedDocument], cuts: list[int], with_mask: bool
) -> dict[str, bytes]:
    bounds = [0, *sorted(cut % (len(documents) + 1) for cut in cuts), len(documents)]
    with fill_folder(folder, folder.parent, "a part") as temporary:
        writer = PartWriter(temporary, np.dtype("<u2"), with_mask)
        for start, end in itertools.pairwise(bounds):
            writer.append(documents[start:end], 0.5)
        writer.finish(FACTS)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MTIMES_FILE}


@settings(max_examples=20, deadline=None)
@given(keys, st.lists(st.integers(0, 30), max_size=4), st.booleans())
def test_documents_come_back_and_batches_leave_no_trace(keys, cuts, learned):
    documents = [document(key, learned) for key in keys]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert write(folder / "a", documents, cuts, learned) == write(folder / "b", documents, [], learned)
        mask = select_held_out(hash_keys(each.key for each in documents), 0.5)
        for split, chosen in (("train", ~mask), ("eval", mask)):
            store = TokenStore([folder / "a"], split)
            expected = [each for each, take in zip(documents, chosen, strict=True) if take]
            assert store.num_documents == len(expected)
            assert store.num_tokens == sum(len(each.ids) for each in expected)
            if not expected:
                assert store.parts == []
                continue
            (part,) = store.parts
            rows = np.split(part.tokens, part.ends[:-1])
            assert [row.tolist() for row in rows] == [each.ids.tolist() for each in expected]
            assert part.hashes.tolist() == hash_keys(each.key for each in expected).tolist()
            if learned:
                assert part.loss_mask.tolist() == [int(v) for each in expected for v in each.loss_mask]
            else:
                assert part.loss_mask is None


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.floats(0, 1))
def test_a_larger_fraction_holds_out_more_and_nothing_goes_back(hashes, fraction):
    values = np.array(hashes, dtype=np.uint64)
    held_out = select_held_out(values, fraction)
    assert held_out.tolist() == [value < fraction * 2**64 for value in hashes]
    assert (select_held_out(values, min(1.0, fraction + 0.1)) >= held_out).all()
    assert select_held_out(values, 1.0).all()
    assert not select_held_out(values, 0.0).any()


def test_a_full_disk_is_one_line_with_where_and_what_to_do(tmp_path):
    with (
        pytest.raises(DataError, match=r"No space left on device \(.* GiB free there\); make room") as caught,
        explain_write_errors(tmp_path, "part 1"),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"tokens")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__.errno == errno.ENOSPC


def test_what_is_abandoned_leaves_nothing(tmp_path):
    def fail():
        with fill_folder(tmp_path / "a", tmp_path, "a part") as temporary:
            writer = PartWriter(temporary, np.dtype("<u2"), False)
            writer.append([document(b"x", False)], 0.5)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_held_by_one(tmp_path):
    with hold_lock(tmp_path, "a", None) as first, hold_lock(tmp_path, "a", None) as second:
        assert (first, second) == (True, False)
    with hold_lock(tmp_path, "a", None) as third:
        assert third


def test_a_lock_is_waited_for_with_notices(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(part_files, "NOTICE_SECONDS", 0.1)
    is_free = []

    def wait():
        with hold_lock(tmp_path, "a", lambda: "waiting"):
            is_free.append(True)

    other = threading.Thread(target=wait)
    with hold_lock(tmp_path, "a", None):
        other.start()
        while caplog.text.count("waiting") < 2:
            time.sleep(0.01)
        assert not is_free
    other.join()
    assert is_free
