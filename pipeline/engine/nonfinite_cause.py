"""Search for the first infinite or NaN value of a step, and for its sample.

The step is repeated with hooks on every module and gradient, under limits that refuse it. Good steps are not
measured, and the repetition changes nothing.
"""

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

MAX_NAMED_SAMPLES = 8
INPUT, FORWARD, BACKWARD = range(3)
LOSS = "the loss"
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class NonFiniteValue(NamedTuple):
    """First infinite or NaN value on a rank.

    Values compare by their fields in this order: inputs come before layers, and the cause of a step is the
    smallest over all ranks.
    """

    phase: int
    """Phase in which it was found: INPUT, FORWARD or BACKWARD."""
    micro_batch: int
    """Index of the micro-batch in the step."""
    order: int
    """Number of modules and gradients that were visited before in the micro-batch."""
    turn: int
    """Order of ranks that found it at the same place.

    Lowest for a rank whose module received the value, and in backward for the last pipeline stage.
    """
    rank: int
    """Rank that found it."""
    where: str
    """Description of the tensor."""
    remark: str
    """Addition to the description: the phase, or the dtype that overflows."""
    samples: tuple[str, ...]
    """Names of the samples, by source and index; empty if they are not known."""
    is_narrowed: bool
    """Whether exactly these samples have the value; if not, they are all samples of the micro-batch."""

    def describe(self, rank: object) -> str:
        """Return a description of the value, its place and its samples.

        Args:
            rank: Name of the rank for the text.
        """
        samples = ", ".join(self.samples[:MAX_NAMED_SAMPLES]) + (
            " ..." if len(self.samples) > MAX_NAMED_SAMPLES else ""
        )
        if samples and (self.phase == INPUT or self.where == LOSS):
            return f"{self.where} of sample{'s' * (len(self.samples) > 1)} {samples}{self.remark}, on {rank}"
        return f"{self.where}{self.remark}, on {rank}" + (f"; samples: {samples}" if samples else "")


