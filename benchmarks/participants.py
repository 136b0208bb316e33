"""The training loops that are compared, each as its users write it. All start from the same weights."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from processes import FinishedError, Gate, Task
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workload import LOG_EVERY, PeerDataset

from pipeline.assemble import assemble, model_request
from pipeline.config.settings import Settings, load_settings
from pipeline.data import prepare_data
from pipeline.data.bundle import DataBundle
from pipeline.data.sampler import GlobalOrder
from pipeline.distributed.process_group import describe_device, start_job
from pipeline.distributed.ranks import read_ranks
from pipeline.models import build_model
from pipeline.models.flops import flops_per_token
from pipeline.models.sharding import Whole
from pipeline.objectives import CausalLM
from pipeline.training import Loop

Batch = dict[str, Tensor]


class Trained(NamedTuple):
    """A model at the end of its loop."""

    model: nn.Module
    probe: Batch
    loss_of: Callable[[Batch], Tensor]
    """Collective: the mean loss of a batch, dropout off."""


def take_part(task: Task, gate: Gate) -> dict[str, float | None]:
    """Trains until the gate has enough; then the loss on one fixed batch, and what the run took."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    json = task.json
    overrides = [f"ds.bf16.enabled={str(task.precision == 'bf16').lower()}", "ds.fp16.enabled=false"]
    settings = load_settings(task.recipe, json, overrides if json else [])
    trained = LOOPS[task.peer](task, settings, gate)
    with torch.no_grad():
        loss = float(trained.loss_of(trained.probe))
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated() / 2**30
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "loss": loss,
        "flops_per_token": flops_per_token(trained.model, trained.probe["input_ids"].shape[1]),
        "peak_memory_gib": memory,
    }


class GatedLoader:
    """The pipeline's train loader behind the gate."""

    def __init__(self, loader: Any, gate: Gate):
        self._loader = loader
        self._gate = gate

    def next_group(self) -> list[Batch]:
        self._gate()
        return self._loader.next_group()

    def fetch_ahead(self) -> None:
        self._loader.fetch_ahead()

    def source_samples(self) -> dict[str, int]:
        return self._loader.source_samples()

    def state_dict(self) -> dict[str, int]:
        return self._loader.state_dict()

    @property
    def samples_seen(self) -> int:
        return self._loader.samples_seen

    @property
    def epoch(self) -> float:
        return self._loader.epoch


def ours(task: Task, settings: Settings, gate: Gate) -> Trained:
    """The pipeline's own loop with everything a run has but evaluation and checkpoints."""
    job = start_job(read_ranks(os.environ), distributed=settings.deepspeed is not None)
    resolved = settings.resolve(job.ranks.world_size, describe_device(job.device))
    data = prepare_data(settings.config.data)
    run = assemble(settings.config, resolved, job, data, task.folder)
    gated = replace(run, eval_loader=None, loader=GatedLoader(run.loader, gate))
    with suppress(FinishedError), run.sinks, Loop(gated) as loop:
        while loop.step() is not None:
            pass

    def loss_of(batch: Batch) -> Tensor:
        loss = run.engine.eval_step(batch, CausalLM())
        return loss.loss_sum / loss.count

    return Trained(run.engine.module, Script(settings, data).probe(), loss_of)


