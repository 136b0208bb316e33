"""Finds what was infinite or NaN first in a step, and in which sample, by doing the step again with hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.config.batch_plan import BatchPlan
from pipeline.data.batches import BatchOrigin, LoadedBatch, get_host_batch, iter_tensors, locate_sample
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import Engine, StepLimits
from pipeline.models.batch_norm import is_sync_batch_norm
from pipeline.objectives import Batch, GlobalBatch, LossSum, Objective

SHOWN = 8  # samples that a line names
INPUT, FORWARD, BACKWARD = range(3)
LOSS = "the loss"
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class NonFiniteValue(NamedTuple):
    """The first of a rank. They sort: an input comes before all layers, and the cause is the smallest."""

    phase: int
    """INPUT, FORWARD or BACKWARD."""
    micro_batch: int
    order: int
    """Of the modules and gradients of the micro-batch."""
    turn: int
    """Of ranks at the same place: one that is given it, and the last stage of a pipeline in a backward."""
    rank: int
    where: str
    remark: str
    samples: tuple[str, ...]
    """By source and index; empty: not known."""
    is_narrowed: bool
    """Whether these samples alone have it; else they are all samples of the micro-batch."""

    def describe(self, rank: object) -> str:
        """Return what was found, where and in which samples.

        Args:
            rank: Its name.
        """
        samples = ", ".join(self.samples[:SHOWN]) + (" ..." if len(self.samples) > SHOWN else "")
        if samples and (self.phase == INPUT or self.where == LOSS):
            return f"{self.where} of sample{'s' * (len(self.samples) > 1)} {samples}{self.remark}, on {rank}"
        return f"{self.where}{self.remark}, on {rank}" + (f"; samples: {samples}" if samples else "")


class FirstNonFinite:
    """Looks at the batch, what every module gives, the loss, and every gradient, while its hooks are there.

    Each look waits for the device. A module whose input is not finite itself is not the first. If no module
    gave that input, code between modules made it, and the line names the module that was given it.

    Args:
        module: This rank's, without any wrapper.
        micro_batches: Of the step.
        rank: This one.
    """

    def __init__(self, module: nn.Module, micro_batches: Sequence[Batch], rank: int):
        self._module = module
        self._micro_batches = micro_batches
        self._rank = rank
        self._number = self._batch_number = -1
        self._order = 0
        self._is_input_finite = True
        self.found: NonFiniteValue | None = None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside it a step is done."""
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(self._module.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            for layer, name in _names_in_the_whole(self._module).items():
                hook = layer.register_forward_hook(partial(self._forward, name), with_kwargs=True)
                stack.callback(hook.remove)
                for own, p in layer.named_parameters(name, recurse=False):
                    if p.requires_grad:
                        stack.callback(p.register_hook(partial(self._backward, own)).remove)
            yield

    def seen_by(self, objective: Objective) -> Objective:
        """The objective, its batches and losses looked at."""
        return _Looking(objective, self)

    def restart(self) -> None:
        """Count the micro-batches from here."""
        self._number = self._batch_number = -1

    def _begin(self, _: nn.Module, given: Any, named: Any) -> None:
        self._number, self._order = self._number + 1, 0
        # The first is the data; further ones may be masks.
        is_data_finite = _is_finite(next(iter_tensors((given, named)), None))
        self._is_input_finite = is_data_finite and not _is_spoilt((given, named))

    def look_at_inputs(self, batch: Batch, keys: Collection[str]) -> None:
        """Look at the entries that the model gets, as they arrive there."""
        self._batch_number += 1
        self._look_at_entries(batch, keys)

    def look_at_loss(self, loss: LossSum, batch: Batch, keys: Collection[str]) -> None:
        """Look at the loss, and where it is not finite at the entries that the objective has read."""
        if self.found is None and not bool(loss.minimised.isfinite().all()):
            self._look_at_entries(batch, keys)
            self._note(FORWARD, LOSS, "", None)

    def _look_at_entries(self, batch: Batch, keys: Collection[str]) -> None:
        """Note the first that is not finite. A mask may hide places with -inf."""
        for key in sorted(keys):
            value = batch.get(key)
            if not _is_finite(value) and ("mask" not in key or _is_spoilt(value)):
                self._note_input(key, batch)

    def _forward(self, name: str, layer: nn.Module, given: Any, named: Any, output: Any) -> None:
        self._order += 1
        if self.found is not None or _is_finite(output):
            return
        where = f"what {name or 'the model'} ({type(layer).__name__})"
        if not _is_finite((given, named)):
            # Masks hold -inf; batch normalisation takes none.
            if self._is_input_finite and (_is_spoilt((given, named)) or is_sync_batch_norm(layer)):
                self._note(FORWARD, f"{where} is given", ", in forward", (given, named), turn=-1)
            return
        wrong = [own for own, p in layer.named_parameters(recurse=False) if not _is_finite(p)]
        where = f"the weights of {name} ({', '.join(wrong)})" if wrong else f"{where} gives"
        self._note(FORWARD, where, ", in forward", output)

    def _backward(self, name: str, gradient: Tensor) -> None:
        self._order += 1
        if not _is_finite(gradient):
            self._note(BACKWARD, f"the gradient of {name}", ", in backward", None, turn=-self._rank)

    def _note_input(self, key: str, batch: Batch) -> None:
        """Note an entry that is not finite; it takes the place of a layer."""
        host, value = get_host_batch(batch), batch[key]
        remark = ""
        if key in host and _is_finite(host[key]):
            (first, *_) = filter(_is_not_finite, iter_tensors(value))
            remark = f" (overflows {SHORT.get(first.dtype, first.dtype)})"
        if self.found is None or self.found.phase > INPUT:
            self.found = None
            self._note(INPUT, f"input `{key}`", remark, value, number=self._batch_number)

    def _note(
        self,
        phase: int,
        where: str,
        remark: str,
        value: Any,
        *,
        turn: int | None = None,
        number: int | None = None,
    ) -> None:
        """Remember what was found, unless something was found before.

        Args:
            value: Its rows say which samples it was.
            turn: Of this rank; by default its number.
            number: Of the micro-batch; by default the one of the last forward.
        """
        if self.found is not None:
            return
        number = self._number if number is None else number
        number = min(max(number, 0), len(self._micro_batches) - 1)
        samples, is_narrowed = _samples(value, get_host_batch(self._micro_batches[number]))
        self.found = NonFiniteValue(
            phase=phase,
            micro_batch=number,
            order=self._order,
            turn=self._rank if turn is None else turn,
            rank=self._rank,
            where=where,
            remark=remark,
            samples=samples,
            is_narrowed=is_narrowed,
        )


def _samples(value: Any, batch: Batch) -> tuple[tuple[str, ...], bool]:
    """Return the samples whose rows are not finite, and True; all of the batch where no rows tell."""
    reading: BatchOrigin | None = getattr(batch, "origin", None)
    if reading is None:
        return (), False
    indices, is_narrowed = list(reading.indices), False
    first = next(filter(_is_not_finite, iter_tensors(value)), None)
    if first is not None and first.dim() > 0 and len(first) == len(indices):
        rows = ~first.detach().isfinite().reshape(len(first), -1).all(dim=1)
        indices = [index for index, is_bad in zip(indices, rows.tolist(), strict=True) if is_bad]
        is_narrowed = True
    return tuple(sample_name(index, reading) for index in indices), is_narrowed


def sample_name(index: int, reading: BatchOrigin) -> str:
    """Return the source of a sample, if it is known, and its index there."""
    source, own = locate_sample(index, reading.sources)
    return f"{source} {own}" if source else str(own)


class _ReadBatch(LoadedBatch):
    """A batch that remembers which entries it was asked for."""

    def __init__(self, batch: Batch):
        super().__init__(batch)
        self.copy_metadata_from(batch)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """See dict.get."""
        self.keys_read.add(key)
        return super().get(key, default)


class _Looking:
    """An objective that is looked at; what is not here is the objective's own."""

    def __init__(self, objective: Objective, first: FirstNonFinite):
        self._objective = objective
        self._first = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        self._first.look_at_inputs(batch, self._objective.inputs(model, batch))
        read = _ReadBatch(batch)
        loss = self._objective(model, read)
        self._first.look_at_loss(loss, batch, read.keys_read)
        return loss

    def prepare_step(self, batch: GlobalBatch) -> None:
        """See Objective: its forwards are not the step's."""
        self._objective.prepare_step(batch)
        self._first.restart()


def _names_in_the_whole(module: nn.Module) -> dict[nn.Module, str]:
    """Each module's name; in a stage of a pipeline that of the whole model."""
    from pipeline.models.staging import StageLayer  # and transformers with it, whose import takes long

    names = {layer: name for name, layer in module.named_modules()}
    for layer in module.modules():
        if isinstance(layer, StageLayer):
            names |= {part: name for name, part in layer.part.named_modules(prefix=layer.name)}
    return names


def _is_finite(value: Any) -> bool:
    return not any(map(_is_not_finite, iter_tensors(value)))


def _is_not_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())


