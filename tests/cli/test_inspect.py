"""The counts of `inspect` are exact, and its output reads without colours too."""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from pipeline.__main__ import main
from pipeline.cli.inspect_view import (
    count_copies,
    count_shared,
    count_targets,
    format_row,
    read_hashes,
    read_lengths,
    read_loss_labels,
    split_row,
)
from pipeline.cli.screen import Screen, format_percent
from pipeline.data.packing import pack_documents

END = 1
PAD = 2
LENGTHS = st.lists(st.lists(st.integers(1, 40), max_size=12), max_size=4)  # of documents, by part


@dataclass
class MemoryPart:
    tokens: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray
    loss_mask: np.ndarray | None = None

    @property
    def num_tokens(self):
        return len(self.tokens)


@dataclass
class MemoryStore:
    parts: list[MemoryPart] = field(default_factory=list)


def store(lengths, seed=0, learned_share=None):
    """Documents of these lengths; the hash of one is its length, so that equal ones are copies."""
    rng = np.random.default_rng(seed)
    parts = []
    for part in lengths:
        tokens = rng.integers(3, 200, sum(part)).astype(np.uint16)
        ends = np.cumsum(part, dtype=np.int64) if part else np.empty(0, np.int64)
        tokens[ends - 1] = END
        learned = (
            None if learned_share is None else (rng.random(len(tokens)) < learned_share).astype(np.uint8)
        )
        parts.append(MemoryPart(tokens, ends, np.array(part, dtype=np.uint64), learned))
    return MemoryStore(parts)


class Words:
    """A tokenizer whose tokens are numbers."""

    eos_token_id = END

    def decode(self, ids):
        return " ".join(map(str, ids))


@given(LENGTHS, LENGTHS)
@settings(deadline=None)
def test_lengths_and_copies_are_exact(first, second):
    ours, theirs = ([length for part in parts for length in part] for parts in (first, second))
    lengths = read_lengths([store(first), store(second)])
    assert lengths.tolist() == ours + theirs
    hashes = read_hashes([store(first)])
    others = read_hashes([store(second)])
    assert count_copies(hashes) == len(ours) - len(set(ours))
    both = read_hashes([store(first), store(second)])
    assert count_copies(both) == len(ours + theirs) - len({*ours, *theirs})
    assert count_shared(hashes, others) == sum(length in theirs for length in ours)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "none"])
@pytest.mark.parametrize("learned_share", [None, 0.4])
@given(lengths=LENGTHS, size=st.integers(2, 16))
@settings(deadline=None, max_examples=10)
def test_targets_are_counted(packing, learned_share, lengths, size):
    rows = pack_documents(store(lengths, learned_share=learned_share), packing, size, True, PAD)
    done = []
    counted = count_targets(rows, done.append)
    every = [rows[i] for i in range(len(rows))]
    assert sum(done) == len(rows)
    assert counted == sum(int((row["shift_labels"] != -100).sum()) for row in every)
    padded = sum(int((row["input_ids"] == PAD).sum()) for row in every)
    assert round(rows.padding_share * len(rows) * size) == padded


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "none"])
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("pad_id", [PAD, END])
@given(lengths=LENGTHS, size=st.integers(2, 16), learned_share=st.sampled_from([None, 0.0, 0.5, 1.0]))
@settings(deadline=None, max_examples=10)
def test_every_token_of_a_row_is_shown_as_the_loss_sees_it(
    packing, separate, pad_id, lengths, size, learned_share
):
    """Learned tokens are the labels, in their order; tokens and padding are the row's."""
    rows = pack_documents(store(lengths, learned_share=learned_share), packing, size, separate, pad_id)
    for index in range(len(rows)):
        row = {key: tensor.numpy() for key, tensor in rows[index].items()}
        labels = row["shift_labels"]
        runs, padding = split_row(
            row["input_ids"], labels, row.get("position_ids"), END, getattr(rows, "pad_id", None)
        )
        shown = [token for run in runs for token in run.ids]
        whole = [*row["input_ids"], labels[-1]] if labels[-1] != -100 else [*row["input_ids"]]
        assert shown + [pad_id] * padding == whole
        assert [token for run in runs if run.in_loss for token in run.ids] == labels[labels != -100].tolist()
        if separate or pad_id != END:
            assert padding == (0 if packing == "concatenate" else size - placed(rows, index))
        for before, after in itertools.pairwise(runs):
            assert before.in_loss != after.in_loss or before.document != after.document
            if before.document != after.document and separate:
                assert not after.in_loss  # the first token of a document is predicted from nothing


def test_mismatched_answers_are_not_in_the_loss():
    labels = torch.tensor([[-100, 7, -100, 8, -100, 9, -100]])
    segments = torch.tensor([[0, 0, 1, 1, 2, 2, -1]])
    batch = {"shift_labels": labels, "segments": segments, "segment_kinds": torch.tensor([[1, 3, 2, 0]])}
    assert read_loss_labels(batch).tolist() == [[-100, 7, -100, -100, -100, 9, -100]]


