"""A step's time: held to runs that set no constant, to what must hold at its limits, and to perf/mfu."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import fields, replace
from statistics import mean

import pytest
from planner import published_speeds as published
from support.tiny import recipe, resolve

from pipeline.planner.hardware import find_gpu
from pipeline.planner.model import DecoderDimensions, ModelSpec, ParameterSpec
from pipeline.planner.timing import (
    DEFAULT_DOCUMENT_TOKENS,
    HALF_ATTENTION_TOKENS,
    HALF_NETWORK_NODES,
    OPTIMIZER_BYTES,
    StepSpec,
    compute_exposed_seconds,
    estimate_rates,
    estimate_ring_seconds,
    estimate_step_time,
)

H100 = estimate_rates(find_gpu("h100"), 5e10)
JOB = StepSpec(8.03e9, 6.98e9, 32, 4096, 8192, vocabulary=128256)


def test_runs_that_nothing_was_set_by_are_met_and_the_docs_say_how_well():
    found = published.summary("test")
    assert found.runs >= 150
    assert found.mean_error <= 0.08
    assert found.within_range >= 0.9
    assert found.correlation >= 0.97
    text = " ".join(published.PAGE.read_text().split())
    stated = (
        f"On the {found.runs} published runs of dense models that set no constant, the mean error of a step's"
    )
    assert f"{stated} time is {found.mean_error:.1%}, and {found.within_range:.0%} are within 20%" in text
    assert f"The rank correlation is {found.correlation:.3f}." in text
    assert published.written_table() == published.accuracy()


def test_no_group_of_those_runs_is_met_badly():
    groups = defaultdict(list)
    for speed in published.load():
        if speed.use == "test":
            groups[speed.group].append(abs(published.error(speed)))
    assert len(groups) >= 10
    assert {group: mean(errors) for group, errors in groups.items() if mean(errors) > 0.12} == {}


def test_every_field_of_a_published_run_is_read():
    told = {"source", "model", "gpu", "gpus", "kernels", "use", "tokens_per_second", "where"}
    known = {field.name for field in fields(StepSpec)} | told | {"balanced", "overlap"}
    for line in published.SPEEDS.read_text().splitlines():
        assert set(json.loads(line)) <= known


def test_on_one_gpu_a_step_is_its_arithmetic_and_its_optimizer():
    job = replace(JOB, rows=2, micro_batches=3)
    tokens = 6 * 8192
    step = estimate_step_time(job, H100)
    assert step.parts["matrix products"] == pytest.approx(6 * job.blocks * tokens / H100.products)
    attention = 6 * 32 * 4096 * 8192 * tokens / (H100.attention * 8192 / (8192 + HALF_ATTENTION_TOKENS))
    assert step.parts["attention"] == pytest.approx(attention)
    assert step.parts["optimizer"] == pytest.approx(job.parameters * OPTIMIZER_BYTES / H100.memory)
    again = estimate_step_time(replace(job, recompute=1.0), H100)
    assert again.parts["matrix products"] == pytest.approx(step.parts["matrix products"] * 4 / 3)


def test_attention_is_priced_by_the_document():
    """Packed rows of a million tokens cost as much a token as their documents, and long ones reach more."""
    whole = replace(JOB, length=2**20)
    packed = replace(JOB, length=2**20, span=2**17)
    seconds = [estimate_step_time(each, H100).parts["attention"] for each in (whole, packed)]
    assert 7.5 < seconds[0] / seconds[1] < 8.0
    short = replace(JOB, length=2**17)
    assert seconds[1] / 8 == pytest.approx(estimate_step_time(short, H100).parts["attention"])
    rates = [
        job.length * job.attention_span / estimate_step_time(job, H100).parts["attention"]
        for job in (short, replace(JOB, length=512))
    ]
    assert 2 < rates[0] / rates[1] < 3


@pytest.mark.parametrize(
    ("data", "document_tokens", "span"),
    [
        ({}, None, DEFAULT_DOCUMENT_TOKENS),
        ({}, 100_000, 100_000),
        ({"separate_documents": False}, None, 2**20),
        ({"packing": "none"}, 500, 2**20),
        ({"sequence_length": 1024}, None, 1024),
    ],
)
def test_documents_are_those_of_the_recipe(data, document_tokens, span):
    text = {"kind": "text", "paths": ["python_stdlib"], "sequence_length": 2**20, **data}
    config, resolved = resolve(recipe(data=text), {"torch": {"parallel": "single"}}, 1)
    model = ModelSpec(
        "m", (ParameterSpec("layers.0.w", (8, 8)),), DecoderDimensions("llama", 1, 8, 8, 1, 1, 8, 16, False)
    )
    job = StepSpec.from_run(model, config, resolved, document_tokens)
    assert job is not None
    assert job.span == span


def test_frozen_matrices_save_their_gradients():
    whole = estimate_step_time(JOB, H100)
    adapter = estimate_step_time(replace(JOB, weight_gradients=0.0, trained=0.005), H100)
    assert adapter.parts["matrix products"] == pytest.approx(whole.parts["matrix products"] * 2 / 3)
    assert adapter.parts["optimizer"] < whole.parts["optimizer"] / 100
    assert adapter.model_flops < whole.model_flops


def test_a_pipelines_bubble_shrinks_with_its_micro_batches():
    for count in (4, 8, 64):
        step = estimate_step_time(replace(JOB, stage=1, pipeline=4, micro_batches=count), H100)
        work = sum(step.parts[name] for name in ("matrix products", "attention", "between the products"))
        work += step.parts["output layer and loss"] + step.parts["waiting inside of a replica"]
        assert step.parts["bubble of the stages"] / work == pytest.approx(3 / count, rel=0.01)


SPLITS = [{"stage": stage, "data": 64} for stage in range(4)]
SPLITS += [{"stage": 1, "data": 8, "tensor": 8}, {"stage": 1, "data": 8, "pipeline": 8}]
SPLITS += [{"stage": 3, "data": 8, "sequence": 8}]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_slower_network_never_makes_a_step_faster(split):
    job = replace(JOB, **split)
    seconds = [estimate_step_time(job, replace(H100, network=rate)).seconds for rate in (5e10, 5e9, 5e8)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[0]


def test_a_ring_over_hundreds_of_nodes_is_slower():
    """Bandwidth falls to half at HALF_NETWORK_NODES nodes."""
    few, many = (estimate_ring_seconds(1e9, 8 * nodes, 1, H100) for nodes in (2, HALF_NETWORK_NODES))
    assert many / few == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("beside", "disturbance", "waited"),
    [(100.0, 0.0, 0.0), (0.0, 0.0, 8.0), (3.0, 0.0, 5.0), (100.0, 0.5, 4.0)],
)
def test_what_nothing_hides_is_waited_for(beside, disturbance, waited):
    assert compute_exposed_seconds(8.0, beside, disturbance) == waited


def test_a_launch_bound_model_takes_what_the_host_takes():
    rates = estimate_rates(find_gpu("h100"), 5e10, compiled=False)
    assert estimate_step_time(StepSpec(1e7, 8e6, 8, 256, 128), rates).seconds == pytest.approx(
        8 * rates.floor, rel=0.05
    )


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_flops_are_those_that_the_trainer_counts(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipeline.models.sizes import flops_per_token

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 96, "tie_word_embeddings": False}
    if family == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    parameters = tuple(ParameterSpec(name, tuple(p.shape)) for name, p in whole.named_parameters())
    experts = (4, 2) if family == "mixtral" else (0, 0)
    model = ModelSpec(family, parameters, DecoderDimensions(family, 2, 32, 48, 4, 2, 8, 96, False, *experts))
    text = {"kind": "text", "paths": ["python_stdlib"], "sequence_length": 64}
    config, resolved = resolve(recipe(data=text), {"torch": {"parallel": "single"}}, 1)
    job = StepSpec.from_run(model, config, resolved)
    assert job.flops_per_token() == flops_per_token(whole, 64)
    frozen = replace(model, parameters=tuple(replace(p, trains=False) for p in parameters))
    assert StepSpec.from_run(frozen, config, resolved).flops_per_token() == flops_per_token(
        whole, 64, frozen=True
    )
    assert StepSpec.from_run(replace(model, dimensions=None), config, resolved) is None
