"""Training loops of all participants, each as its users write it. All start from the pipeline's weights."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import FinishedError, Gate, Task
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workload import DRAW_ON_DEVICE, FP8, FULL, LOG_EVERY, PeerDataset

import pipeline
from pipeline.config.settings import Settings, load_settings
from pipeline.data import prepare_data
from pipeline.data.bundle import DataBundle
from pipeline.data.sampler import ShuffledOrder
from pipeline.distributed.process_group import describe_device
from pipeline.models import build_model, huggingface
from pipeline.models.adapters import DEFAULT_ADAPTER_ALPHA, DEFAULT_ADAPTER_RANK, draw_adapter_values
from pipeline.models.huggingface import initialize_weights
from pipeline.models.sharding import NoSharding, Sharding, build_model_request
from pipeline.models.sizes import flops_per_token
from pipeline.objectives import CausalLM

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class TrainedModel:
    """Model at the end of its loop."""

    model: nn.Module
    probe: Batch
    """Fixed batch on which the trained models are compared."""
    loss_of: Callable[[Batch], Tensor]
    """Function that returns the mean loss of a batch without dropout. Collective."""


def take_part(task: Task, gate: Gate) -> dict[str, Any]:
    """Train until the gate ends the loop; return the loss on a fixed batch, FLOPs and peak memory."""
    # The log has the lines about compilation, and about attention if it is that of transformers.
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    trained = train(task, gate)
    with torch.no_grad():
        loss = float(trained.loss_of(trained.probe))
    if task.peer.startswith("trainer"):
        # At ZeRO 3 the Trainer leaves this set, which would shard every later model, also one to count FLOPs.
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated() / 2**30
        record = task.folder / "run" / "metrics.jsonl"
        if record.exists():  # the pipeline resets the peak with every row that it writes
            rows = [json.loads(line) for line in record.read_text().splitlines()]
            memory = max([memory, *(row.get("memory/peak_allocated_gib", 0.0) for row in rows)])
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    frozen = read_settings(task).config.adapter is not None
    flops = flops_per_token(trained.model, trained.probe["input_ids"].shape[1], frozen=frozen)
    return {"loss": loss, "flops_per_token": flops, "peak_memory_gib": memory}


def train(task: Task, gate: Gate) -> TrainedModel:
    """Run the participant's loop until the gate ends it."""
    if os.environ.get(DRAW_ON_DEVICE):
        huggingface.initialize_weights = draw_on_device
    return LOOPS[task.peer](task, read_settings(task), gate)


def read_settings(task: Task, overrides: tuple[str, ...] = ()) -> Settings:
    """Load the participant's recipe and JSON, with overrides for its precision and run directory."""
    words = [f"run_dir={task.folder / 'run'}", *overrides]
    if task.json is not None:
        words += [f"ds.bf16.enabled={str(task.precision == 'bf16').lower()}", "ds.fp16.enabled=false"]
    return load_settings(task.recipe, task.json, words)


