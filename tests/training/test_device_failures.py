"""Exceptions and their meaning: out of memory, a failed device, and neither."""

from __future__ import annotations

import errno
import re

import numpy as np
import pytest
import torch
from support.launch import ROOT, write_recipe

import pipeline
from pipeline.__main__ import main
from pipeline.config.settings import load_settings
from pipeline.config.split import Device
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.errors import DeviceFailedError, DeviceMemoryError
from pipeline.files import format_bytes
from pipeline.planner.forecast import forecast
from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.shapes import read_model_spec
from pipeline.training import device_failures
from pipeline.training.device_failures import MemoryShortage, TrainingAdvice, explain_failure

pytestmark = pytest.mark.slow

# Word for word, of torch 2.11's allocator.
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.81 "
    "GiB is free. Process 9 has 77.29 GiB memory in use. Of the allocated memory 70.12 GiB is allocated by "
    "PyTorch, and 5.30 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
JOB = Job(Ranks(0, 0, 2, 2), torch.device("cpu"))


def told(error, *overrides, job=JOB):
    recipe = ROOT / "launch" / "recipes" / "python_stdlib.yaml"
    settings = load_settings(recipe, ROOT / "ds_configs" / "zero2.json", overrides)
    return explain_failure(error, job.device if job else None, TrainingAdvice(settings, job))


def test_the_numbers_and_what_to_change():
    error = told(torch.OutOfMemoryError(CUDA), "batch.micro_batch_size=9", "batch.global_batch_size=36")
    assert error.exit_code == 12
    numbers = (
        "asked for 2.50 GiB, of 79.11 GiB in all, 1.81 GiB were free, 70.12 GiB allocated, 5.30 GiB more"
    )
    assert numbers in str(error)
    levers = (
        "best first: batch.micro_batch_size=3 batch.gradient_accumulation_steps=6 (the same step with 3",
        "model.activation_checkpointing=full",
        "ds.zero_optimization.stage=3 (",
    )
    assert sorted(levers, key=str(error).index) == list(levers)


def test_a_lever_that_is_pulled_already_is_left_out():
    changes = ["batch.micro_batch_size=1", "batch.global_batch_size=2", "model.activation_checkpointing=full"]
    text = str(told(torch.OutOfMemoryError(CUDA), *changes, "ds.zero_optimization.stage=3"))
    assert not any(word in text for word in ("micro_batch_size=", "activation_checkpointing", "zero3"))


def test_a_plan_that_fails_hides_no_error():
    """A plan by formula adds nothing here: the memory is the message."""

    def fail(_):
        raise ZeroDivisionError

    settings = load_settings(ROOT / "launch" / "recipes" / "python_stdlib.yaml", None, [])
    found = explain_failure(
        torch.OutOfMemoryError(CUDA), torch.device("cuda"), TrainingAdvice(settings, JOB, forecast=fail)
    )
    assert isinstance(found, DeviceMemoryError)
    assert "the plan expected" not in str(found)


def test_what_was_held_what_was_planned_and_changes_with_their_gains():
    """One change of a kind; the settings accept each, and keep the batch of the step."""
    recipe = ROOT / "launch" / "recipes" / "python_stdlib.yaml"
    gib = 2**30
    words = ["batch.micro_batch_size=64", "batch.global_batch_size=128"]
    settings = load_settings(recipe, ROOT / "ds_configs" / "zero2.json", words)
    place = resolve_hardware("h100", 2, 2)
    model = read_model_spec(settings.config)
    held = {"parameters": 10 * gib, "gradients": 5 * gib, "optimizer": 20 * gib, "engine's buffers": gib}
    job = Job(Ranks(0, 0, 2, 2), torch.device("cpu"))
    advice = TrainingAdvice(
        settings,
        job,
        count_states=lambda kind: held,
        forecast=lambda changed: forecast(changed, model, place),
    )
    found = advice(MemoryShortage("cpu"))
    assert found.facts[0].startswith(
        "this rank's memory: 10.00 GiB parameters, 5.00 GiB gradients, 20.00 GiB optimizer, "
        "1.00 GiB engine's buffers"
    )
    assert re.fullmatch(r"the plan expected [\d.]+ GiB of 2.00 GiB", found.facts[1])
    assert found.circumstances == " at micro_batch_size 64"
    now = forecast(settings, model, place)
    for lever in found.changes:
        words, gain = re.fullmatch(r"(.*?) \(-([\d.]+ [GM]iB), .*\)", lever).groups()
        changed = settings.with_arguments(words.split())
        assert format_bytes(now.peak - forecast(changed, model, place).peak) == gain
        if "sequence_length" not in words:
            assert changed.resolve(2, Device.cpu()).batch_plan.global_batch_size == 128
    assert len({lever.partition("=")[0] for lever in found.changes}) == 3


