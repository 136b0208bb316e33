"""Weights from elsewhere on two real ranks: under every split the same values, read by rank 0 alone."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from parity.measure import ALONE
from safetensors.torch import save_file
from support.resume_across_splits import SPLITS, GatheredShards, assemble_tensors, copy_shards
from support.tiny import VOCABULARY, make_engine, recipe, token_bundle

from pipeline.config.model_schema import CausalLMConfig
from pipeline.errors import ModelError
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, NoSharding

pytestmark = pytest.mark.slow

ROWS = VOCABULARY - 57
MODEL = recipe()["model"]


def old_model(seed: int = 3):
    sizes = {key: value for key, value in MODEL.items() if key not in ("kind", "max_sequence_length")}
    return build_model(CausalLMConfig(**sizes), ModelRequest(NoSharding(), ROWS, sequence_length=24), seed)


def weights_after_start(job, model, split, folder=None, apart=False):
    """This rank's shards; `apart`: each rank runs where only rank 0 finds the weights."""
    before = Path.cwd()
    if folder is not None:
        here = Path(folder) / str(job.ranks.rank if apart else 0)
        here.mkdir(exist_ok=True)
        os.chdir(here)
    try:
        engine = make_engine(job, recipe(model=model, objective={"kind": "causal_lm"}), split, token_bundle())
        return copy_shards(engine)
    except ModelError as error:
        return str(error)
    finally:
        os.chdir(before)


def together(results):
    return assemble_tensors(GatheredShards({}, [shard for shards in results for shard in shards]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights with fewer rows than the tokenizer needs: in one file, without tied ones, and in a folder."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "0").mkdir()
    model = old_model()
    model.save_pretrained(folder / "0" / "folder")
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    save_file(state, folder / "0" / "w.safetensors")
    return str(folder)


FROM = {
    "weights": MODEL | {"weights": "w.safetensors", "grow_vocabulary": True},
    "pretrained": {"kind": "causal_lm", "pretrained": "folder", "grow_vocabulary": True},
}


@cache
def plain(folder, source):
    return together([weights_after_start(ALONE, FROM[source], SPLITS["plain"].json, folder)])


def check(ranks, folder, split, source="weights"):
    expected = plain(folder, source)
    model = old_model()
    for name, value in model.state_dict().items():
        mine = expected[name, "weight"].reshape(-1, *value.shape[1:])
        assert np.array_equal(mine[: len(value)], value.numpy())
    pool = ranks(SPLITS[split].world_size)
    apart = source == "weights"
    found = together(pool.run(weights_after_start, FROM[source], SPLITS[split].json, folder, apart))
    assert found.keys() == expected.keys()
    is_half = "16" in split
    for (name, kind), values in expected.items():
        want = torch.from_numpy(values)
        want = want.bfloat16().float() if is_half else want
        assert np.array_equal(found[name, kind], want.numpy()), name


@pytest.mark.daily("ddp", "zero3", "zero3-bf16", "tensor-zero1", "pipeline-zero1")
@pytest.mark.parametrize(
    "split", ["ddp", "zero3", "zero3-bf16", "zero3-all-cpu", "zero3-hpz", "pipeline-zero1", "tensor-zero1"]
)
def test_every_split_has_the_plain_models_values(ranks, folder, split):
    check(ranks, folder, split)


@pytest.mark.daily("zero3", "pipeline-zero1")
@pytest.mark.parametrize("split", ["zero3", "zero3-hpz", "pipeline-zero1", "tensor-zero1"])
def test_a_pretrained_vocabulary_grows_under_every_split(ranks, folder, split):
    check(ranks, folder, split, "pretrained")


def test_every_rank_hears_why_not(ranks, folder):
    told = ranks(2).run(
        weights_after_start, MODEL | {"weights": "w.safetensors"}, SPLITS["zero3"].json, folder, True
    )
    assert told[0] == told[1]
    assert "model.grow_vocabulary=true to add rows" in told[0]