@dataclass(frozen=True)
class Script:
    """What a peer's script has besides its loop: settings, data, device, model, optimizer."""

    settings: Settings
    data: DataBundle

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @staticmethod
    def of(settings: Settings) -> Script:
        return Script(settings, prepare_data(settings.config.data))

    def dataset(self) -> PeerDataset:
        samples = self.data.train
        return PeerDataset(samples, GlobalOrder(len(samples), self.settings.config.seed))

    def model(self) -> nn.Module:
        config = self.settings.config
        return build_model(config.model, model_request(config, self.data, Whole()), config.seed)

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        numbers = self.settings.config.optimizer
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": numbers.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups, lr=numbers.learning_rate, betas=numbers.betas, eps=numbers.eps, fused=True
        )

    def batches(self) -> Iterator[Batch]:
        """Without end, on the device."""
        dataset = self.dataset()
        loader = DataLoader(
            dataset,
            batch_size=self.settings.config.batch.micro_batch_size,
            sampler=DistributedSampler(dataset, shuffle=False) if dist.is_initialized() else None,
            pin_memory=self.device.type == "cuda",
            drop_last=True,
        )
        while True:
            for batch in loader:
                yield {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def probe(self) -> Batch:
        """One fixed batch to compare the trained models on; every rank has the same."""
        dataset = self.dataset()
        items = [dataset[i] for i in range(self.settings.config.batch.micro_batch_size or 1)]
        return {key: torch.stack([item[key] for item in items]).to(self.device) for key in items[0]}


def bare_pytorch(task: Task, settings: Settings, gate: Gate, objective: CausalLM | None = None) -> Trained:
    """PyTorch alone, DDP where there are several ranks; transformers' loss unless an objective is given."""
    script = Script.of(settings)
    if task.world_size > 1:
        dist.init_process_group("nccl" if script.device.type == "cuda" else "gloo")
    module = script.model().to(script.device)
    model = module
    if task.world_size > 1:
        model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = script.optimizer(model)

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast(script.device.type, torch.bfloat16, enabled=task.precision == "bf16"):
            if objective is None:
                return model(**batch).loss
            loss = objective(model, batch)
            return loss.loss_sum / loss.count

    model.train()
    with suppress(FinishedError):
        for step, batch in enumerate(script.batches(), 1):
            gate()
            loss = loss_of(batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), settings.config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % LOG_EVERY == 0:
                print(f"step {step} loss {loss.item():.4f} norm {norm.item():.4f}", flush=True)
    model.eval()
    return Trained(module, script.probe(), loss_of)


def bare_pytorch_our_loss(task: Task, settings: Settings, gate: Gate) -> Trained:
    """bare_pytorch with the pipeline's blockwise cross entropy: what our lead over it comes from."""
    return bare_pytorch(task, settings, gate, CausalLM())


def bare_deepspeed(task: Task, settings: Settings, gate: Gate) -> Trained:
    """deepspeed.initialize with the same JSON, its "auto"s filled by hand (here: by the pipeline)."""
    import deepspeed

    build_nothing()
    deepspeed.init_distributed()
    script = Script.of(settings)
    config = settings.resolve(task.world_size, describe_device(script.device)).deepspeed
    model = script.model()
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=script.optimizer(model), config=config)
    with suppress(FinishedError):
        for step, batch in enumerate(script.batches(), 1):
            gate()
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            if step % LOG_EVERY == 0:
                print(f"step {step} loss {loss.item():.4f} {engine.get_global_grad_norm()}", flush=True)
    engine.eval()
    return Trained(engine.module, script.probe(), lambda batch: engine(**batch).loss)


def hugging_face_trainer(task: Task, settings: Settings, gate: Gate) -> Trained:
    """transformers.Trainer, with the JSON file as it lies in ds_configs where one is given."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class GateCallback(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            gate()

    if task.json is not None:
        build_nothing()
    script = Script.of(settings)
    model = script.model()
    numbers = settings.config.optimizer
    arguments = TrainingArguments(
        output_dir=str(task.folder),
        max_steps=1_000_000,
        per_device_train_batch_size=settings.config.batch.micro_batch_size,
        learning_rate=numbers.learning_rate,
        adam_beta1=numbers.betas[0],
        adam_beta2=numbers.betas[1],
        adam_epsilon=numbers.eps,
        weight_decay=numbers.weight_decay,
        max_grad_norm=numbers.max_grad_norm,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        bf16=task.precision == "bf16",
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=script.device.type == "cpu",
        dataloader_pin_memory=script.device.type == "cuda",
        deepspeed=str(task.json) if task.json is not None else None,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=script.dataset(), callbacks=[GateCallback()])
    with suppress(FinishedError):
        trainer.train()
    trainer.model_wrapped.eval()
    return Trained(model, script.probe(), lambda batch: trainer.model_wrapped(**batch).loss)


def build_nothing() -> None:
    """On a CPU DeepSpeed compiles a shared-memory all-reduce for a minute when it starts."""
    import deepspeed

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


LOOPS: dict[str, Callable[[Task, Settings, Gate], Trained]] = {
    "ours": ours,
    "pytorch": bare_pytorch,
    "pytorch+our-loss": bare_pytorch_our_loss,
    "deepspeed": bare_deepspeed,
    "trainer": hugging_face_trainer,
}
