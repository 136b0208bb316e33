"""Files that weights come in: each kind of them, what is none, what is hostile."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest
import torch
from parity.measure import ALONE
from safetensors.torch import save_file
from support.captured_logs import capture_logs
from support.checkpoint_stores import make_store
from support.tiny import make_engine, recipe, token_bundle
from support.weights import assert_same, cnn, copy_state, llama, load, refusal_message, small
from torch import nn

pytestmark = pytest.mark.slow

PLAIN = {"torch": {"parallel": "single"}}


def in_shards(folder, state, suffix, save):
    """Two files and their index, as transformers names them."""
    names = list(state)
    places = {}
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    for number, part in ((1, names[::2]), (2, names[1::2])):
        file = f"{stem}-{number:05d}-of-00002.{suffix}"
        save({name: state[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


# --- where from ---------------------------------------------------------------------------------------

SOURCES = {
    "safetensors": lambda state, to: save_file(state, to / "w.safetensors") or to / "w.safetensors",
    "folder": lambda state, to: save_file(state, to / "model.safetensors") or to,
    "folder, any name": lambda state, to: save_file(state, to / "w.safetensors") or to,
    "safetensors shards": lambda state, to: in_shards(to, state, "safetensors", save_file),
    "pt": lambda state, to: torch.save(state, to / "w.pt") or to / "w.pt",
    "pth": lambda state, to: torch.save(state, to / "w.pth") or to / "w.pth",
    "bin": lambda state, to: torch.save(state, to / "w.bin") or to / "w.bin",
    "pt before 1.6": lambda state, to: (
        torch.save(state, to / "w.pt", _use_new_zipfile_serialization=False) or to / "w.pt"
    ),
    "folder of bin": lambda state, to: torch.save(state, to / "pytorch_model.bin") or to,
    "bin shards": lambda state, to: in_shards(to, state, "bin", torch.save),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_file_gives_the_same_weights(tmp_path, kind):
    expected = copy_state(llama(seed=3))
    assert_same(load(llama(), SOURCES[kind](expected, tmp_path)), expected)


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_a_folder_that_transformers_wrote(tmp_path, shard_size):
    saved = llama(seed=3)
    saved.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    assert_same(load(llama(), tmp_path), copy_state(saved))


def test_a_snapshot_in_the_hubs_cache_is_made_of_links(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(copy_state(cnn(seed=3)), blobs / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert_same(load(cnn(), snapshot), copy_state(cnn(seed=3)))


@pytest.mark.parametrize("build", [cnn, small, llama])
def test_any_model_is_filled_to_the_last_buffer(tmp_path, build):
    expected = {name: value + 1 for name, value in copy_state(build(seed=3)).items()}
    torch.save(expected, tmp_path / "w.pt")
    model = build()
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    assert_same(load(model, tmp_path / "w.pt"), expected)
    assert places == {name: value.data_ptr() for name, value in model.state_dict().items()}
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_loaded_into_fp32(tmp_path, dtype):
    there = {name: value.to(dtype) for name, value in llama(seed=3).state_dict().items()}
    save_file(there, tmp_path / "w.safetensors")
    model = load(llama(), tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_same(model, {name: value.float() for name, value in there.items()})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(a run directory with the checkpoints of two steps, the weights in each)."""
    folder = tmp_path_factory.mktemp("run")
    store = make_store(folder / "checkpoints", ALONE)
    kept = {}
    for step in (1, 2):
        engine = make_engine(ALONE, recipe(seed=step), PLAIN, token_bundle())
        assert store.save(engine, {"global_step": step}, wait=True).problem is None
        kept[step] = copy_state(engine.module)
    store.close()
    return folder, kept


def test_a_run_directory_gives_its_newest_checkpoint(run):
    folder, kept = run
    assert_same(load(llama(), folder), kept[2])
    assert_same(load(llama(), folder / "checkpoints"), kept[2])
    assert_same(load(llama(), folder / "checkpoints" / "step-00000001"), kept[1])