def _is_spoilt(value: Any) -> bool:
    """Whether it holds more than -inf, which hides places: NaN or inf."""
    return any(
        tensor.is_floating_point() and not bool((tensor < torch.inf).all()) for tensor in iter_tensors(value)
    )


REFUSED = StepLimits(-math.inf, -math.inf)  # nothing of such a step stays


class NonFiniteCauseSearch:
    """Repeats a step with the weights as they are, and changes nothing of the run.

    Args:
        plan: The run's division of a batch.
        seed: Sets the random numbers to those of the step.
    """

    def __init__(
        self, engine: Engine, objective: Objective, job: Job, plan: BatchPlan, seed: Callable[[], None]
    ):
        self._engine = engine
        self._objective = objective
        self._job = job
        self._plan = plan
        self._seed = seed

    def find(self, micro_batches: Sequence[Batch]) -> NonFiniteValue | None:
        """Return the first infinite or NaN value over all ranks; None: all are finite. Collective."""
        found = [each for each in self._repeat(micro_batches) if each is not None]
        if not found:
            return None
        cause: NonFiniteValue = min(found)
        if cause.phase == INPUT or cause.is_narrowed:
            return cause
        samples = self._search_sample(micro_batches[cause.micro_batch], cause.rank)
        return cause._replace(samples=samples) if samples else cause

    def _repeat(self, micro_batches: Sequence[Batch]) -> list[NonFiniteValue | None]:
        """Return what each rank found in a step of these micro-batches."""
        first = FirstNonFinite(self._engine.module, micro_batches, self._job.ranks.rank)
        self._seed()
        with first.looking():
            self._engine.train_step(micro_batches, first.seen_by(self._objective), 0.0, 0, REFUSED)
        return self._job.gather_object(first.found)

    def _search_sample(self, batch: Batch, rank: int) -> tuple[str, ...]:
        """Return the sample of that rank's micro-batch that alone is not finite either; empty: none is.

        Half of the samples take the places of the other half, until one is left. So all shapes stay, and a
        batch normalisation never sees a batch of one.

        Args:
            batch: This rank's.
            rank: The one that found it.
        """
        reading = _reading_of_rows(batch)
        rows = list(range(len(reading.indices))) if reading is not None else []
        sizes, dp_ranks = zip(*self._job.gather_object((len(rows), self._engine.dp_rank)), strict=True)
        if sizes[rank] < 2:
            return ()

        def is_among(chosen: Sequence[int]) -> bool:
            """Repeat the micro-batch with these rows; ranks that share it answer alike."""
            found = self._repeat([_filled_with(batch, chosen) if rows else batch])
            return any(
                each is not None and dp_rank == self._engine.dp_rank
                for each, dp_rank in zip(found, dp_ranks, strict=True)
            )

        self._engine.set_batch_division(self._plan.micro_batch_size, 1)
        for _ in range((max(sizes) - 1).bit_length()):
            half = rows[: (len(rows) + 1) // 2]
            rows = half if is_among(half) else rows[len(half) :] or half
        name = sample_name(reading.indices[rows[0]], reading) if is_among(rows) and reading else None
        self._engine.set_batch_division(self._plan.micro_batch_size, self._plan.gradient_accumulation_steps)
        named = self._job.gather_object(name)[rank]
        return (named,) if named is not None else ()


def _reading_of_rows(batch: Batch) -> BatchOrigin | None:
    """Return what was read of the batch where each row is one of its samples, else None."""
    reading: BatchOrigin | None = getattr(batch, "origin", None)
    lengths = {len(each) for each in iter_tensors(batch) if each.dim() > 0}
    return reading if reading is not None and lengths == {len(reading.indices)} else None


def _filled_with(batch: Batch, rows: Sequence[int]) -> LoadedBatch:
    """Return a batch of as many rows, all of them from the given ones."""
    reading: BatchOrigin = batch.origin  # type: ignore[attr-defined] # see _reading_of_rows
    number = len(reading.indices)
    taken = [rows[place % len(rows)] for place in range(number)]

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[taken] if value.dim() > 0 else value
        if isinstance(value, Mapping):
            return {key: of(each) for key, each in value.items()}
        if isinstance(value, (tuple, list)):
            is_listed = len(value) == number and not any(True for _ in iter_tensors(value))  # such as strings
            return type(value)(value[row] for row in taken) if is_listed else type(value)(map(of, value))
        return value

    filled = LoadedBatch({key: of(value) for key, value in batch.items()}).copy_metadata_from(batch)
    filled.origin = reading._replace(indices=[reading.indices[row] for row in taken])
    return filled