class FirstNonFinite:
    """Checks the batch, every module's output, the loss and every gradient of a step for non-finite values.

    Each check waits for the device. A module whose input is not finite is not the origin. If no module made
    that input, code between modules did, and the description names the module that received it.

    Args:
        module: This rank's module, without any wrapper.
        micro_batches: Micro-batches of the step.
        rank: Number of this rank.
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
    def install_hooks(self) -> Iterator[None]:
        """Install the hooks inside the context. Make the step there."""
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(self._module.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            for layer, name in _get_whole_names(self._module).items():
                hook = layer.register_forward_hook(partial(self._forward, name), with_kwargs=True)
                stack.callback(hook.remove)
                for own, p in layer.named_parameters(name, recurse=False):
                    if p.requires_grad:
                        stack.callback(p.register_hook(partial(self._backward, own)).remove)
            yield

    def wrap_objective(self, objective: Objective) -> Objective:
        """Return the objective with checks of its batches and losses."""
        return _CheckedObjective(objective, self)

    def restart(self) -> None:
        """Restart the count of micro-batches."""
        self._number = self._batch_number = -1

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._number += 1
        self._order = 0
        # The first tensor is the data; the others may be masks, which contain -inf.
        is_data_finite = _is_finite(next(iter_tensors((args, kwargs)), None))
        self._is_input_finite = is_data_finite and not _has_nan_or_inf((args, kwargs))

    def check_inputs(self, batch: Batch, keys: Collection[str]) -> None:
        """Check the entries of the next micro-batch that the model receives."""
        self._batch_number += 1
        self._check_entries(batch, keys)

    def check_loss(self, loss: LossSum, batch: Batch, keys: Collection[str]) -> None:
        """Check the loss. If it is not finite, check the entries that the objective has read."""
        if self.found is None and not bool(loss.minimised.isfinite().all()):
            self._check_entries(batch, keys)
            self._record(FORWARD, LOSS, "", None)

    def _check_entries(self, batch: Batch, keys: Collection[str]) -> None:
        """Record the first entry that is not finite. Masks may contain -inf."""
        for key in sorted(keys):
            value = batch.get(key)
            if not _is_finite(value) and ("mask" not in key or _has_nan_or_inf(value)):
                self._record_input(key, batch)

    def _forward(self, name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._order += 1
        if self.found is not None or _is_finite(output):
            return
        layer_name = f"{name or 'the model'} ({type(layer).__name__})"
        if not _is_finite((args, kwargs)):
            # -inf is normal in a mask, but synchronised batch normalisation receives no mask.
            if self._is_input_finite and (_has_nan_or_inf((args, kwargs)) or is_sync_batch_norm(layer)):
                self._record(FORWARD, f"the input of {layer_name}", ", in forward", (args, kwargs), turn=-1)
            return
        wrong = [own for own, p in layer.named_parameters(recurse=False) if not _is_finite(p)]
        where = f"the weights of {name} ({', '.join(wrong)})" if wrong else f"the output of {layer_name}"
        self._record(FORWARD, where, ", in forward", output)

    def _backward(self, name: str, gradient: Tensor) -> None:
        self._order += 1
        if not _is_finite(gradient):
            self._record(BACKWARD, f"the gradient of {name}", ", in backward", None, turn=-self._rank)

    def _record_input(self, key: str, batch: Batch) -> None:
        """Record an entry that is not finite. It replaces a layer that was found before."""
        host = get_host_batch(batch)
        value = batch[key]
        remark = ""
        if key in host and _is_finite(host[key]):
            (first, *_) = filter(_is_not_finite, iter_tensors(value))
            remark = f" (overflows {DTYPE_NAMES.get(first.dtype, first.dtype)})"
        if self.found is None or self.found.phase > INPUT:
            self.found = None
            self._record(INPUT, f"input `{key}`", remark, value, number=self._batch_number)

    def _record(
        self,
        phase: int,
        where: str,
        remark: str,
        value: Any,
        *,
        turn: int | None = None,
        number: int | None = None,
    ) -> None:
        """Record a non-finite value, unless one was recorded before.

        Args:
            phase: INPUT, FORWARD or BACKWARD.
            where: Description of the tensor.
            remark: Addition to the description.
            value: Tensors whose rows show which samples are not finite; `None` if there are none.
            turn: See NonFiniteValue.turn; the rank's number by default.
            number: Index of the micro-batch; that of the last forward by default.
        """
        if self.found is not None:
            return
        number = self._number if number is None else number
        number = min(max(number, 0), len(self._micro_batches) - 1)
        samples, is_narrowed = _find_samples(value, get_host_batch(self._micro_batches[number]))
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


def _find_samples(value: Any, batch: Batch) -> tuple[tuple[str, ...], bool]:
    """Return the names of the samples whose rows are not finite, and True.

    If the rows of `value` are no samples, return all samples of the batch, and False.
    """
    origin: BatchOrigin | None = getattr(batch, "origin", None)
    if origin is None:
        return (), False
    indices = list(origin.indices)
    is_narrowed = False
    first = next(filter(_is_not_finite, iter_tensors(value)), None)
    if first is not None and first.dim() > 0 and len(first) == len(indices):
        rows = ~first.detach().isfinite().reshape(len(first), -1).all(dim=1)
        indices = [index for index, is_bad in zip(indices, rows.tolist(), strict=True) if is_bad]
        is_narrowed = True
    return tuple(sample_name(index, origin) for index in indices), is_narrowed


def sample_name(index: int, origin: BatchOrigin) -> str:
    """Return a sample's name: its source, if known, and its index there."""
    source, own = locate_sample(index, origin.sources)
    return f"{source} {own}" if source else str(own)


class _ReadBatch(LoadedBatch):
    """Records which entries of a batch are read."""

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


class _CheckedObjective:
    """Wraps an objective and checks its batches and losses. All other attributes are the objective's."""

    def __init__(self, objective: Objective, first: FirstNonFinite):
        self._objective = objective
        self._first = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        self._first.check_inputs(batch, self._objective.inputs(model, batch))
        read = _ReadBatch(batch)
        loss = self._objective(model, read)
        self._first.check_loss(loss, batch, read.keys_read)
        return loss

    def prepare_step(self, batch: GlobalBatch) -> None:
        """See Objective.prepare_step. Its forwards do not count as micro-batches of the step."""
        self._objective.prepare_step(batch)
        self._first.restart()


def _get_whole_names(module: nn.Module) -> dict[nn.Module, str]:
    """Return each module's name in the whole model, also in a pipeline stage."""
    from pipeline.models.staging import StageLayer  # late: it imports transformers, which takes long

    names = {layer: name for name, layer in module.named_modules()}
    for layer in module.modules():
        if isinstance(layer, StageLayer):
            names |= {part: name for name, part in layer.part.named_modules(prefix=layer.name)}
    return names


def _is_finite(value: Any) -> bool:
    return not any(map(_is_not_finite, iter_tensors(value)))


def _is_not_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())


