"""A step's time: held to runs that the constants were not fitted to, to what must hold at its limits, and to
what the trainer counts itself."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean

import pytest

from pipeline.planner.hardware import EAGER, find_gpu, rates_of
from pipeline.planner.model import Dimensions, Model, Parameter
from pipeline.planner.timing import OPTIMIZER_BYTES, Job, exposed, fitted, mean_keys, step_time

ROOT = Path(__file__).resolve().parents[2]
H100 = rates_of(find_gpu("h100"), 5e10)
JOB = Job(8.03e9, 6.98e9, 32, 4096, 8192, vocabulary=128256)
QUIET = replace(H100, straggling=0.0, launch=0.0, floor=0.0, entries=0.0, stream=0.0)


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import published

    return published


def test_runs_that_nothing_was_fitted_to_are_met(published):
    runs, size, correlation = published.summary("test")
    assert runs >= 150
    assert size <= 0.08
    assert correlation >= 0.97


def test_no_group_of_those_runs_is_met_badly(published):
    groups = defaultdict(list)
    for speed in published.load():
        if speed.use == "test":
            groups[speed.group].append(abs(published.error(speed)))
    assert len(groups) >= 10
    assert {"LoRA"} <= {kind for _, _, kind in groups}
    assert {group: mean(errors) for group, errors in groups.items() if mean(errors) > 0.12} == {}


def test_every_field_of_a_published_run_is_read(published):
    told = {"source", "model", "gpu", "gpus", "kernels", "use", "tokens_per_second", "where"}
    known = {field.name for field in fields(Job)} | told
    for line in published.SPEEDS.read_text().splitlines():
        assert set(json.loads(line)) <= known


def test_without_collectives_a_step_is_its_arithmetic_and_its_optimizer():
    job = replace(JOB, rows=2, micro_batches=3)
    step = step_time(job, QUIET)
    tokens = 6 * 8192
    assert step.linear == pytest.approx(6 * job.blocks * tokens / QUIET.products)
    assert step.vocabulary == pytest.approx(6 * 4096 * 128256 * tokens / QUIET.products)
    assert step.attention == pytest.approx(6 * 32 * 4096 * 8192 * tokens / QUIET.attention)
    assert step.optimizer == pytest.approx(job.parameters * OPTIMIZER_BYTES / QUIET.memory)
    assert step.seconds == pytest.approx(step.compute + step.optimizer)
    again = step_time(replace(job, recompute=1.0), QUIET)
    assert again.linear == pytest.approx(step.linear * 4 / 3)
    assert again.vocabulary == step.vocabulary
    assert step_time(replace(job, recompute=0.5), QUIET).linear == pytest.approx(step.linear * 7 / 6)


def test_frozen_matrices_save_their_gradients():
    whole = step_time(JOB, QUIET)
    adapter = step_time(replace(JOB, weight_gradients=0.0, trained=0.005), QUIET)
    assert adapter.linear == pytest.approx(whole.linear * 2 / 3)
    assert adapter.optimizer < whole.optimizer / 100
    assert adapter.model_flops < whole.model_flops
    held = step_time(replace(JOB, weight_gradients=0.0, trained=0.005, quantised=True), QUIET)
    assert held.elementwise > adapter.elementwise


def test_a_pipelines_bubble_shrinks_with_its_micro_batches():
    free = replace(QUIET, network=1e18, link=1e18, link_latency=0.0, network_latency=0.0)
    for count in (4, 8, 64):
        job = replace(JOB, vocabulary=0, stage=1, pipeline=4, micro_batches=count)
        step = step_time(job, free)
        assert step.bubble / step.compute == pytest.approx(3 / count)


def test_the_stage_with_the_output_layer_has_fewer_blocks():
    job = replace(JOB, stage=1, pipeline=8, micro_batches=32)
    assert step_time(job, QUIET).seconds < step_time(replace(job, balanced=False), QUIET).seconds


def test_a_step_takes_as_long_as_the_stage_with_the_most_blocks():
    job = replace(JOB, stage=1, pipeline=4, micro_batches=32, balanced=False)
    even = step_time(job, QUIET)
    uneven = step_time(replace(job, dealt=(7, 9, 10, 6)), QUIET)
    assert uneven.linear / even.linear == pytest.approx(10 / 8)
    assert uneven.vocabulary == 0 < step_time(replace(job, dealt=(7, 7, 8, 10)), QUIET).vocabulary


SPLITS = [{"stage": stage, "data": 64, "hpz": hpz} for stage in range(4) for hpz in (False, stage == 3)]
SPLITS += [
    {"stage": 1, "data": 8, "tensor": 8},
    {"stage": 1, "data": 8, "pipeline": 8},
    {"stage": 3, "data": 8, "sequence": 8},
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_slower_network_never_makes_a_step_faster(split):
    job = replace(JOB, **split)
    seconds = [step_time(job, replace(H100, network=rate)).seconds for rate in (5e10, 5e9, 5e8)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[0]


def test_what_is_kept_elsewhere_is_waited_for():
    job = replace(JOB, stage=3, data=8)
    plain = step_time(job, H100)
    on_cpu = step_time(replace(job, optimizer_on="cpu"), H100)
    on_disk = step_time(replace(job, optimizer_on="nvme"), H100)
    assert plain.offload == 0 < on_cpu.offload
    assert plain.optimizer < on_cpu.optimizer < on_disk.optimizer
    assert on_disk.optimizer == pytest.approx(24 * job.parameters / H100.nvme)
    weights = step_time(replace(job, weights_on="cpu"), replace(H100, host=1e9))
    assert weights.offload > 0
    assert step_time(replace(job, activations_on="cpu"), replace(H100, host=1e9)).offload > 0


def test_what_nothing_hides_is_waited_for():
    assert exposed(8.0, beside=100.0, pieces=8) == 1.0
    assert exposed(8.0, beside=0.0, pieces=8) == 8.0
    assert exposed(8.0, beside=3.0, pieces=8) == 5.0
    assert exposed(8.0, beside=100.0, pieces=8, disturbance=0.5) == 4.5


def test_a_measured_speed_corrects_the_prediction():
    job = replace(JOB, stage=3, data=8)
    corrected = fitted(job, H100, 5000)
    assert step_time(job, corrected).tokens_per_second == pytest.approx(5000)
    with pytest.raises(ValueError, match="communication alone"):
        fitted(job, H100, 1e9)


def test_a_launch_bound_model_takes_what_the_host_takes():
    rates = rates_of(find_gpu("h100"), 5e10, kernels=EAGER)
    small = Job(1e7, 8e6, 8, 256, 128)
    assert step_time(small, rates).seconds == pytest.approx(8 * EAGER.floor, rel=0.05)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_flops_are_those_that_the_trainer_counts(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipeline.models.sizes import flops_per_token

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 96, "tie_word_embeddings": False}
    if family == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **sizes)
    whole = AutoModelForCausalLM.from_config(config)
    parameters = tuple(Parameter(name, tuple(p.shape)) for name, p in whole.named_parameters())
    experts = (4, 2) if family == "mixtral" else (0, 0)
    window = getattr(config, "sliding_window", None)
    of = Dimensions(family, 2, 32, 48, 4, 2, 8, 96, False, *experts, window)
    job = Job.of(Model(family, parameters, of), 64)
    assert job.flops_per_token() == flops_per_token(whole, 64)
    assert job.flops_per_token(causal=True) == flops_per_token(whole, 64, causal=True)
    frozen = tuple(replace(p, trains=False) for p in parameters)
    added = (Parameter("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 32)),)
    adapter = Job.of(Model(family, frozen + added, of), 64)
    assert adapter.flops_per_token() == flops_per_token(whole, 64, frozen=True)
    assert 0 < adapter.trained < 0.02
    assert Job.of(Model("images", parameters), 64) is None


def test_keys_of_a_window():
    assert mean_keys(64, 64) == 32
    assert mean_keys(64, 16) == 16 - 2
