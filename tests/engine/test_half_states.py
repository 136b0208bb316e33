"""Master weights and optimizer states in bf16 or fp16: near the curve of fp32 ones, saved, gone on from."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from parity.splits import CPU, LLAMA, NVME, SEQUENCE_2, TENSOR_2, TWO_STAGES, zero
from safetensors.torch import load_file
from support.checkpoint_stores import make_store
from support.resume_across_splits import HALF, STEPS, Run, make_recipe
from support.tiny import resolve

from pipeline.checkpoint.export import export
from pipeline.errors import ConfigError

pytestmark = pytest.mark.slow

MASTERS = {"bf16_master_weights_and_grads": True}
PAIR = MASTERS | {"bf16_optimizer_states": True}
OFFLOADED = {"offload_optimizer": CPU}


# Relative to the loss with fp32 states. What they lose adds up; docs/reference/splits.md has a later loss.
BAND = 5e-3


def split(stage: int, half, more=None, **zero_keys):
    return zero(stage, **zero_keys) | {"bf16": {"enabled": True, **half}} | (more or {})


def dtypes(engine) -> dict[str, set[torch.dtype]]:
    """Dtypes in a checkpoint: of the model, and of each of Adam's two tensors."""
    found: dict[str, set[torch.dtype]] = {}
    for shard in engine.shards():
        found.setdefault(shard.kind, set()).add(shard.dtype)
    return found


def saved(job, json, folder):
    """(losses of an unbroken run that saves in the middle, dtypes of the checkpoint)."""
    run = Run(job, make_recipe(LLAMA), json)
    store = make_store(folder, job)
    losses = run.train(0, HALF)
    store.save_final(run.engine, {"global_step": HALF})
    store.close()
    return losses + run.train(HALF, STEPS), dtypes(run.engine)


def gone_on(job, json, folder):
    """(losses of the second half, dtypes)."""
    run = Run(job, make_recipe(LLAMA), json)
    store = make_store(folder, job)
    assert store.resume(run.engine) == {"global_step": HALF}
    store.close()
    return run.train(HALF, STEPS), dtypes(run.engine)


def kinds(weight: torch.dtype, moments: torch.dtype):
    return {"weight": {weight}, "exp_avg": {moments}, "exp_avg_sq": {moments}}


FP32 = torch.float32
BF16 = torch.bfloat16
WITH_FP32 = split(2, {}), kinds(FP32, FP32)
# The JSON and what its checkpoints hold.
SPLITS = {
    "fp32 states": WITH_FP32,
    **{f"bf16 states, ZeRO {stage}": (split(stage, PAIR), kinds(BF16, BF16)) for stage in (1, 2, 3)},
    "bf16 states, ZeRO 2, CPU": (split(2, PAIR, **OFFLOADED), kinds(BF16, BF16)),
    "bf16 states, ZeRO 3, CPU": (split(3, PAIR, **OFFLOADED), kinds(BF16, BF16)),
    "bf16 masters, ZeRO 1, CPU": (split(1, MASTERS, **OFFLOADED), kinds(BF16, FP32)),
    "bf16 masters, ZeRO 3, CPU": (split(3, MASTERS, **OFFLOADED), kinds(BF16, FP32)),
    "bf16 states, tensor 2": (split(1, PAIR, TENSOR_2), kinds(BF16, BF16)),
    "bf16 states, sequence 2": (split(3, PAIR, SEQUENCE_2), kinds(BF16, BF16)),
    "fp16 masters, ZeRO 2, CPU": (
        zero(2, **OFFLOADED)
        | {"fp16": {"enabled": True, "initial_scale_power": 8, "fp16_master_weights_and_grads": True}},
        kinds(torch.float16, FP32),
    ),
}


