"""Plain PyTorch on several ranks, its checkpoints, and parameters that take no part in the loss."""

from __future__ import annotations

import json
import os

import pytest
import torch
from support.captured_logs import capture_logs
from support.launch import ROOT, TORCHRUN, TRAIN, make_command, run_python
from support.tiny import deepspeed_json, make_engine, recipe
from torch import nn

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.schema import EngineConfig
from pipeline.config.split import Split
from pipeline.data.bundle import DataBundle
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine.state import format_names, names_without_gradient, watch_gradients
from pipeline.engine.torch_engine import TorchEngine
from pipeline.errors import ModelError
from pipeline.objectives import Classification

pytestmark = pytest.mark.slow

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
# --- a small model, stepped by hand -----------------------------------------------------------------------


class Two(nn.Module):
    """A trunk and two heads; each micro-batch says with its first input which heads take part."""

    def __init__(self, always_both: bool = False):
        super().__init__()
        self.always_both = always_both
        self.trunk = nn.Linear(4, 8)
        self.first = nn.Linear(8, 3)
        self.second = nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = torch.tanh(self.trunk(inputs))
        both = self.always_both or bool(inputs[0, 0] > 0)
        return self.first(hidden) + self.second(hidden) if both else self.first(hidden)


def two(always_both: bool = False):
    torch.manual_seed(0)
    return Two(always_both)


def engine_of(job: Job, model: nn.Module, **config) -> TorchEngine:
    parallel = "ddp" if job.ranks.world_size > 1 else "single"
    optimizer = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.5)
    return TorchEngine(
        model, optimizer, EngineConfig(**config), Split(job.ranks.world_size, "fp32", parallel), job
    )


def batch_of(seed: int, both: bool):
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    inputs[0, 0] = 1.0 if both else -1.0
    return {"inputs": inputs, "labels": inputs.argmax(-1).clamp(max=2)}


def step(engine: TorchEngine, *micro_batches):
    return engine.train_step(list(micro_batches), Classification(), 1e-2, False)


def weights(engine: TorchEngine):
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


# --- parameters that take no part ---------------------------------------------------------------------------


def refusal(job: Job, steps):
    """The error's text, and after how many good steps it came; a step lists its micro-batches: both heads?"""
    engine = engine_of(job, two(), bucket_cap_mb=1e-5)  # a bucket a parameter: some are sent, not all
    for index, micro_batches in enumerate(steps):
        try:
            step(engine, *(batch_of(seed, both) for seed, both in enumerate(micro_batches)))
        except ModelError as error:
            return str(error), index
    return "", len(steps)


@pytest.mark.parametrize(
    ("steps", "good", "what"),
    [
        ([[False]], 0, "second.weight, second.bias"),
        ([[False, False]], 0, "second.weight, second.bias"),
        ([[True], [True], [False], [True]], 2, "second.weight, second.bias"),
        ([[True, False]], 0, "some of the parameters, in a step's last micro-batch,"),
        ([[False, True], [True, True], [True]], 3, None),  # what counts is the last micro-batch
    ],
)
def test_ddp_names_what_takes_no_part_before_anything_is_updated(ranks, steps, good, what):
    for message, index in ranks(2).run(refusal, steps):
        assert index == good
        if what is not None:
            assert message.startswith(f"model: {what} took no part in the loss, and ddp waits")
            assert "engine.find_unused_parameters: true" in message
            assert "\n" not in message


def looking(job: Job, other_rank_uses_it: bool):
    """Losses and weights with find_unused_parameters; the lines of the log."""
    engine = engine_of(job, two(), find_unused_parameters=True)
    mine = [job.ranks.rank] if job.ranks.world_size > 1 else [0, 1]
    with capture_logs() as lines:
        for seed in range(3):
            step(
                engine,
                *(
                    batch_of(10 * seed + rank + 2 * i, other_rank_uses_it and rank == 1)
                    for i in (0, 1)
                    for rank in mine
                ),
            )
    return weights(engine), lines