@torch.no_grad()
def draw_on_device(model: Any, sharding: Sharding, draws: bool) -> None:
    """Draw first weights on the GPU, which takes seconds for 8 billion; a CPU core takes over a minute.

    All participants get the same weights. They differ from those of a run, which are equal on every device.
    """
    initialize_weights(model, sharding, draws=False)  # fills buffers
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        with sharding.gather([parameter]):
            if parameter.dim() > 1:
                values = torch.empty(parameter.shape, device=device)
                parameter.copy_(values.normal_(std=0.02, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    model.tie_weights()


def ours(task: Task, settings: Settings, gate: Gate) -> TrainedModel:
    """Train a run of the pipeline, without evaluation and checkpoints."""
    run = pipeline.Run(settings)
    engine = run._parts.engine
    store = run._parts.checkpoints
    gate.offer_save(lambda folder, step: store.save(engine, {"global_step": step}), store)
    with suppress(FinishedError):
        while True:
            gate()
            run.step()

    def loss_of(batch: Batch) -> Tensor:
        loss = engine.eval_step(batch, CausalLM())
        return loss.loss_sum / loss.count

    return TrainedModel(run.model, Script(settings).probe(), loss_of)


@dataclass(frozen=True)
class Script:
    """Makes what a peer's script needs besides its loop: data, device, model, optimizer and batches."""

    settings: Settings

    @cached_property
    def data(self) -> DataBundle:
        """Data that the pipeline has prepared."""
        return prepare_data(self.settings.config.data)

    @property
    def device(self) -> torch.device:
        """First GPU, or the CPU."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def dataset(self) -> PeerDataset:
        """Return the training samples in the pipeline's order."""
        samples = self.data.train
        return PeerDataset(samples, ShuffledOrder(len(samples), self.settings.config.seed))

    def model(self) -> nn.Module:
        """Return the model with the pipeline's weights on the CPU, with an adapter if the recipe has one."""
        config = self.settings.config
        model = build_model(config.model, build_model_request(config, self.data, NoSharding()), config.seed)
        if getattr(config.model, "activation_checkpointing", "none") != "none":
            model.gradient_checkpointing_enable()  # transformers can recompute only all blocks
        return model if config.adapter is None else self._with_adapter(model)

    def _with_adapter(self, model: nn.Module) -> nn.Module:
        """Wrap all linear layers except the output layer by peft, with the first values of our adapter."""
        from peft import LoraConfig, get_peft_model

        config = self.settings.config
        adapter = config.adapter
        assert adapter is not None
        if self.settings.deepspeed is None and config.engine.precision == "bf16":
            model = model.to(torch.bfloat16)  # the pipeline keeps the base in bf16, too
        lora = LoraConfig(
            r=adapter.rank or DEFAULT_ADAPTER_RANK,
            lora_alpha=adapter.alpha or DEFAULT_ADAPTER_ALPHA,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        wrapped = get_peft_model(model, lora)
        with torch.no_grad():
            for name, parameter in wrapped.get_base_model().named_parameters():
                if ".lora_" in name:
                    parameter.copy_(draw_adapter_values(name, parameter.shape, adapter, config.seed))
        return wrapped

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """Return fused AdamW with the recipe's numbers; vectors have no weight decay."""
        numbers = self.settings.config.optimizer
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() >= 2]
        vectors = [p for p in trained if p.dim() < 2]
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
        """Yield batches on the device, epoch after epoch."""
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
        """Return the fixed batch on which the trained models are compared; it is the same on every rank."""
        dataset = self.dataset()
        items = [dataset[i] for i in range(self.settings.config.batch.micro_batch_size or 1)]
        return {key: torch.stack([item[key] for item in items]).to(self.device) for key in items[0]}


def mean_loss(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of transformers, or for peers named `...+our-loss` the pipeline's."""
    if not task.peer.endswith("+our-loss"):
        return model(**batch).loss
    loss = CausalLM()(model, batch)
    return loss.loss_sum / loss.count


def bare_pytorch(task: Task, settings: Settings, gate: Gate) -> TrainedModel:
    """Train with PyTorch alone.

    Several ranks use DDP. `pytorch-compiled` compiles the model, and `fsdp2-compiled` shards compiled blocks.
    """
    script = Script(settings)
    if task.world_size > 1:
        dist.init_process_group("nccl" if script.device.type == "cuda" else "gloo")
    module = script.model().to(script.device)
    if task.peer == "pytorch-compiled":
        module.compile()  # the whole model, as torch's documentation shows
    model = module
    if task.peer == "fsdp2-compiled":
        model = compile_and_shard(module, task.precision)
    elif task.world_size > 1:
        model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = script.optimizer(model)

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast(script.device.type, torch.bfloat16, enabled=task.precision == "bf16"):
            return mean_loss(task, model, batch)

    def save(folder: Path, step: int) -> None:
        folder.mkdir()
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / "checkpoint.pt")

    gate.offer_save(save)
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
    return TrainedModel(module, script.probe(), loss_of)


def compile_and_shard(module: nn.Module, precision: str) -> nn.Module:
    """Compile and shard every block as torchtitan does; shards are fp32 and compute in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    bf16 = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
    block_names = set(getattr(module, "_no_split_modules", None) or ())
    for block in [each for each in module.modules() if type(each).__name__ in block_names]:
        block.compile()
        fully_shard(block, mp_policy=policy)
    return fully_shard(module, mp_policy=policy)


def bare_deepspeed(task: Task, settings: Settings, gate: Gate) -> TrainedModel:
    """Train with deepspeed.initialize and the same JSON, in which the pipeline has replaced each "auto"."""
    import deepspeed

    avoid_op_build()
    deepspeed.init_distributed()
    script = Script(settings)
    config = settings.resolve(task.world_size, describe_device(script.device)).deepspeed
    model = script.model()
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=script.optimizer(model), config=config)
    gate.offer_save(lambda folder, _: engine.save_checkpoint(str(folder.parent), tag=folder.name))
    with suppress(FinishedError):
        for step, batch in enumerate(script.batches(), 1):
            gate()
            loss = mean_loss(task, engine, batch)
            engine.backward(loss)
            engine.step()
            if step % LOG_EVERY == 0:
                print(f"step {step} loss {loss.item():.4f} {engine.get_global_grad_norm()}", flush=True)
    engine.eval()
    return TrainedModel(engine.module, script.probe(), lambda batch: mean_loss(task, engine, batch))


def hugging_face_trainer(task: Task, settings: Settings, gate: Gate) -> TrainedModel:
    """Train with transformers.Trainer and the same JSON, and for `trainer-liger` with Liger's kernels."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class GateCallback(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            gate()

    if task.json is not None:
        avoid_op_build()
    script = Script(settings)
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
        use_liger_kernel=task.peer == "trainer-liger",
    )
    model = script.model()
    trainer = Trainer(model=model, args=arguments, train_dataset=script.dataset(), callbacks=[GateCallback()])

    gate.offer_save(lambda *_: trainer._save_checkpoint(trainer.model_wrapped, None))
    with suppress(FinishedError):
        trainer.train()
    trainer.model_wrapped.eval()
    return TrainedModel(model, script.probe(), lambda batch: trainer.model_wrapped(**batch).loss)


def avoid_op_build() -> None:
    """Keep DeepSpeed on a CPU from compiling a shared-memory all-reduce, which takes a minute."""
    import deepspeed

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


LOOPS: dict[str, Callable[[Task, Settings, Gate], TrainedModel]] = {
    "ours": ours,
    FULL: ours,
    FP8: ours,
    "pytorch": bare_pytorch,
    "pytorch+our-loss": bare_pytorch,
    "pytorch-compiled": bare_pytorch,
    "fsdp2-compiled": bare_pytorch,
    "torch.save": bare_pytorch,
    "deepspeed": bare_deepspeed,
    "deepspeed+our-loss": bare_deepspeed,
    "trainer": hugging_face_trainer,
    "trainer-liger": hugging_face_trainer,
}