@pytest.fixture(scope="module")
def saved_by(ranks, tmp_path_factory):
    """`saved_by(name)`: (folder with the checkpoint, the unbroken run's losses), once each."""
    found = {}

    def by(name):
        if name not in found:
            folder = str(tmp_path_factory.mktemp("saved"))
            losses, of_kind = ranks(2).run(saved, SPLITS[name][0], folder, timeout=500)[0]
            assert of_kind == SPLITS[name][1]
            found[name] = folder, losses
        return found[name]

    return by


@pytest.mark.daily("bf16 states, ZeRO 2")
@pytest.mark.parametrize("name", list(SPLITS)[1:])
def test_near_the_curve_of_fp32_states(saved_by, name):
    assert saved_by(name)[1] == pytest.approx(saved_by("fp32 states")[1], rel=BAND)
    assert saved_by(name)[1] != saved_by("fp32 states")[1], "nothing was kept in half precision"


PAIRS = [
    *((name, name) for name in list(SPLITS)[1:]),
    ("fp32 states", "bf16 states, ZeRO 3"),
    ("bf16 states, ZeRO 2", "bf16 states, ZeRO 3"),
    ("bf16 states, ZeRO 3", "fp32 states"),
    ("bf16 states, ZeRO 3", "bf16 masters, ZeRO 1, CPU"),
    ("bf16 masters, ZeRO 3, CPU", "bf16 states, tensor 2"),
    ("bf16 states, tensor 2", "bf16 states, ZeRO 1"),
]


@pytest.mark.daily("bf16 states, ZeRO 2 to bf16 states, ZeRO 3")
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=[" to ".join(pair) for pair in PAIRS])
def test_goes_on_from_half_states_and_to_them(ranks, saved_by, before, after):
    folder, unbroken = saved_by(before)
    losses, of_kind = ranks(2).run(gone_on, SPLITS[after][0], folder, timeout=500)[0]
    assert of_kind == SPLITS[after][1]
    if before == after:
        assert losses == unbroken[HALF:]
    else:
        assert losses == pytest.approx(unbroken[HALF:], rel=BAND)


def test_bf16_masters_are_exported_as_they_are(saved_by, tmp_path):
    """The fp32 values equal the bf16 ones: fp32 master weights would be rounded."""
    shutil.copytree(saved_by("bf16 states, ZeRO 2")[0], tmp_path / "run" / "checkpoints")
    exported = []
    for dtype in ("fp32", "bf16"):
        written = export(tmp_path / "run", tmp_path / dtype, dtype=dtype)
        exported.append({k: v for file in written.files for k, v in load_file(file).items()})
    assert all(torch.equal(values, exported[1][name].float()) for name, values in exported[0].items())


ADAM_ALONE = (
    "with fp32 states, only DeepSpeed's CPU Adam can step such weights; use bf16_optimizer_states: true"
)
NO_MASTERS = "in another precision, without ZeRO, or with pipeline stages: only ZeRO has master weights"
REFUSED = [
    (split(2, MASTERS), ADAM_ALONE),
    (split(2, PAIR) | {"bf16": {"enabled": False, **PAIR}}, NO_MASTERS),
    (split(1, PAIR, TWO_STAGES), NO_MASTERS),
    (
        split(1, PAIR, {"data_types": {"grad_accum_dtype": "fp32"}}),
        "with fp32 gradient sums keeps fp32 master weights",
    ),
    (split(3, PAIR, offload_optimizer=NVME), ADAM_ALONE),
    (split(3, PAIR, offload_optimizer=CPU | {"ratio": 0.5}), ADAM_ALONE),
    (zero(2) | {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, ADAM_ALONE),
]


@pytest.mark.parametrize(("json", "message"), REFUSED)
def test_where_they_cannot_stand_is_told(json, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(make_recipe(LLAMA), json, 2)


def test_sgd_does_not_step_them_in_host_memory():
    with pytest.raises(ConfigError, match=re.escape(ADAM_ALONE)):
        resolve(make_recipe(LLAMA, kind="sgd"), split(2, PAIR, **OFFLOADED), 2)
