"""Rows hold every token that fits once, in order, and predict what the documents say."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_store import Part, Store

from pipeline.data.bundle import JoinedDataset
from pipeline.data.packing import assign_best_fit, join_datasets, pack_documents

END = 0
DOCUMENTS = st.lists(st.lists(st.integers(1, 60_000), max_size=20), max_size=6)  # their end token is added
PACKINGS = ("concatenate", "best_fit", "none")


def store_of(parts: list[list[list[int]]], masks: bool = False) -> Store:
    made = []
    for documents in parts:
        tokens = [token for document in documents for token in (*document, END)]
        ends = np.cumsum([len(document) + 1 for document in documents], dtype=np.int64)
        learned = np.array([token % 3 != 0 for token in tokens], dtype=np.uint8) if masks else None
        made.append(Part(np.array(tokens, dtype=np.uint16), ends, learned))
    return Store(made)


def rows_of(dataset) -> list[dict[str, list[int]]]:
    return [{k: v.tolist() for k, v in dataset[i].items()} for i in range(len(dataset))]


def segments(positions: list[int]) -> list[tuple[int, int]]:
    starts = [i for i, position in enumerate(positions) if position == 0]
    return list(zip(starts, [*starts[1:], len(positions)], strict=True))


@settings(max_examples=40, deadline=None)
@given(st.lists(DOCUMENTS, min_size=1, max_size=3), st.integers(2, 9), st.booleans(), st.booleans())
def test_a_stream_is_windows_of_each_part(parts, size, separate, masks):
    dataset = pack_documents(store_of(parts, masks), "concatenate", size, separate, END)
    expected = []
    for documents in parts:
        stream = [token for document in documents for token in (*document, END)]
        for start in range(0, len(stream) - size, size):
            inputs = stream[start : start + size]
            targets = stream[start + 1 : start + size + 1]
            labels = [
                -100 if (masks and target % 3 == 0) or (separate and token == END) else target
                for token, target in zip(inputs, targets, strict=True)
            ]
            row = {"input_ids": inputs, "shift_labels": labels}
            if separate:
                positions = [0]
                for token in inputs[:-1]:
                    positions.append(0 if token == END else positions[-1] + 1)
                row["position_ids"] = positions
            expected.append(row)
    assert rows_of(dataset) == expected


def pieces_of(document: list[int], size: int, masks: bool) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(inputs, labels) of each piece, worked out token by token."""
    whole = [*document, END]
    pieces = []
    for start in range(0, max(1, len(whole) - 1), size):
        inputs = whole[start : start + size]
        labels = [*whole[start + 1 : start + size + 1], -100][: len(inputs)]
        labels = [-100 if masks and label % 3 == 0 else label for label in labels]
        if len(inputs) > 1:
            pieces.append((tuple(inputs), tuple(labels)))
    return pieces


@settings(max_examples=30, deadline=None)
@given(
    st.lists(DOCUMENTS, min_size=1, max_size=3),
    st.integers(2, 9),
    st.booleans(),
    st.sampled_from(["best_fit", "none"]),
)
def test_each_piece_of_a_document_is_in_one_row_and_knows_its_next_token(parts, size, masks, packing):
    dataset = pack_documents(store_of(parts, masks), packing, size, True, END)
    expected = Counter(
        piece for documents in parts for document in documents for piece in pieces_of(document, size, masks)
    )
    found = Counter()
    empty = 0
    for row in rows_of(dataset):
        used = 0
        for start, end in segments(row["position_ids"]):
            inputs = tuple(row["input_ids"][start:end])
            labels = tuple(row["shift_labels"][start:end])
            assert row["position_ids"][start:end] == list(range(end - start))
            if set(inputs) == {END}:  # padding: the last segment, and nothing is predicted there
                assert (end, set(labels)) == (size, {-100})
                empty += end - start
                continue
            found[inputs, labels] += 1
            used += 1
        assert used == 1 or packing == "best_fit"
    assert found == expected
    assert dataset.padding_share == pytest.approx(empty / (size * len(dataset)) if len(dataset) else 0.0)
    documents = [document for part in parts for document in part]
    assert dataset.documents_cut == sum(len(document) + 1 > size + 1 for document in documents)
    together = pack_documents(store_of(parts, masks), packing, size, False, END)
    for row, alone in zip(rows_of(together), rows_of(dataset), strict=True):
        assert row == {key: alone[key] for key in ("input_ids", "shift_labels")}


def naive_best_fit(lengths: list[int], size: int) -> list[int]:
    """Items one by one, the longest first, each into the fullest bin with room: loads of the bins."""
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, load in enumerate(bins) if load + length <= size]
        if fitting:
            bins[max(fitting, key=lambda i: bins[i])] += length
        else:
            bins.append(length)
    return sorted(bins)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 30))
def test_best_fit_is_best_fit_decreasing(lengths, spare):
    size = max(lengths) + spare
    bins = assign_best_fit(np.array(lengths, dtype=np.int32), size)
    loads = np.bincount(bins, weights=lengths).astype(int).tolist()
    assert sorted(loads) == naive_best_fit(lengths, size)
    first = [bins.tolist().index(number) for number in range(len(loads))]
    assert first == sorted(first), "rows follow the order of the documents"


class Seeded:
    """A store that is sent by what it is made of, as one of files is by its paths."""

    def __init__(self, masks: bool):
        self.masks = masks

    @property
    def parts(self):
        generator = np.random.default_rng(0)
        lengths = generator.integers(0, 30, (3, 200))
        return store_of(
            [[generator.integers(1, 9, n).tolist() for n in part] for part in lengths], self.masks
        ).parts


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("masks", [False, True])
def test_a_batch_is_its_rows_in_any_order_also_in_another_process(packing, masks):
    dataset = pack_documents(Seeded(masks), packing, 16, True, END)
    chosen = np.random.default_rng(1).permutation(len(dataset))[:20].tolist()
    batch = dataset.__getitems__(chosen)
    for row, index in enumerate(chosen):
        for key, value in dataset[index].items():
            assert torch.equal(batch[key][row], value)
            assert value.dtype == torch.int64
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000 + 21 * 1100, "the tokens were sent"
    for key, value in pickle.loads(sent).__getitems__(chosen).items():
        assert torch.equal(batch[key], value)


def test_little_or_no_text_gives_no_rows():
    for packing in PACKINGS:
        assert len(pack_documents(Store([]), packing, 8, True, END)) == 0
        assert len(pack_documents(store_of([[], [[]]]), packing, 8, True, END)) == 0


@pytest.mark.parametrize("packing", PACKINGS)
def test_several_sources_are_their_rows_one_behind_the_other(packing):
    sources = [
        pack_documents(store_of([[[number] * 5, [number + 1] * 9]] * parts), packing, 4, True, END)
        for number, parts in ((1, 1), (50, 2), (90, 1))
    ]
    whole = join_datasets(sources)
    assert whole.datasets == sources
    rows = [row for source in sources for row in rows_of(source)]
    assert rows_of(whole) == rows
    indices = [len(rows) - 1, 0, 3, 3, len(rows) // 2]
    for dataset in (whole, JoinedDataset(sources), pickle.loads(pickle.dumps(whole))):
        batch = dataset.__getitems__(indices)
        assert [{key: value[i].tolist() for key, value in batch.items()} for i in range(5)] == [
            rows[index] for index in indices
        ]
    assert join_datasets(sources[:1]) is sources[0]
    with pytest.raises(IndexError):
        whole[len(rows)]