def _has_nan_or_inf(value: Any) -> bool:
    """Return whether a tensor contains NaN or inf. -inf does not count, since masks use it."""
    return any(
        tensor.is_floating_point() and not bool((tensor < torch.inf).all()) for tensor in iter_tensors(value)
    )


REFUSED = StepLimits(-math.inf, -math.inf)  # refuses every step


class NonFiniteCauseSearch:
    """Finds the first non-finite value of a step by repeating it. The run's state does not change.

    Args:
        engine: Engine that made the step.
        objective: Objective of the step.
        job: Ranks and process group of the run.
        plan: Division of the run's batches.
        seed: Seeds the random numbers as for the step.
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
        """Return the first infinite or NaN value over all ranks, `None` if all are finite. Collective."""
        found = [each for each in self._repeat(micro_batches) if each is not None]
        if not found:
            return None
        cause: NonFiniteValue = min(found)
        if cause.phase == INPUT or cause.is_narrowed:
            return cause
        samples = self._search_sample(micro_batches[cause.micro_batch], cause.rank)
        return cause._replace(samples=samples) if samples else cause

    def _repeat(self, micro_batches: Sequence[Batch]) -> list[NonFiniteValue | None]:
        """Return the first non-finite value of each rank in a step of these micro-batches."""
        first = FirstNonFinite(self._engine.module, micro_batches, self._job.ranks.rank)
        self._seed()
        with first.install_hooks():
            self._engine.train_step(micro_batches, first.wrap_objective(self._objective), 0.0, 0, REFUSED)
        return self._job.gather_object(first.found)

    def _search_sample(self, batch: Batch, rank: int) -> tuple[str, ...]:
        """Return the sample that causes the value alone, found by bisection; empty if none does.

        Each half of the samples is tried in the rows of the whole micro-batch. So no shape changes, and
        batch normalisation never gets a batch of one sample.

        Args:
            batch: This rank's micro-batch.
            rank: Rank whose micro-batch has the sample.
        """
        origin = _get_origin_of_rows(batch)
        rows = list(range(len(origin.indices))) if origin is not None else []
        sizes, dp_ranks = zip(*self._job.gather_object((len(rows), self._engine.dp_rank)), strict=True)
        if sizes[rank] < 2:
            return ()

        def is_among(chosen: Sequence[int]) -> bool:
            """Return whether a micro-batch of these rows is not finite; equal on ranks that share it."""
            found = self._repeat([_repeat_rows(batch, chosen) if rows else batch])
            return any(
                each is not None and dp_rank == self._engine.dp_rank
                for each, dp_rank in zip(found, dp_ranks, strict=True)
            )

        self._engine.set_batch_division(self._plan.micro_batch_size, 1)
        for _ in range((max(sizes) - 1).bit_length()):
            half = rows[: (len(rows) + 1) // 2]
            rows = half if is_among(half) else rows[len(half) :] or half
        name = sample_name(origin.indices[rows[0]], origin) if is_among(rows) and origin else None
        self._engine.set_batch_division(self._plan.micro_batch_size, self._plan.gradient_accumulation_steps)
        named = self._job.gather_object(name)[rank]
        return (named,) if named is not None else ()


def _get_origin_of_rows(batch: Batch) -> BatchOrigin | None:
    """Return the batch's origin if each of its rows is one sample, else `None`."""
    origin: BatchOrigin | None = getattr(batch, "origin", None)
    lengths = {len(each) for each in iter_tensors(batch) if each.dim() > 0}
    return origin if origin is not None and lengths == {len(origin.indices)} else None


def _repeat_rows(batch: Batch, rows: Sequence[int]) -> LoadedBatch:
    """Return a batch of the same size that repeats the given rows."""
    origin: BatchOrigin = batch.origin  # type: ignore[attr-defined] # see _get_origin_of_rows
    number = len(origin.indices)
    repeated = [rows[place % len(rows)] for place in range(number)]

    def repeat(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[repeated] if value.dim() > 0 else value
        if isinstance(value, Mapping):
            return {key: repeat(each) for key, each in value.items()}
        if isinstance(value, (tuple, list)):
            is_listed = len(value) == number and not any(True for _ in iter_tensors(value))  # such as strings
            return (
                type(value)(value[row] for row in repeated) if is_listed else type(value)(map(repeat, value))
            )
        return value

    filled = LoadedBatch({key: repeat(value) for key, value in batch.items()}).copy_metadata_from(batch)
    filled.origin = origin._replace(indices=[origin.indices[row] for row in repeated])
    return filled
