"""The peers' training loops, which save as their users do. See savers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peers import Script, build_nothing
from processes import Gate, Task
from saver_diary import Diary, Watch, note_save
from torch import nn

from pipeline.config.settings import Settings
from pipeline.distributed.process_group import describe_device


def bare_pytorch(task: Task, settings: Settings, gate: Gate, diary: Diary) -> None:
    """PyTorch alone, torch.save of both state dicts."""
    script = Script.of(settings)
    model = script.model().to(script.device)
    optimizer = script.optimizer(model)
    watch = Watch(gate, diary)
    model.train()
    for step, batch in enumerate(script.batches(), 1):
        watch()
        with torch.autocast(script.device.type, torch.bfloat16, enabled=task.precision == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % settings.config.checkpoint.every == 0:
            folder = task.folder / f"step-{step}"

            def save(folder: Path = folder, step: int = step) -> None:
                folder.mkdir()
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, folder / "checkpoint.pt")

            note_save(watch, diary, folder, save)


def bare_deepspeed(task: Task, settings: Settings, gate: Gate, diary: Diary) -> None:
    """deepspeed.initialize and engine.save_checkpoint, with the same JSON."""
    import deepspeed

    build_nothing()
    deepspeed.init_distributed()
    script = Script.of(settings)
    config = settings.resolve(task.world_size, describe_device(script.device)).deepspeed
    model = script.model()
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=script.optimizer(model), config=config)
    watch = Watch(gate, diary)
    for step, batch in enumerate(script.batches(), 1):
        watch()
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if step % settings.config.checkpoint.every == 0:
            folder, state = task.folder / f"step-{step}", {"step": step}

            def save(folder: Path = folder, state: dict[str, int] = state) -> None:
                engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=state)

            note_save(watch, diary, folder, save)


def hugging_face_trainer(task: Task, settings: Settings, gate: Gate, diary: Diary) -> None:
    """transformers.Trainer with save_steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    watch = Watch(gate, diary)

    class WatchCallback(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch()

    class WatchedTrainer(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            folder = task.folder / f"checkpoint-{self.state.global_step}"
            save = super()._save_checkpoint
            note_save(watch, diary, folder, lambda: save(*args, **kwargs))

    if task.json is not None:
        build_nothing()
    script = Script.of(settings)
    numbers = settings.config.optimizer
    arguments = TrainingArguments(
        output_dir=str(task.folder),
        max_steps=1_000_000,
        per_device_train_batch_size=settings.config.batch.micro_batch_size,
        learning_rate=numbers.learning_rate,
        max_grad_norm=numbers.max_grad_norm,
        lr_scheduler_type="constant",
        bf16=task.precision == "bf16",
        logging_steps=1000,
        save_strategy="steps",
        save_steps=settings.config.checkpoint.every,
        report_to="none",
        disable_tqdm=True,
        use_cpu=script.device.type == "cpu",
        dataloader_pin_memory=script.device.type == "cuda",
        deepspeed=None if task.json is None else str(task.json),
    )
    callbacks = [WatchCallback()]
    WatchedTrainer(script.model(), arguments, train_dataset=script.dataset(), callbacks=callbacks).train()
