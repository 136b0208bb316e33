"""Every kind of optimizer, with groups of parameters, under every split: the curve of one process."""

from __future__ import annotations

import math
from functools import cache

import pytest
from engine.test_step import good_bad_good
from parity.measure import ALONE, has_async_io
from parity.splits import CPU, NVME, SEQUENCE_2, SUMMED, TENSOR_2, TWO_STAGES, zero
from support.resume_across_splits import SPLITS as RESUMED
from support.resume_across_splits import check_resume
from support.tiny import TOLERANCES, make_engine, recipe, token_bundle, train_curve

from pipeline.errors import ConfigError

pytestmark = pytest.mark.slow

PLAIN = {"torch": {"parallel": "single"}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
# The embeddings lie on the first of two stages alone.
GROUPS = [
    {"patterns": ["*embed_tokens*"], "learning_rate_factor": 0.1, "weight_decay": 0.0},
    {"patterns": ["*norm*", "model.layers.1.mlp.*"], "learning_rate_factor": 2.0, "weight_decay": 0.3},
]
# Three optimizers in one run.
MUON = [{"patterns": ["*_proj.weight"], "kind": "muon"}, {"patterns": ["*embed_tokens*"], "kind": "sgd"}]
OPTIMIZERS = {
    "adamw": {"learning_rate": 3e-3, "max_grad_norm": 0.5},
    "sgd": {"kind": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.5},
    "adafactor": {"kind": "adafactor", "learning_rate": 3e-2, "max_grad_norm": 0.5},
    "muon": {"learning_rate": 3e-3, "max_grad_norm": 0.5},
}
MUON_BANDS = (TOLERANCES["fp32"][0], 3e-5)  # its polynomial is computed in bf16, in which a last bit grows
NEED_WHOLE = ("adafactor", "muon")
SPLITS = {
    "DDP": {"torch": {"parallel": "ddp"}},
    **{f"ZeRO {stage}": zero(stage) for stage in range(4)},
    "ZeRO 2, round robin": zero(2, round_robin_gradients=True),
    "ZeRO 3, small groups": zero(3, sub_group_size=3_000),
    "ZeRO 2, optimizer on CPU": zero(2, offload_optimizer=CPU),
    "ZeRO 3, all on CPU": zero(3, offload_optimizer=CPU, offload_param=CPU),
    "ZeRO 3, optimizer on NVMe": zero(3, offload_optimizer=NVME),
    **{f"tensor 2, ZeRO {stage}": zero(stage) | TENSOR_2 for stage in range(4)},
    **{f"pipeline 2, ZeRO {stage}": zero(stage) | TWO_STAGES for stage in (0, 1)},
    **{f"sequence 2, ZeRO {stage}": zero(stage) | SEQUENCE_2 for stage in (0, 3)},
    **{f"ZeRO {stage}, bf16": zero(stage) | BF16 for stage in range(4)},
    "ZeRO 1, summed in fp32, bf16": zero(1) | BF16 | SUMMED,
    "tensor 2, ZeRO 0, bf16": zero(0) | TENSOR_2 | BF16,
    "pipeline 2, ZeRO 1, bf16": zero(1) | TWO_STAGES | BF16,
    **{f"ZeRO {stage}, fp16": zero(stage) | FP16 for stage in range(4)},
    "pipeline 2, ZeRO 0, fp16": zero(0) | TWO_STAGES | FP16,
}

# What leaves every parameter whole.
WHOLE = ("DDP", "ZeRO 0", "pipeline 2, ZeRO 0", "sequence 2, ZeRO 0", "ZeRO 0, bf16", "ZeRO 0, fp16")


def groups_of(kind):
    return MUON if kind == "muon" else GROUPS


def tree(kind, groups):
    return recipe(optimizer=OPTIMIZERS[kind] | ({"groups": groups} if groups else {}))


@cache
def alone(kind, with_groups=True):
    return train_curve(ALONE, tree(kind, groups_of(kind) if with_groups else None), PLAIN)


def differences(got, expected):
    """Relative, the largest of all steps: loss, gradient norm."""
    return [
        max(abs(a[column] - b[column]) / b[column] for a, b in zip(got, expected, strict=True))
        for column in (0, 1)
    ]


def cases():
    for kind in OPTIMIZERS:
        for name in WHOLE if kind in NEED_WHOLE else SPLITS:
            yield pytest.param(kind, name, id=f"{kind}-{name}")


@pytest.mark.timeout(960)
@pytest.mark.daily(
    *("adamw-ZeRO 3", "adamw-pipeline 2, ZeRO 1", "adamw-ZeRO 0, bf16", "sgd-ZeRO 2"),
    *("sgd-ZeRO 2, optimizer on CPU", "adafactor-ZeRO 0", "muon-pipeline 2, ZeRO 0"),
)
@pytest.mark.parametrize(("kind", "name"), cases())
def test_the_curve_is_that_of_one_process(ranks, kind, name):
    if "NVMe" in name and not has_async_io():
        pytest.skip("no libaio to link with (apt-get install libaio-dev)")
    curves = ranks(2).run(train_curve, tree(kind, groups_of(kind)), SPLITS[name], timeout=900)
    precision = next((half for half in ("bf16", "fp16") if half in name), "fp32")
    bands = MUON_BANDS if (kind, precision) == ("muon", "fp32") else TOLERANCES[precision]
    for found, allowed in zip(differences(curves[0], alone(kind)), bands, strict=True):
        assert found < allowed


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_groups_and_kinds_show_in_the_curve(kind):
    """A split that left out the groups, or took another kind, would be far outside of the band of fp32."""
    assert differences(alone(kind), alone(kind, with_groups=False))[0] > 50 * TOLERANCES["fp32"][0]
    other = next(each for each in OPTIMIZERS if each != kind)
    assert differences(alone(kind), alone(other))[0] > 50 * TOLERANCES["fp32"][0]


@pytest.mark.parametrize(
    "json", [PLAIN, zero(3), zero(0) | TWO_STAGES], ids=["plain", "ZeRO 3", "pipeline, ZeRO 0"]
)
def test_a_pattern_that_matches_nothing_is_told_under_every_split(ranks, json):
    wrong = tree("adamw", [{"patterns": ["*.embeds.*"]}])
    said = [refused(ALONE, wrong, json)] if json is PLAIN else ranks(2).run(refused, wrong, json)
    for message in said:
        assert message.startswith("optimizer.groups.0.patterns: '*.embeds.*' matches no parameter")
        assert "model.embed_tokens.weight" in message


def refused(job, tree, json):
    try:
        make_engine(job, tree, json, token_bundle())
    except ConfigError as error:
        return str(error)
    return "nothing was said"


BAD = {
    "plain": PLAIN,
    "ZeRO 0, bf16": zero(0) | BF16,
    "ZeRO 2, optimizer on CPU": zero(2, offload_optimizer=CPU),
    "ZeRO 0, pipeline 2": zero(0) | TWO_STAGES,
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("adafactor", "plain"),
        ("muon", "plain"),
        ("adafactor", "ZeRO 0, bf16"),
        ("muon", "ZeRO 0, bf16"),
        ("sgd", "ZeRO 2, optimizer on CPU"),
        ("adafactor", "ZeRO 0, pipeline 2"),
    ],
)
def test_a_bad_batch_changes_no_parameter(ranks, kind, name):
    """AdamW's are in test_step.py."""
    batch = {"micro_batch_size": 2, "gradient_accumulation_steps": 1}
    optimizer = OPTIMIZERS[kind] | ({"groups": MUON} if kind == "muon" else {})
    arguments = recipe(batch=batch, optimizer=optimizer), BAD[name], math.nan
    results = (
        [good_bad_good(ALONE, *arguments)] if name == "plain" else ranks(2).run(good_bad_good, *arguments)
    )
    for unchanged, skipped, moved, finite in results:
        assert (unchanged, skipped, moved, finite) == (True, 1.0, True, True)


