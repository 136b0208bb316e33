"""Train 10 = train 5, save, load into new engines, train 5: exactly, at every stage and precision."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from support.tiny import deepspeed_json, make_engine, recipe, settings, token_bundle

from pipeline.assemble import build_loader
from pipeline.checkpoint.store import CheckpointStore, complete_checkpoints
from pipeline.config.batch import plan_batch
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.errors import CheckpointError
from pipeline.objectives import CausalLM
from pipeline.training import seed_step

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))


def dropout_recipe():
    """GPT-2 with dropout, so that random numbers matter too."""
    model = {"kind": "causal_lm", "architecture": "gpt2", "num_layers": 1, "num_heads": 2, "hidden_size": 16}
    return recipe(model=model | {"extra": {"resid_pdrop": 0.2, "embd_pdrop": 0.2}})


class Trial:
    """An engine and its loader, stepping and keeping the losses."""

    def __init__(self, job: Job, deepspeed):
        data, tree = token_bundle(), dropout_recipe()
        config = settings(tree, deepspeed).config
        self.job = job
        self.engine = make_engine(job, tree, deepspeed, data)
        self.loader = build_loader(
            config, plan_batch(config.batch, self.engine.dp_world_size), data, self.engine
        )
        self.losses = []

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            seed_step(0, step, self.engine.dp_rank)
            result = self.engine.train_step(self.loader.next_group(), CausalLM(), 1e-2, False)
            self.losses.append((float(result.loss_sum), float(result.grad_norm), float(result.skipped)))


def unbroken_and_resumed(job: Job, deepspeed, folder: str):
    unbroken = Trial(job, deepspeed)
    unbroken.train(0, 10)
    store = CheckpointStore(Path(folder), keep_last=1, job=job)
    first = Trial(job, deepspeed)
    first.train(0, 5)
    store.save(first.engine, {"global_step": 5, "samples_seen": first.loader.samples_seen})
    second = Trial(job, deepspeed)
    state = store.load(second.engine, complete_checkpoints(Path(folder))[-1])
    second.loader.seek(state["samples_seen"])
    second.train(5, 10)
    return unbroken.losses, first.losses + second.losses


def fp16_search(stage: int):
    """A loss scale that is still being searched when the checkpoint is written."""
    return deepspeed_json(stage) | {"fp16": {"enabled": True, "initial_scale_power": 21, "hysteresis": 1}}


def splits():
    """`make check` keeps stages 2 and 3."""
    yield pytest.param(None, 1, id="plain")
    for stage in (0, 1, 2, 3):
        marks = pytest.mark.slow if stage < 2 else ()
        for world_size in (1, 2):
            name = f"zero{stage}-fp32-{world_size}"
            yield pytest.param(deepspeed_json(stage), world_size, id=name, marks=marks)
        yield pytest.param(deepspeed_json(stage, "bf16"), 2, id=f"zero{stage}-bf16-2", marks=pytest.mark.slow)
        yield pytest.param(fp16_search(stage), 1, id=f"zero{stage}-fp16-1", marks=marks)


@pytest.mark.parametrize(("deepspeed", "world_size"), splits())
def test_resumed_equals_unbroken_bit_for_bit(ranks, tmp_path, deepspeed, world_size):
    if deepspeed is None:
        results = [unbroken_and_resumed(ALONE, None, str(tmp_path))]
    else:
        results = ranks(world_size).run(unbroken_and_resumed, deepspeed, str(tmp_path))
    for unbroken, resumed in results:
        assert resumed == unbroken


def test_a_checkpoint_counts_only_with_its_marker(tmp_path):
    for name, marked in [("step-00000005", True), ("step-00000010", False), ("step-00000015.partial", True)]:
        (tmp_path / name).mkdir()
        if marked:
            (tmp_path / name / "COMPLETE").touch()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000005"]


def save_and_load(job: Job, folder: str, saved, loaded):
    store = CheckpointStore(Path(folder), keep_last=3, job=job)
    store.save(Trial(job, saved).engine, {"global_step": 1})
    try:
        store.load(Trial(job, loaded).engine, complete_checkpoints(Path(folder))[-1])
    except CheckpointError as error:
        return str(error)
    return None


def test_another_engines_checkpoint_is_refused_by_name(ranks, tmp_path):
    assert (
        "was saved by plain PyTorch"
        in ranks(1).run(save_and_load, str(tmp_path / "a"), None, deepspeed_json(1))[0]
    )
    assert (
        "--deepspeed it had" in ranks(1).run(save_and_load, str(tmp_path / "b"), deepspeed_json(1), None)[0]
    )


class Hostile:
    """Touches a file when it is unpickled."""

    def __init__(self, target: str):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def load_hostile(job: Job, folder: str, target: str) -> str:
    store = CheckpointStore(Path(folder), keep_last=1, job=job)
    trial = Trial(job, deepspeed_json(1))
    trial.train(0, 1)
    store.save(trial.engine, {"global_step": 1})
    files = list(Path(folder).rglob("*.pt"))
    assert files
    for path in files:
        torch.save({"module": Hostile(target)}, path)
    try:
        store.load(trial.engine, complete_checkpoints(Path(folder))[-1])
    except pickle.UnpicklingError as error:
        return str(error)
    return "loaded"


def test_a_hostile_pickle_in_a_checkpoint_does_not_run(ranks, tmp_path):
    answer = ranks(1).run(load_hostile, str(tmp_path / "checkpoints"), str(tmp_path / "owned"))[0]
    assert "weights_only" in answer.lower() or "unsupported" in answer.lower()
    assert not (tmp_path / "owned").exists()