@pytest.mark.daily("False")
@pytest.mark.parametrize("other_rank_uses_it", [True, False])
def test_ddp_trains_without_them_where_it_is_told_to(ranks, other_rank_uses_it):
    expected, alone = looking(ALONE, other_rank_uses_it)
    for trained, lines in ranks(2).run(looking, other_rank_uses_it):
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
        told = [line for line in lines if "took no part in the first step" in line]
        assert told == [line for line in alone if "took no part" in line]
        assert len(told) == (0 if other_rank_uses_it else 1)
    assert torch.equal(expected["second.weight"], two().second.weight) == (not other_rank_uses_it)


def watched(job: Job, deepspeed, always_both: bool):
    tree = recipe(
        model={"kind": "test_torch_engine:two", "args": {"always_both": always_both}},
        objective={"kind": "classification"},
        batch={"micro_batch_size": 4, "gradient_accumulation_steps": 2},
    )
    engine = make_engine(job, tree, deepspeed, DataBundle([], {}, dict, None, None, 3, "none"))
    end_watch = watch_gradients(engine.module.named_parameters())
    step(engine, batch_of(0, False), batch_of(1, False))
    names = end_watch()
    step(engine, batch_of(2, True), batch_of(3, True))
    return names, end_watch()


@pytest.mark.daily("2-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_watch_finds_them_under_deepspeed_and_then_looks_away(ranks, stage, precision):
    json = deepspeed_json(stage, precision)
    unused = ["second.weight", "second.bias"]
    assert ranks(2).run(watched, json, False) == [(unused, unused)] * 2
    assert ranks(2).run(watched, json, True) == [([], [])] * 2


def test_a_message_names_five():
    assert format_names(["a", "b"]) == "a, b"
    assert format_names(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_frozen_parameters_are_not_missed():
    model = two()
    model.second.requires_grad_(False)
    model(batch_of(0, False)["inputs"]).sum().backward()
    assert names_without_gradient(model) == []
    assert watch_gradients(model.named_parameters())() == [
        "trunk.weight",
        "trunk.bias",
        "first.weight",
        "first.bias",
    ]


# --- real launches ------------------------------------------------------------------------------------------

RECIPE = ["--config", str(ROOT / "launch" / "recipes" / "digits_cnn.yaml"), "wandb.mode=disabled"]
TWO = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", TRAIN]


def run(arguments, folder, **extra):
    done = run_python(*arguments, f"run_dir={folder}", **extra)
    text = done.stdout + done.stderr
    return done.returncode, text


@pytest.mark.daily("torchrun")
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_ranks_train_with_ddp_and_end_well(tmp_path, launcher):
    small = [*RECIPE, "max_epochs=2", "optimizer.learning_rate=1e-2", "schedule.warmup=0"]
    start = [*TWO, *small]
    if launcher == "deepspeed":
        start = make_command("--deepspeed", "ds_configs/torch_ddp.json", *small, ranks=2)
    code, text = run(start, tmp_path)
    assert code == 0, text
    assert "plain PyTorch, DistributedDataParallel" in text
    assert "destroy_process_group" not in text
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert losses[-1] < 0.9 * losses[0]


class ByRank(Two):
    """Rank 1 leaves the second head out: DDP would wait for it for ever."""

    def forward(self, inputs):
        self.always_both = os.environ["RANK"] == "0"
        return super().forward(-inputs.flatten(1)[:, :4].abs())


def by_rank():
    model = ByRank()
    model.first, model.second = nn.Linear(8, 10), nn.Linear(8, 10)
    return model


@pytest.mark.nightly
def test_a_parameter_that_one_rank_leaves_out_is_told_and_ends_the_job(tmp_path):
    own = ["model={kind: 'test_torch_engine:by_rank'}", "objective={kind: classification}", "max_epochs=1"]
    path = os.pathsep.join(str(ROOT / "tests" / folder) for folder in ("", "engine"))
    code, text = run([*TWO, *RECIPE, *own], tmp_path, PYTHONPATH=path)
    assert code != 0
    assert text.count("error: ") == 1, text
    assert "error: model: second.weight, second.bias took no part in the loss" in text
