"""Hugging Face datasets, from folders: nothing here asks a network."""

from __future__ import annotations

import shutil

import datasets
import pytest
from documents_support import one_line, parts_of, read, source, write

from pipeline.data.documents.hub import load_split

pytestmark = pytest.mark.slow

ROWS = [{"text": f"document {number}", "id": number} for number in range(100)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def save(folder, rows=ROWS, **settings):
    datasets.Dataset.from_list(rows).save_to_disk(folder, **settings)
    return folder


@pytest.mark.parametrize("part_size", [50, 500, 10**6])
def test_a_saved_folder_in_any_number_of_parts(tmp_path, part_size):
    config = source(dataset=str(save(tmp_path / "data", num_shards=3)))
    found = read(config, tmp_path / "cache", part_size=part_size)
    name = f"{tmp_path}/data (train)"
    assert found == [(f"{name}: row {number}", row) for number, row in enumerate(ROWS, start=1)]
    parts = parts_of(config, tmp_path / "cache", part_size=part_size)
    assert (len(parts) > 1) == (part_size < 10**6)
    assert len({part.digest for part in parts}) == len(parts)


def test_the_digest_is_of_the_content(tmp_path):
    def digest(folder, **settings):
        return [part.digest for part in parts_of(source(dataset=str(folder), **settings), tmp_path / "cache")]

    first = digest(save(tmp_path / "a"))
    assert first == digest(shutil.copytree(tmp_path / "a", tmp_path / "b"))
    assert first != digest(save(tmp_path / "c", [{"text": "other", "id": 0}, *ROWS[1:]]))


def test_a_folder_of_several_splits(tmp_path):
    folder = tmp_path / "data"
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "dev": datasets.Dataset.from_list(ROWS[:2])}
    ).save_to_disk(folder)
    assert len(read(source(dataset=str(folder)), tmp_path / "cache")) == 100
    assert len(read(source(dataset=str(folder), split="dev"), tmp_path / "cache")) == 2
    message = one_line(source(dataset=str(folder), split="test"), tmp_path / "cache")
    assert "has no split 'test'; its splits: train, dev" in message
    write(folder / "dataset_dict.json", "{")
    assert "dataset_dict.json: cannot be read" in one_line(source(dataset=str(folder)), tmp_path / "cache")


@pytest.mark.parametrize(("saved", "split"), [(None, "train"), ("test", "test"), ("train[:9]", "train")])
def test_a_saved_set_has_one_split(tmp_path, saved, split):
    folder = tmp_path / "data"
    datasets.Dataset.from_list(ROWS, split=saved).save_to_disk(folder)
    assert len(load_split(str(folder), split)) == 100
    message = one_line(source(dataset=str(folder), split="validation"), tmp_path / "cache")
    assert message.endswith(f"{folder}: has only the split {split!r}; write split: {split}")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_data_files(tmp_path, streaming):
    for name in ("train-1", "train-2"):
        write(tmp_path / f"data/{name}.jsonl", f'{{"text": "{name}", "id": 1}}\n' * 3)
    config = source(dataset=str(tmp_path / "data"), streaming=streaming)
    parts = parts_of(config, tmp_path / "cache")
    assert len(parts) == (2 if streaming else 1)
    found = read(config, tmp_path / "cache")
    assert [row["text"] for _, row in found] == ["train-1"] * 3 + ["train-2"] * 3
    if streaming:
        assert found[3][0] == f"{tmp_path}/data (train), shard 2 of 2: row 1"
    again = parts_of(config, tmp_path / "cache")
    assert [part.digest for part in again] == [part.digest for part in parts]
    write(tmp_path / "data/train-2.jsonl", '{"text": "changed", "id": 1}\n' * 3)
    changed = parts_of(config, tmp_path / "cache")
    assert [part.digest for part in changed] != [part.digest for part in parts]
    message = one_line(config.model_copy(update={"text_field": "body"}), tmp_path / "cache")
    assert "row 1: no field 'body'; its fields: 'text', 'id'" in message


def test_max_documents(tmp_path):
    config = source(dataset=str(save(tmp_path / "data")), max_documents=7)
    assert [row["id"] for _, row in read(config, tmp_path / "cache", part_size=50)] == list(range(7))


def test_a_stream_that_breaks(tmp_path):
    write(tmp_path / "data/train.jsonl", '{"text": "a"}\n{"text": \n')
    config = source(dataset=str(tmp_path / "data"), streaming=True)
    assert "reading row 1 failed: " in one_line(config, tmp_path / "cache")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "files", "split": "test"}, "Unknown split"),
        ({"dataset": "files", "subset": "fr"}, "'fr' not found"),
        ({"dataset": "broken"}, "cannot be loaded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_what_cannot_be_loaded(tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "files/train.jsonl", '{"text": "a"}\n')
    next(save(tmp_path / "broken").glob("*.arrow")).write_bytes(b"no arrow")
    found = one_line(source(**settings), tmp_path / "cache")
    assert message in found
    assert settings["dataset"] in found