def test_the_hosts_memory_beside_a_gpu_has_levers_of_its_own():
    settings = load_settings(
        ROOT / "launch" / "recipes" / "python_stdlib.yaml", ROOT / "ds_configs" / "zero2_offload.json", []
    )
    levers = TrainingAdvice(settings, Job(Ranks(0, 0, 2, 2), torch.device("cuda")))._list_host_changes()
    assert [lever.partition(" (")[0] for lever in levers][-2:] == [
        "ds.zero_optimization.offload_optimizer.device=none",
        "1 of 2 ranks on this machine",
    ]


def test_what_a_gpu_lacks_is_not_to_come_back_to_it(monkeypatch):
    """The advice of a run without a plan."""
    gpu = Device("cuda", bf16=True, fp16=True, fp8=False)
    monkeypatch.setattr(device_failures, "describe_device", lambda _: gpu)
    recipe = ROOT / "launch" / "recipes" / "python_stdlib.yaml"
    settings = load_settings(recipe, ROOT / "ds_configs" / "zero2_offload.json", [])
    advice = TrainingAdvice(settings, Job(Ranks(0, 0, 2, 2), torch.device("cuda")))
    told = [change.overrides for change in advice._list_accepted_changes()]
    assert ("ds.zero_optimization.stage=3",) in told
    assert not [words for words in told if "device=none" in " ".join(words)]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("model", "while the model is built at micro_batch_size 8"),
        ("forward", "in the forward at"),
        ("backward", "in the backward at"),
        ("step", "in the optimizer's step at"),
    ],
)
def test_where_in_the_run(tmp_path, monkeypatch, where, told):
    def out(*_, **__):
        raise torch.OutOfMemoryError(CUDA)

    fault = {"fault": "memory", "at": 0} if where == "model" else {"fault": "none"}
    recipe = write_recipe(
        tmp_path,
        model={"kind": "support.faults:faulty", "args": fault},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
    )
    monkeypatch.syspath_prepend(ROOT / "tests")
    settings = pipeline.load_settings(recipe)

    def train():
        with pipeline.Run(settings) as run:
            run.step()
            if where == "forward":
                run.model.linear.register_forward_hook(out)
            if where == "backward":
                run.model.linear.weight.register_hook(out)
            if where == "step":
                monkeypatch.setattr(torch.optim.AdamW, "_init_group", out)
            run.step()

    with pytest.raises(DeviceMemoryError, match=f"out of memory on cpu {told}") as caught:
        train()
    has_engine = where != "model"
    assert ("this rank's memory: 0 KiB parameters" in str(caught.value)) == has_engine


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error\nCuda failure 2 'out of memory'"
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=["cublas", "nccl", "pinned", "fork"],
)
def test_other_ways_to_say_it(error):
    assert isinstance(told(error, job=None), DeviceMemoryError)


def test_numpy_says_it_too():
    with pytest.raises(MemoryError) as caught:
        np.empty(2**50)
    assert "out of memory on cpu" in str(told(caught.value))