def test_a_damaged_checkpoint_is_never_read(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    kept = run[1]
    for number, path in enumerate(sorted((folder / "checkpoints").glob("step-*/rank-*"), reverse=True)):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        assert "is damaged: rank-00000.safetensors: the content is damaged" in refusal_message(
            llama(), path.parent
        )
        if number == 0:
            with capture_logs() as lines:
                assert_same(load(llama(), folder), kept[1])
            assert "step-00000002 is damaged" in lines[0]
    assert "has no intact checkpoint; the newest: " in refusal_message(llama(), folder)


@pytest.mark.parametrize(
    "envelope",
    [
        lambda state: {
            "state_dict": state,
            "epoch": 3,
            "optimizer": {"state": {0: {"exp_avg": state["scale"]}}},
        },
        lambda state: {"model": state, "args": {"lr": 0.1}},
        lambda state: {"model_state_dict": state, "step": torch.tensor(3)},
        lambda state: {"module": {"state_dict": state}},
        lambda state: {"model": {"hidden_size": 3}, "module": state},
    ],
)
def test_a_state_dict_in_its_envelope(tmp_path, envelope):
    expected = copy_state(small(seed=3))
    torch.save(envelope(expected), tmp_path / "w.pt")
    assert_same(load(small(), tmp_path / "w.pt"), expected)


# --- what is no weights -------------------------------------------------------------------------------


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["torch", "before 1.6", "bare", "shard"])
def test_nothing_in_a_hostile_pickle_is_run(tmp_path, how):
    content = copy_state(small()) | {"first.bias": Hostile(tmp_path / "ran")}
    path = tmp_path / "pytorch_model.bin"
    if how == "bare":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how != "before 1.6")
    if how == "shard":
        path.rename(tmp_path / "one.bin")
        index = {"weight_map": {"first.weight": "one.bin"}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    told = refusal_message(small(), tmp_path)
    assert "which is code and is not run" in told
    assert how == "bare" or "mkdir" in told  # there something before it is refused
    assert not (tmp_path / "ran").exists()


def test_a_whole_pickled_module_is_told_what_to_save(tmp_path):
    torch.save(nn.Linear(3, 4), tmp_path / "w.pt")
    told = refusal_message(small(), tmp_path / "w.pt")
    assert "contains torch.nn.modules.linear.Linear, which is code and is not run" in told
    assert "save model.state_dict() instead" in told


@pytest.mark.parametrize(
    "name", ["../w.safetensors", "ABSOLUTE", "link.safetensors", "below/../../w.safetensors"]
)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_nothing_outside_the_folder_is_read(tmp_path, name, suffix):
    folder = tmp_path / "model"
    outside = tmp_path / f"w.{suffix}"
    (folder / "below").mkdir(parents=True)
    (save_file if suffix == "safetensors" else torch.save)(copy_state(small(seed=3)), outside)
    name = str(outside) if name == "ABSOLUTE" else name.replace("safetensors", suffix)
    if "link" in name:
        (folder / name).symlink_to(outside)
    stem = "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"
    index = {"weight_map": dict.fromkeys(small().state_dict(), name)}
    (folder / f"{stem}.index.json").write_text(json.dumps(index))
    assert f"names a file outside of itself: {name!r}" in refusal_message(small(), folder)
    (folder / stem).symlink_to(outside)
    assert f"names a file outside of itself: {stem!r}" in refusal_message(small(), folder)


def whole_safetensors(folder):
    save_file(copy_state(small()), folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda to: (to / "checkpoints").mkdir() or to, "is a run directory without a checkpoint"),
        (lambda to: save_file({"a": torch.ones(1)}, to / "a.safetensors")
         or save_file({"a": torch.ones(1)}, to / "b.safetensors") or to,
         "it has a.safetensors, b.safetensors: name one of them"),
        (lambda to: (to / "w.bin").write_bytes(b"no weights") and to, "has no weights"),
        (lambda to: (to / "w.bin").write_bytes(b"no weights") and to / "w.bin", "cannot be read as weights"),
        (lambda to: torch.save({}, to / "w.pt") or to / "w.pt", "has no tensors by name"),
        (lambda to: os.truncate(whole_safetensors(to), 300) or to, "model.safetensors cannot be read as saf"),
        (lambda to: torch.save(copy_state(small()), to / "w.pt")
         or os.truncate(to / "w.pt", 900) or to / "w.pt", "cannot be read as weights: "),
        (lambda to: torch.save({"module": {}}, to / "mp_rank_00_model_states.pt") or to, "zero_to_fp32.py"),
        (lambda to: torch.save({"module": {}}, to / "mp_rank_00_model_states.pt")
         or to / "mp_rank_00_model_states.pt", "is part of a checkpoint in DeepSpeed's format; run "),
        (lambda to: (to / "global_step1").mkdir()
         or torch.save({}, to / "global_step1" / "zero_pp_rank_0_mp_rank_00_model_states.pt") or to,
         "is a checkpoint in DeepSpeed's format; run `python zero_to_fp32.py . OUT --safe_serialization`"),
    ],
)  # fmt: skip
def test_what_is_no_weights_is_one_line(tmp_path, make, told):
    assert told in refusal_message(small(), make(tmp_path))


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ("{", "cannot be read as an index"),
        ("[" * 100_000, "cannot be read as an index"),
        ("[]", "cannot be read as an index"),
        ('{"weight_map": []}', "cannot be read as an index"),
        ('{"weight_map": {"a": 3}}', "cannot be read as an index"),
        ('{"weight_map": {}}', "cannot be read as an index"),
        ('{"weight_map": {"a": "b.safetensors"}}', "has no file 'b.safetensors'"),
        ('{"weight_map": {"a": "b\\u0000"}}', "has no file"),
        ('{"weight_map": {"a": "' + "x" * 5000 + '"}}', "has no file"),
        ('{"weight_map": {"a": "loop.safetensors"}}', "has no file"),
        ('{"weight_map": {"a": "one.safetensors"}}', "lacks 'a', which its index lists"),
        (
            '{"weight_map": {"b": "one.safetensors", "c": "one.bin"}}',
            "is listed with files of other formats (.bin, .safetensors)",
        ),
    ],
)
def test_an_index_that_is_none_is_one_line(tmp_path, index, told):
    save_file({"b": torch.ones(1)}, tmp_path / "one.safetensors")
    torch.save({"c": torch.ones(1)}, tmp_path / "one.bin")
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert told in refusal_message(small(), tmp_path)