def placed(rows, index):
    """Tokens of documents in a row."""
    return int(rows._lengths[rows._bounds[index] : rows._bounds[index + 1]].sum())


def test_a_row_reads_with_and_without_colours():
    labels = np.array([7, -100, 8, END, -100, -100])
    runs, padding = split_row(np.array([5, 7, 6, 8, END, PAD]), labels, None, END, PAD)
    plain = format_row(runs, padding, Words(), is_coloured=False).plain
    assert plain == "5⟦7⟧6⟦8 1⟧\n--- padding: 1 position ---"
    coloured = format_row(runs, padding, Words(), is_coloured=True)
    assert "⟦" not in coloured.plain
    buffer = io.StringIO()
    Console(file=buffer, force_terminal=True, color_system="standard").print(coloured)
    assert "\x1b[1;32m7" in buffer.getvalue()
    joined, _ = split_row(
        np.array([5, END, 6, 7]), np.array([END, -100, 7, 9]), np.array([0, 1, 0, 1]), END, None
    )
    assert format_row(joined, 0, Words(), is_coloured=False).plain == "5⟦1⟧\n--- next document ---\n6⟦7 9⟧"


def test_shares():
    shares = [format_percent(0, 5), format_percent(1, 5), format_percent(1, 10**6), format_percent(0, 0)]
    assert shares == ["0.0 %", "20.0 %", "< 0.1 %", "0.0 %"]


@pytest.mark.parametrize("width", [20, 60])
def test_no_cell_of_a_table_is_cut_or_wrapped(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    name = "model.layers.0.self_attn.q_proj.weight"
    Screen(no_color=True).table(["kind", "changed", "tensor"], [["weight", "100.0%", name]])
    head, row = capsys.readouterr().out.splitlines()
    assert (head.split(), row.split()) == (["kind", "changed", "tensor"], ["weight", "100.0%", name])


def test_text_is_printed_as_it_is(capsys):
    screen = Screen(no_color=False)
    screen.line("[bold]" + "x" * 300 + " :smile:")
    screen.table(["a"], [["[red]"]])
    written = capsys.readouterr().out
    assert "[bold]" + "x" * 300 + " :smile:\n" in written
    assert "[red]" in written


def inspect(tmp_path, data, *more):
    recipe = {
        "name": "seen",
        "runs_dir": str(tmp_path / "runs"),
        "max_epochs": 1,
        "model": {"kind": "cnn"},
        "batch": {"micro_batch_size": 3},
        "data": data,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return main(["inspect", "--config", str(tmp_path / "recipe.yaml"), *more])


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name, count in (("bee", 9), ("cat", 6)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (10 + i, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"


@pytest.mark.slow
def test_images(tmp_path, folder, capsys):
    data = {"kind": "images", "path": str(folder), "image_size": 12, "eval_fraction": 0.0}
    data["augmentations"] = {"RandomHorizontalFlip": {}}
    assert inspect(tmp_path, data) == 0
    shown = capsys.readouterr().out
    assert "15 training images, 0 held out, 2 classes" in shown
    assert "class training images held out bee 9 0 cat 6 0" in " ".join(shown.split())
    assert "inputs (3, 3, 12, 12) float32" in " ".join(shown.split())


def test_held_out_images_that_are_trained_on_are_counted(tmp_path, folder, capsys):
    for name in ("cat", "bee"):
        (tmp_path / "held" / name).mkdir(parents=True)
        copied = (folder / name / "1.png").read_bytes()
        (tmp_path / "held" / name / "a.png").write_bytes(copied)
    Image.new("RGB", (9, 9)).save(tmp_path / "held" / "cat" / "new.png")
    held = str(tmp_path / "held")
    data = {"kind": "images", "path": str(folder), "image_size": 12, "eval_path": held}
    assert inspect(tmp_path, data) == 0
    assert "images: 2 of 3 held-out images are also trained on" in capsys.readouterr().out


@pytest.mark.slow
def test_digits(tmp_path, capsys):
    assert inspect(tmp_path, {"kind": "digits"}) == 0
    assert "1,438 training images, 359 held out, 10 classes" in capsys.readouterr().out


MODULE = """
import torch
class Own:
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, index): return {"inputs": torch.zeros(4, 2), "labels": torch.tensor(index)}
def data(split): return Own(7 if split == "train" else 5)
"""


def test_data_of_ones_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_for_inspect.py").write_text(MODULE)
    assert inspect(tmp_path, {"kind": "own_for_inspect:data"}) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "train 7 eval 5" in shown
    assert "inputs (3, 4, 2) float32" in shown
    assert "labels (3,) int64" in shown


def test_bad_input_is_one_line(tmp_path, capsys, folder):
    data = {"kind": "images", "path": str(folder), "image_size": 12}
    for changed, more, message in (
        ({"path": str(tmp_path / "imagse")}, [], 'did you mean "images"?'),
        ({"pahts": 1}, [], "unknown key"),
        ({}, ["--samples", "-1"], "--samples -1: expected 0 or more"),
    ):
        assert inspect(tmp_path, data | changed, *more) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