def test_a_device_that_failed_is_known_by_what_came_of_it_too():
    """Closing an engine whose device failed raises anew."""
    error = ValueError("closing")
    error.__context__ = RuntimeError("CUDA error: an illegal memory access was encountered")
    error = told(error)
    assert isinstance(error, DeviceFailedError)
    assert "illegal memory access" in str(error)
    assert "CUDA_LAUNCH_BLOCKING=1" in str(error)


def test_a_card_that_is_at_fault_is_not_debugged():
    text = str(told(RuntimeError("CUDA error: uncorrectable ECC error encountered")))
    assert "dmesg" in text
    assert "LAUNCH_BLOCKING" not in text


def test_a_mistake_stays_one():
    assert told(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")) is None
    assert told(ValueError("out of memory")) is None


@pytest.fixture
def evaluated(tmp_path):
    """Start a run whose model fails in an evaluation, as EVALUATION_FAULT says.

    Returns:
        The settings of another run, and the directory.
    """
    recipe = write_recipe(
        tmp_path,
        model={"kind": "support.faults:faulty", "args": {"fault": "none"}},
        data={"kind": "support.faults:points"},
        objective={"kind": "classification"},
        max_steps=1,
        eval={"every": 5},
    )
    settings = pipeline.load_settings(recipe, None, [f"run_dir={tmp_path / 'run'}"])
    with pipeline.Run(settings) as run:
        run.train()
    return pipeline.load_settings(recipe, None, [f"run_dir={tmp_path / 'other'}"]), tmp_path / "run"


@pytest.mark.parametrize(("fault", "kind"), [("memory", DeviceMemoryError), ("assert", DeviceFailedError)])
def test_a_run_and_an_evaluation_from_python_raise_ours_with_torchs_as_its_cause(
    evaluated, monkeypatch, fault, kind
):
    settings, directory = evaluated
    monkeypatch.setenv("EVALUATION_FAULT", fault)
    with pytest.raises(kind) as told:
        pipeline.evaluate(directory)
    assert type(told.value.__cause__) is {"memory": torch.OutOfMemoryError}.get(
        fault, getattr(torch, "AcceleratorError", RuntimeError)
    )
    run = pipeline.Run(settings)
    with pytest.raises(kind) as told:
        run.step()  # begins with an evaluation
    assert told.value.exit_code in (12, 14)
    assert type(told.value.__cause__).__module__.startswith("torch")
    run.close()


EVALUATION = (
    r"^error: out of memory on cpu in an evaluation at micro_batch_size 8, at \S+faults.py:\d+ in _cause .*: "
    r"asked for 2.50 GiB, of 79.11 GiB in all, 1.81 GiB were free, 70.12 GiB allocated, .*best first: "
    r"batch.micro_batch_size=4 \(now 8\)"
)


def error_in(text):
    (line,) = [line for line in text.splitlines() if line.startswith("error")]
    return line


def test_a_command_that_is_out_of_memory(evaluated, monkeypatch, capsys):
    monkeypatch.setenv("EVALUATION_FAULT", "memory")
    assert main(["evaluate", str(evaluated[1])]) == 12
    assert re.match(EVALUATION, error_in(capsys.readouterr().err))


def test_one_that_loads_no_model(evaluated, monkeypatch, capsys, tmp_path):
    def no_room(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("pipeline.checkpoint.export.CheckpointWeights.read", lambda *_: np.empty(2**50))
    assert main(["export", str(evaluated[1]), str(tmp_path / "out")]) == 12
    assert "out of memory on cpu while weights are read, at" in error_in(capsys.readouterr().err)
    monkeypatch.setattr("pipeline.cli.checkpoints.find_run_directory", no_room)
    assert main(["checkpoints", str(evaluated[1]), "verify"]) == 12
    assert "What helps, best first: to end other processes" in error_in(capsys.readouterr().err)