def exchanges():
    """Each split on either side of a resume once, and those in half precision go on from themselves."""
    rings = {
        "sgd": (
            *("plain", "zero1", "ddp", "zero3", "tensor-zero1", "zero0", "pipeline-zero1", "zero2"),
            *("zero3-small-groups", "zero2-cpu", "tensor-zero0", "zero3-all-cpu", "pipeline-zero0", "nvme"),
            *("zero2-round-robin", "sequence-zero2"),
        ),
        **dict.fromkeys(NEED_WHOLE, ("plain", "zero0", "pipeline-zero0", "ddp", "sequence-zero0")),
    }
    itself = {
        "sgd": ("zero0-bf16", "zero1-bf16", "zero2-fp16", "zero3-bf16", "pipeline-zero1-bf16"),
        **dict.fromkeys(NEED_WHOLE, ("zero0-bf16", "pipeline-zero0-fp16")),
    }
    for kind, names in rings.items():
        pairs = [*zip(names, names[1:] + names[:1], strict=True), *((name, name) for name in itself[kind])]
        for saved, resumed in pairs:
            yield pytest.param(kind, saved, resumed, id=f"{kind}-{saved}-to-{resumed}")


@pytest.mark.timeout(1800)
@pytest.mark.daily(
    "sgd-zero3-to-tensor-zero1", "adafactor-pipeline-zero0-to-ddp", "muon-zero0-bf16-to-zero0-bf16"
)
@pytest.mark.parametrize(("kind", "saved", "resumed"), exchanges())
def test_any_split_goes_on_from_any_other(ranks, kind, saved, resumed):
    optimizer = {key: value for key, value in OPTIMIZERS[kind].items() if key != "learning_rate"}
    rate = OPTIMIZERS[kind]["learning_rate"]
    check_resume(ranks, RESUMED[saved], RESUMED[resumed], rate=rate, groups=groups_of(kind), **optimizer)
