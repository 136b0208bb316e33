"""The peers' training loops, each as its users write it. All start from the pipeline's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from adapter_peers import with_peft, with_unsloth
from processes import FinishedError, Gate, Task
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workload import LOG_EVERY, PeerDataset

from pipeline.config.settings import Settings
from pipeline.data import prepare_data
from pipeline.data.bundle import DataBundle
from pipeline.data.sampler import GlobalOrder
from pipeline.distributed.process_group import describe_device
from pipeline.models import build_model
from pipeline.models.sharding import Whole
from pipeline.objectives import CausalLM
from pipeline.training.assemble import model_request

Batch = dict[str, Tensor]


class Trained(NamedTuple):
    """A model at the end of its loop."""

    model: nn.Module
    probe: Batch
    loss_of: Callable[[Batch], Tensor]
    """Collective: the mean loss of a batch, dropout off."""


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

    def weights(self) -> nn.Module:
        config = self.settings.config
        return build_model(config.model, model_request(config, self.data, Whole()), config.seed)

    def model(self) -> nn.Module:
        config, model = self.settings.config, self.weights()
        if getattr(config.model, "activation_checkpointing", "none") != "none":
            model.gradient_checkpointing_enable()  # all blocks, as transformers offers it
        return model if config.adapter is None else with_peft(model, config, self.base_dtype)

    @property
    def base_dtype(self) -> torch.dtype:
        """Dtype of the weights under an adapter: bf16 where the run computes in it, as ours holds them."""
        engine = self.settings.config.engine
        in_bf16 = self.settings.deepspeed is None and engine.precision == "bf16"
        return torch.bfloat16 if in_bf16 else torch.float32

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        numbers = self.settings.config.optimizer
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": numbers.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=numbers.learning_rate,
            betas=numbers.betas,
            eps=numbers.eps,
            fused=True,
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


Wrap = Callable[[nn.Module], nn.Module]


def bare_pytorch(
    task: Task,
    settings: Settings,
    gate: Gate,
    objective: CausalLM | None = None,
    wrap: Wrap | None = None,
) -> Trained:
    """PyTorch alone, DDP where there are several ranks; transformers' loss unless an objective is given.

    Args:
        wrap: What is done to the model in place of DDP.
    """
    script = Script.of(settings)
    if task.world_size > 1:
        dist.init_process_group("nccl" if script.device.type == "cuda" else "gloo")
    module = script.model().to(script.device)
    model = module
    if wrap is not None:
        model = wrap(module)
    elif task.world_size > 1:
        model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = script.optimizer(model)

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast(script.device.type, torch.bfloat16, enabled=task.precision == "bf16"):
            return _mean_loss(model, batch, objective)

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
                print(f"step {step} loss {loss.item():.4f} norm {float(norm):.4f}", flush=True)
    model.eval()
    return Trained(module, script.probe(), loss_of)


def _mean_loss(model: nn.Module, batch: Batch, objective: CausalLM | None) -> Tensor:
    if objective is None:
        return model(**batch).loss
    loss = objective(model, batch)
    return loss.loss_sum / loss.count


def bare_pytorch_our_loss(task: Task, settings: Settings, gate: Gate) -> Trained:
    """bare_pytorch with the pipeline's objective: how much of our lead over it comes from the loss."""
    return bare_pytorch(task, settings, gate, CausalLM())


def compiled_pytorch(task: Task, settings: Settings, gate: Gate) -> Trained:
    """bare_pytorch with torch.compile on the whole model, as its documentation shows; inside of DDP."""

    def wrap(module: nn.Module) -> nn.Module:
        module.compile()
        distributed = task.world_size > 1
        return nn.parallel.DistributedDataParallel(module) if distributed else module

    return bare_pytorch(task, settings, gate, wrap=wrap)


def compiled_fsdp2(task: Task, settings: Settings, gate: Gate) -> Trained:
    """torch's fully_shard with every block compiled, as torchtitan does it: fp32 shards, computed in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def wrap(module: nn.Module) -> nn.Module:
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if torch.cuda.is_available() else "gloo", rank=0, world_size=1, store=dist.HashStore()
            )
        bf16 = torch.bfloat16 if task.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
        blocks = [each for each in module.modules() if isinstance(each, _block_classes(module))]
        for block in blocks:
            block.compile()
            fully_shard(block, mp_policy=policy)
        return fully_shard(module, mp_policy=policy)

    return bare_pytorch(task, settings, gate, wrap=wrap)


def _block_classes(module: nn.Module) -> tuple[type[nn.Module], ...]:
    names = set(getattr(module, "_no_split_modules", None) or ())
    return tuple({type(each) for each in module.modules() if type(each).__name__ in names})


def bare_deepspeed(task: Task, settings: Settings, gate: Gate, objective: CausalLM | None = None) -> Trained:
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
            loss = _mean_loss(engine, batch, objective)
            engine.backward(loss)
            engine.step()
            if step % LOG_EVERY == 0:
                print(f"step {step} loss {loss.item():.4f} {engine.get_global_grad_norm()}", flush=True)
    engine.eval()
    return Trained(engine.module, script.probe(), lambda batch: _mean_loss(engine, batch, objective))


def bare_deepspeed_our_loss(task: Task, settings: Settings, gate: Gate) -> Trained:
    """bare_deepspeed with the pipeline's objective."""
    return bare_deepspeed(task, settings, gate, CausalLM())


def hugging_face_trainer(
    task: Task, settings: Settings, gate: Gate, *, liger: bool = False, unsloth: bool = False
) -> Trained:
    """transformers.Trainer, with the JSON file of ds_configs where one is given."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class GateCallback(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            gate()

    if task.json is not None:
        build_nothing()
    script = Script.of(settings)
    if unsloth:
        model = with_unsloth(script.weights(), settings.config, task.folder / "model")
    else:
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
        deepspeed=None if task.json is None else str(task.json),
        use_liger_kernel=liger,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=script.dataset(), callbacks=[GateCallback()])
    with suppress(FinishedError):
        trainer.train()
    trainer.model_wrapped.eval()
    return Trained(model, script.probe(), lambda batch: trainer.model_wrapped(**batch).loss)


def trainer_with_liger(task: Task, settings: Settings, gate: Gate) -> Trained:
    """The Trainer with Liger's fused kernels: GPUs only."""
    return hugging_face_trainer(task, settings, gate, liger=True)


def trainer_with_unsloth(task: Task, settings: Settings, gate: Gate) -> Trained:
    """The Trainer with an adapter and kernels by Unsloth: one GPU."""
    return hugging_face_trainer(task, settings, gate, unsloth=True)


def build_nothing() -> None:
    """On a CPU DeepSpeed compiles a shared-memory all-reduce for a minute when it starts."""
    import deepspeed

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
