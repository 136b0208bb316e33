"""Noise on embeddings: as large as it should be, drawn for a document alone, the same under every split."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from parity.measure import ALONE
from pydantic import ValidationError
from support.metrics_rows import read_rows
from support.tiny import make_engine, recipe, resolve, token_bundle
from support.token_store import Part, Store

from pipeline.config.model_schema import CausalLMConfig, CNNConfig
from pipeline.data.packing import pack_documents
from pipeline.data.random_numbers import derive_token_keys
from pipeline.distributed.process_group import Job
from pipeline.errors import DataError, ModelError
from pipeline.models import build_model
from pipeline.models.embeddings import compute_noise
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.models.transforms import TransformContext, apply_transforms
from pipeline.objectives import CausalLM
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop
from pipeline.training.safeguard import add_noise_keys

pytestmark = pytest.mark.slow

STEPS = 4
END = 0
ALPHA = 30.0  # large enough to be seen in a loss of small weights


def tree_of(alpha: float | None, **changes):
    tree = recipe(max_steps=STEPS, log={"every": 1}, eval={"every": STEPS}, **changes)
    tied = {"extra": {"tie_word_embeddings": True}}  # which AutoTP puts one of its own in the place of
    return tree | {"model": tree["model"] | tied | {"neftune_alpha": alpha}}


def run(job: Job, tree, deepspeed, folder: Path, packed: bool = True, steps: int = STEPS):
    """(loss, gradient norm) of each step, and the evaluation losses before the first and after the last."""
    config, resolved = resolve(tree, deepspeed, job.ranks.world_size)
    parts = assemble(config, resolved, job, token_bundle(packed=packed), folder)
    with parts.trackers, TrainLoop(parts) as loop:
        while loop.step() is not None and loop.state.global_step < steps:
            pass
    parts.loader.close()
    parts.engine.close()
    rows = read_rows(folder)
    curve = [(row["train/loss"], row["train/grad_norm"]) for row in rows if "train/loss" in row]
    return curve, [row["eval/loss"] for row in rows if "eval/loss" in row]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """One process, plain PyTorch."""
    return run(ALONE, tree_of(ALPHA), None, tmp_path_factory.mktemp("expected"))


ZERO_1 = {"zero_optimization": {"stage": 1}}
SPLITS = {
    "ddp": None,
    "zero3": {"zero_optimization": {"stage": 3}},
    "tensor": ZERO_1 | {"tensor_parallel": {"autotp_size": 2}},
    "sequence": ZERO_1 | {"sequence_parallel_size": 2},
    "stages": ZERO_1 | {"pipeline": {"stages": 2}},
}


@pytest.mark.daily("zero3", "sequence", "stages")
@pytest.mark.parametrize("split", SPLITS)
def test_one_curve_whatever_the_split(ranks, tmp_path, expected, split):
    curve, evaluated = ranks(2).run(run, tree_of(ALPHA), SPLITS[split], tmp_path)[0]
    assert np.array(curve) == pytest.approx(np.array(expected[0]), rel=1e-5)
    assert evaluated == pytest.approx(expected[1], rel=1e-5)


def test_micro_batches_recomputation_and_a_resume_change_nothing(tmp_path, expected):
    batch = {"micro_batch_size": 8, "global_batch_size": 8}
    tree = tree_of(ALPHA, batch=batch)
    tree["model"]["activation_checkpointing"] = "full"
    run(ALONE, tree | {"checkpoint": {"every": 2}}, None, tmp_path, steps=3)
    curve, evaluated = run(ALONE, tree, None, tmp_path)
    assert np.array(curve) == pytest.approx(np.array(expected[0]), rel=1e-5)
    assert evaluated == pytest.approx(expected[1], rel=1e-5)


def test_it_is_seen_in_training_alone(tmp_path, expected):
    (loss, _), *_ = (quiet := run(ALONE, tree_of(None), None, tmp_path))[0]
    noisy, _ = expected[0][0]
    assert abs(noisy - loss) > 1e-4 * loss
    assert expected[1][0] == quiet[1][0]  # before the first step


def test_noise_is_uniform_and_as_large_as_the_document_says():
    ids = torch.randint(1, 300, (3, 512), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(size) for size in (128, 384)]).repeat(3, 1)
    keys = derive_token_keys({"input_ids": ids, "position_ids": positions}, 0, 7)
    noise = compute_noise(keys, 64, 5.0)
    for first, last in [(0, 128), (128, 512)]:
        largest = 5.0 / math.sqrt((last - first) * 64)
        part = noise[:, first:last]
        assert 0.999 * largest < part.abs().max() <= largest
        assert float(part.pow(2).mean()) == pytest.approx(largest**2 / 3, rel=0.03)
        assert abs(float(part.mean())) < 0.02 * largest
    tokens = (noise / noise.square().mean(-1, keepdim=True).sqrt()).flatten(0, 1)
    like = (tokens @ tokens.T / 64).fill_diagonal_(0).square().mean()
    assert float(like) == pytest.approx(1 / 64, rel=0.05)  # no two tokens go together


def test_a_document_has_the_same_noise_wherever_it_lies_and_another_each_step():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randint(1, 300, (size,), generator=generator) for size in (5, 9))
    pad = torch.zeros(6, dtype=torch.int64)
    alone = compute_noise(derive_token_keys({"input_ids": one[None]}, 0, 0), 8, ALPHA)[0]
    row = torch.cat([other, one, pad])[None]
    positions = torch.cat([torch.arange(9), torch.arange(5), torch.arange(6)])[None]
    packed = derive_token_keys({"input_ids": row, "position_ids": positions}, 0, 0)
    assert torch.equal(compute_noise(packed, 8, ALPHA)[0, 9:14], alone)
    for padded, real in [((pad, one), slice(6, 11)), ((one, pad), slice(5))]:
        ids = torch.cat(padded)[None]
        masked = derive_token_keys({"input_ids": ids, "attention_mask": (ids > 0).long()}, 0, 0)
        assert torch.equal(compute_noise(masked, 8, ALPHA)[0, real], alone)
    for key in [(0, 1), (1, 0)]:
        drawn = compute_noise(derive_token_keys({"input_ids": one[None]}, *key), 8, ALPHA)[0]
        assert not (drawn == alone).any()
    assert not (alone[0] == alone[1]).any()


def test_packing_does_not_change_a_steps_loss():
    documents = [list(range(1 + 20 * i, 1 + 20 * i + size)) for i, size in enumerate((5, 9, 3, 12, 7))]
    tokens = [token for document in documents for token in (*document, END)]
    ends = np.cumsum([len(document) + 1 for document in documents])
    store = Store([Part(np.array(tokens, dtype=np.uint16), ends, None)])
    losses = {}
    for packing in ("none", "best_fit"):
        rows = pack_documents(store, packing, 24, True, END)
        losses[packing], rows_taken = [], len(rows)
        for alpha in (ALPHA, None):
            engine = make_engine(ALONE, tree_of(alpha), None, token_bundle())
            batch = rows.__getitems__(range(rows_taken))
            batches = add_noise_keys([batch], 0, 0) if alpha else [batch]
            losses[packing].append(float(engine.train_step(batches, CausalLM(), 1e-3, 0).loss_sum))
    assert rows_taken < len(documents)
    assert losses["best_fit"] == pytest.approx(losses["none"], rel=1e-6)
    assert abs(losses["none"][0] / losses["none"][1] - 1) > 1e-3, "the test cannot fail"


def test_what_has_no_tokens_is_refused():
    here = TransformContext(torch.device("cpu"))
    config = CNNConfig(kind="cnn", channels=4, num_classes=3, neftune_alpha=5.0)
    with pytest.raises(ModelError, match=r"model\.neftune_alpha: a SmallCNN has no token embedding"):
        apply_transforms(build_model(config, ModelRequest(NoSharding()), 0), config, here)
    with pytest.raises(
        DataError, match=r"model\.neftune_alpha: the batch has no input_ids .*inputs \(2, 3\)"
    ):
        derive_token_keys({"inputs": torch.zeros(2, 3)})
    with pytest.raises(ValidationError, match="greater than 0"):
        CausalLMConfig(architecture="llama", neftune_alpha=0.0)
