"""The training loops that are compared, each as its users write it. All start from the same weights."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from peers import (
    Batch,
    Script,
    Trained,
    bare_deepspeed,
    bare_deepspeed_our_loss,
    bare_pytorch,
    bare_pytorch_our_loss,
    compiled_fsdp2,
    compiled_pytorch,
    hugging_face_trainer,
    trainer_with_liger,
    trainer_with_unsloth,
)
from processes import FinishedError, Gate, Task
from torch import Tensor
from workload import DRAW_ON_DEVICE, FP8, FULL

from pipeline.config.settings import Settings, load_settings
from pipeline.data import prepare_data
from pipeline.distributed.process_group import describe_device, start_job
from pipeline.distributed.ranks import read_ranks
from pipeline.models import huggingface
from pipeline.models.huggingface import draw_weights
from pipeline.models.sharding import Sharding
from pipeline.models.sizes import flops_per_token
from pipeline.objectives import CausalLM
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop


def take_part(task: Task, gate: Gate) -> dict[str, float | None]:
    """Trains until the gate has enough; then the loss on one fixed batch, and what the run took."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("pipeline").setLevel(logging.INFO)  # what is compiled, what computes attention
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if os.environ.get(DRAW_ON_DEVICE):
        huggingface.draw_weights = draw_on_device
    file = task.json
    overrides = [f"ds.bf16.enabled={str(task.precision == 'bf16').lower()}", "ds.fp16.enabled=false"]
    settings = load_settings(task.recipe, file, overrides if file else [])
    trained = LOOPS[task.peer](task, settings, gate)
    with torch.no_grad():
        loss = float(trained.loss_of(trained.probe))
    if task.peer.startswith("trainer"):
        # At ZeRO 3 it leaves that on for every model that is made afterwards, also one to count the FLOPs of.
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated() / 2**30
        if (rows := task.folder / "metrics.jsonl").exists():  # ours: each row's peak is its own
            of_rows = (json.loads(line) for line in rows.read_text().splitlines())
            memory = max([memory, *(row.get("memory/peak_allocated_gib", 0.0) for row in of_rows)])
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    frozen = settings.config.adapter is not None
    of_row = trained.model, trained.probe["input_ids"].shape[1]
    return {
        "loss": loss,
        "flops_per_token": flops_per_token(*of_row, frozen=frozen),
        "causal_flops_per_token": flops_per_token(*of_row, causal=True, frozen=frozen),
        "peak_memory_gib": memory,
    }


@torch.no_grad()
def draw_on_device(model: Any, sharding: Sharding, draws: bool) -> None:
    """Draw first weights on the GPU, in seconds where a core takes a minute for 8 billion.

    Every participant has the same ones; they are not those of a run, which are the same on any device.
    """
    draw_weights(model, sharding, draws=False)  # what modules with buffers need
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        with sharding.whole([parameter]):
            if parameter.dim() > 1:
                drawn = torch.empty(parameter.shape, device=device)
                parameter.copy_(drawn.normal_(std=0.02, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    model.tie_weights()


class GatedLoader:
    """The pipeline's train loader behind the gate."""

    def __init__(self, loader: Any, gate: Gate):
        self._loader = loader
        self._gate = gate

    def next_group(self) -> list[Batch]:
        self._gate()
        return self._loader.next_group()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def ours(task: Task, settings: Settings, gate: Gate) -> Trained:
    """The pipeline's own loop with everything a run has but evaluation and checkpoints."""
    ranks = read_ranks(os.environ)
    data = prepare_data(settings.config.data)
    job = start_job(
        ranks,
        distributed=settings.deepspeed is not None or ranks.world_size > 1,
        bound=settings.config.distributed.bind_cores,
    )
    resolved = settings.resolve(job.ranks.world_size, describe_device(job.device))
    run = assemble(settings.config, resolved, job, data, task.folder)
    gated = replace(run, eval_loader=None, loader=GatedLoader(run.loader, gate))
    with suppress(FinishedError), run.trackers, TrainLoop(gated) as loop:
        while loop.step() is not None:
            pass

    def loss_of(batch: Batch) -> Tensor:
        loss = run.engine.eval_step(batch, CausalLM())
        return loss.loss_sum / loss.count

    return Trained(run.engine.module, Script(settings, data).probe(), loss_of)


LOOPS: dict[str, Callable[[Task, Settings, Gate], Trained]] = {
    "ours": ours,
    "pytorch": bare_pytorch,
    "pytorch+our-loss": bare_pytorch_our_loss,
    "pytorch-compiled": compiled_pytorch,
    "fsdp2-compiled": compiled_fsdp2,
    "deepspeed": bare_deepspeed,
    "deepspeed+our-loss": bare_deepspeed_our_loss,
    FULL: ours,
    FP8: ours,
    "trainer": hugging_face_trainer,
    "trainer-liger": trainer_with_liger,
    "trainer-unsloth": trainer_with_unsloth,
}
