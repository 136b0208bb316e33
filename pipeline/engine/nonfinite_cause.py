"""Search for the first infinite or NaN value of a step, and for its sample.

The step is repeated with hooks on every module and gradient, under limits that refuse it. Therefore steps
with finite values cost nothing, and the repetition leaves the run's state unchanged.
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
"""Largest number of samples that a message names."""
INPUT, FORWARD, BACKWARD = range(3)
"""Phases of a step, in their order: see NonFiniteValue.phase."""
LOSS = "the loss"
"""Description of the loss, as NonFiniteValue.description."""
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Name of the precision, by torch's dtype."""


class NonFiniteValue(NamedTuple):
    """First infinite or NaN value on a rank.

    Values are compared by their fields, in the order below. The smallest one over all ranks is taken as the
    cause.
    """

    phase: int
    """Phase in which the value was found: INPUT, FORWARD or BACKWARD."""
    micro_batch: int
    """Index of the micro-batch in the rank's step."""
    order: int
    """Number of modules and gradients checked in the micro-batch up to this value."""
    rank_order: int
    """Decides between ranks that found a value at the same place; the lowest is the cause.

    It is the rank, or -1 for a module's input, or in backward minus the rank, so that the last pipeline stage
    comes first.
    """
    rank: int
    """Rank that found the value."""
    description: str
    """Description of the tensor, such as "the output of layers.3 (Linear)"."""
    remark: str
    """Addition to the description: the phase, or the dtype that overflows; may be empty."""
    samples: tuple[str, ...]
    """Names of the samples, by source and index; empty if they are not known."""
    is_narrowed: bool
    """Whether only these samples have the value; if not, `samples` are all samples of the micro-batch."""

    def describe(self, rank: object) -> str:
        """Return a text that names the tensor, the rank and the samples.

        Args:
            rank: Name of the rank in the text.
        """
        samples = ", ".join(self.samples[:MAX_NAMED_SAMPLES])
        if len(self.samples) > MAX_NAMED_SAMPLES:
            samples += " ..."
        if samples and (self.phase == INPUT or self.description == LOSS):
            noun = "samples" if len(self.samples) > 1 else "sample"
            return f"{self.description} of {noun} {samples}{self.remark}, on {rank}"
        text = f"{self.description}{self.remark}, on {rank}"
        return f"{text}; samples: {samples}" if samples else text


class NonFiniteDetector:
    """Checks the batch, every module's output, the loss and every gradient of a step for non-finite values.

    Each check synchronizes with the device. A module whose input is not finite is not the origin. If no
    module made that input, code between modules did, and the description names the module that received it.

    Args:
        module: This rank's module, without any wrapper.
        micro_batches: Micro-batches of the step.
        rank: Number of this rank.
    """

    def __init__(self, module: nn.Module, micro_batches: Sequence[Batch], rank: int):
        self._module = module
        self._micro_batches = micro_batches
        self._rank = rank
        self._forward_index = self._loss_index = -1  # micro-batches of the module and of the objective
        self._order = 0
        self._is_input_finite = True  # of the whole module, in this micro-batch
        self.first_value: NonFiniteValue | None = None
        """First value found on this rank; `None` if none was."""

    @contextmanager
    def install_hooks(self) -> Iterator[None]:
        """Install the hooks inside the context, and turn torch.compile off. Run the step in this context."""
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            hook = self._module.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
            stack.callback(hook.remove)
            for layer, name in _get_whole_names(self._module).items():
                hook = layer.register_forward_hook(partial(self._check_output, name), with_kwargs=True)
                stack.callback(hook.remove)
                for parameter_name, p in layer.named_parameters(name, recurse=False):
                    if p.requires_grad:
                        hook = p.register_hook(partial(self._check_gradient, parameter_name))
                        stack.callback(hook.remove)
            yield

    def wrap_objective(self, objective: Objective) -> Objective:
        """Return the objective with checks of its batches and losses."""
        return _CheckedObjective(objective, self)

    def restart(self) -> None:
        """Restart the count of micro-batches."""
        self._forward_index = self._loss_index = -1

    def _begin_forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a micro-batch and check the model's input; a hook before the whole module's forward."""
        self._forward_index += 1
        self._order = 0
        # The first tensor is the data; the others may be masks, which contain -inf.
        is_data_finite = _is_finite(next(iter_tensors((args, kwargs)), None))
        self._is_input_finite = is_data_finite and not _has_nan_or_inf((args, kwargs))

    def check_inputs(self, batch: Batch, keys: Collection[str]) -> None:
        """Check the entries of the next micro-batch that the model receives."""
        self._loss_index += 1
        self._check_entries(batch, keys)

    def check_loss(self, loss: LossSum, batch: Batch, keys: Collection[str]) -> None:
        """Check the loss. If it is not finite, check the entries that the objective read first.

        One of these entries may be the origin, since the model does not receive all of them.

        Args:
            loss: Loss of the micro-batch.
            batch: The micro-batch, on the device.
            keys: Entries that the objective read.
        """
        if self.first_value is None and not bool(loss.minimised.isfinite().all()):
            self._check_entries(batch, keys)
            self._record(FORWARD, LOSS, "", None)

    def _check_entries(self, batch: Batch, keys: Collection[str]) -> None:
        """Record the first of these entries that is not finite. Masks may contain -inf."""
        for key in sorted(keys):
            value = batch.get(key)
            if not _is_finite(value) and ("mask" not in key or _has_nan_or_inf(value)):
                self._record_input(key, batch)

    def _check_output(self, name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Check a module's output, input and weights; a hook after its forward."""
        self._order += 1
        if self.first_value is not None or _is_finite(output):
            return
        layer_name = f"{name or 'the model'} ({type(layer).__name__})"
        if not _is_finite((args, kwargs)):
            # -inf is normal in a mask, but synchronised batch normalisation receives no mask.
            if self._is_input_finite and (_has_nan_or_inf((args, kwargs)) or is_sync_batch_norm(layer)):
                description = f"the input of {layer_name}"
                self._record(FORWARD, description, ", in forward", (args, kwargs), rank_order=-1)
            return
        bad_weights = [key for key, p in layer.named_parameters(recurse=False) if not _is_finite(p)]
        description = f"the output of {layer_name}"
        if bad_weights:
            description = f"the weights of {name} ({', '.join(bad_weights)})"
        self._record(FORWARD, description, ", in forward", output)

    def _check_gradient(self, name: str, gradient: Tensor) -> None:
        """Check the gradient of a parameter; a hook on the parameter."""
        self._order += 1
        if not _is_finite(gradient):
            self._record(BACKWARD, f"the gradient of {name}", ", in backward", None, rank_order=-self._rank)

    def _record_input(self, key: str, batch: Batch) -> None:
        """Record an entry that is not finite. It replaces a module's value that was found before."""
        host = get_host_batch(batch)
        value = batch[key]
        remark = ""
        if key in host and _is_finite(host[key]):
            (first, *_) = filter(_is_not_finite, iter_tensors(value))
            remark = f" (overflows {DTYPE_NAMES.get(first.dtype, first.dtype)})"
        if self.first_value is None or self.first_value.phase > INPUT:
            self.first_value = None
            self._record(INPUT, f"input `{key}`", remark, value, micro_batch=self._loss_index)

    def _record(
        self,
        phase: int,
        description: str,
        remark: str,
        value: Any,
        *,
        rank_order: int | None = None,
        micro_batch: int | None = None,
    ) -> None:
        """Record a non-finite value, unless one was recorded before.

        Args:
            phase: INPUT, FORWARD or BACKWARD.
            description: Description of the tensor.
            remark: Addition to the description.
            value: Tensors whose rows show which samples are not finite; `None` if no tensor has such rows.
            rank_order: See NonFiniteValue.rank_order; this rank by default.
            micro_batch: Index of the micro-batch; by default the one of the last forward.
        """
        if self.first_value is not None:
            return
        micro_batch = self._forward_index if micro_batch is None else micro_batch
        micro_batch = min(max(micro_batch, 0), len(self._micro_batches) - 1)
        samples, is_narrowed = _find_bad_samples(value, get_host_batch(self._micro_batches[micro_batch]))
        self.first_value = NonFiniteValue(
            phase=phase,
            micro_batch=micro_batch,
            order=self._order,
            rank_order=self._rank if rank_order is None else rank_order,
            rank=self._rank,
            description=description,
            remark=remark,
            samples=samples,
            is_narrowed=is_narrowed,
        )


def _find_bad_samples(value: Any, batch: Batch) -> tuple[tuple[str, ...], bool]:
    """Return the names of the samples whose rows are not finite, and True.

    If the rows of `value` are not the samples, return the names of all samples of the batch, and False.
    """
    origin: BatchOrigin | None = getattr(batch, "origin", None)
    if origin is None:
        return (), False
    indices = list(origin.indices)
    is_narrowed = False
    bad_tensor = next(filter(_is_not_finite, iter_tensors(value)), None)
    if bad_tensor is not None and bad_tensor.dim() > 0 and len(bad_tensor) == len(indices):
        is_bad_row = ~bad_tensor.detach().isfinite().reshape(len(bad_tensor), -1).all(dim=1)
        indices = [index for index, is_bad in zip(indices, is_bad_row.tolist(), strict=True) if is_bad]
        is_narrowed = True
    return tuple(format_sample_name(index, origin) for index in indices), is_narrowed


def format_sample_name(index: int, origin: BatchOrigin) -> str:
    """Return a sample's name: its source, if known, and its index in the source."""
    source, index_in_source = locate_sample(index, origin.sources)
    return f"{source} {index_in_source}" if source else str(index_in_source)


class _RecordingBatch(LoadedBatch):
    """Records in `keys_read` which entries of a batch are read."""

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

    def __init__(self, objective: Objective, detector: NonFiniteDetector):
        self._objective = objective
        self._detector = detector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        self._detector.check_inputs(batch, self._objective.inputs(model, batch))
        recorded = _RecordingBatch(batch)
        loss = self._objective(model, recorded)
        self._detector.check_loss(loss, batch, recorded.keys_read)
        return loss

    def prepare_step(self, batch: GlobalBatch) -> None:
        """See Objective.prepare_step. Forwards in it do not count as micro-batches of the step."""
        self._objective.prepare_step(batch)
        self._detector.restart()


def _get_whole_names(module: nn.Module) -> dict[nn.Module, str]:
    """Return each module's name in the whole model, also in a pipeline stage."""
    from pipeline.models.staging import StageLayer  # late: it imports transformers, which takes long

    names = {layer: name for name, layer in module.named_modules()}
    for layer in module.modules():
        if isinstance(layer, StageLayer):
            names |= {part: name for name, part in layer.part.named_modules(prefix=layer.name)}
    return names


def _is_finite(value: Any) -> bool:
    """Return whether all floating-point tensors in a nested value are finite."""
    return not any(map(_is_not_finite, iter_tensors(value)))


def _is_not_finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())


def _has_nan_or_inf(value: Any) -> bool:
    """Return whether a tensor contains NaN or inf. -inf does not count, since masks use it."""
    return any(
        tensor.is_floating_point() and not bool((tensor < torch.inf).all()) for tensor in iter_tensors(value)
    )


REFUSE_ALL = StepLimits(-math.inf, -math.inf)
"""Limits that refuse every step."""


class NonFiniteCauseSearch:
    """Finds the first non-finite value of a step by repeating the step. The run's state does not change.

    Args:
        engine: Engine that made the step.
        objective: Objective of the step.
        job: Ranks and process group of the run.
        plan: Division of the run's batches.
        seed: Sets the random number generators to their state before the step.
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
        """Return the first infinite or NaN value over all ranks, or `None` if all are finite. Collective.

        Args:
            micro_batches: This rank's micro-batches of the step.
        """
        values = [value for value in self._repeat_step(micro_batches) if value is not None]
        if not values:
            return None
        cause: NonFiniteValue = min(values)
        if cause.phase == INPUT or cause.is_narrowed:
            return cause
        samples = self._search_one_sample(micro_batches[cause.micro_batch], cause.rank)
        return cause._replace(samples=samples) if samples else cause

    def _repeat_step(self, micro_batches: Sequence[Batch]) -> list[NonFiniteValue | None]:
        """Make a refused step of these micro-batches, and return each rank's first non-finite value."""
        detector = NonFiniteDetector(self._engine.module, micro_batches, self._job.ranks.rank)
        objective = detector.wrap_objective(self._objective)
        self._seed()
        with detector.install_hooks():
            self._engine.train_step(micro_batches, objective, learning_rate=0.0, flags=0, limits=REFUSE_ALL)
        return self._job.gather_object(detector.first_value)

    def _search_one_sample(self, batch: Batch, rank: int) -> tuple[str, ...]:
        """Return the name of the one sample that causes a non-finite value, found by bisection.

        A half of the samples is repeated until it fills the rows of the whole micro-batch. So no shape
        changes, and batch normalisation never gets a batch of one sample. Collective.

        Args:
            batch: This rank's micro-batch.
            rank: Rank whose micro-batch is searched.

        Returns:
            One name; empty if the rows are not samples, or no sample alone causes the value.
        """
        origin = _get_origin_of_rows(batch)
        rows = list(range(len(origin.indices))) if origin is not None else []
        sizes, dp_ranks = zip(*self._job.gather_object((len(rows), self._engine.dp_rank)), strict=True)
        if sizes[rank] < 2:
            return ()

        def is_non_finite(chosen: Sequence[int]) -> bool:
            """Return whether a step of these rows has a non-finite value on a rank with the same samples."""
            values = self._repeat_step([_repeat_rows(batch, chosen) if rows else batch])
            return any(
                value is not None and dp_rank == self._engine.dp_rank
                for value, dp_rank in zip(values, dp_ranks, strict=True)
            )

        self._engine.set_batch_division(self._plan.micro_batch_size, 1)
        for _ in range((max(sizes) - 1).bit_length()):
            half = rows[: (len(rows) + 1) // 2]
            rows = half if is_non_finite(half) else rows[len(half) :] or half
        is_cause = is_non_finite(rows)
        name = format_sample_name(origin.indices[rows[0]], origin) if is_cause and origin else None
        self._engine.set_batch_division(self._plan.micro_batch_size, self._plan.gradient_accumulation_steps)
        name_on_rank = self._job.gather_object(name)[rank]
        return (name_on_rank,) if name_on_rank is not None else ()


def _get_origin_of_rows(batch: Batch) -> BatchOrigin | None:
    """Return the batch's origin if each of its rows is one sample, else `None`."""
    origin: BatchOrigin | None = getattr(batch, "origin", None)
    lengths = {len(each) for each in iter_tensors(batch) if each.dim() > 0}
    return origin if origin is not None and lengths == {len(origin.indices)} else None


def _repeat_rows(batch: Batch, rows: Sequence[int]) -> LoadedBatch:
    """Return a batch of the same size that consists of these rows, repeated in turn.

    Args:
        batch: Batch with an origin, whose rows are its samples.
        rows: Indices of rows of the batch.
    """
    origin: BatchOrigin = batch.origin  # type: ignore[attr-defined] # see _get_origin_of_rows
    num_rows = len(origin.indices)
    source_rows = [rows[row % len(rows)] for row in range(num_rows)]

    def repeat(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[source_rows] if value.dim() > 0 else value
        if isinstance(value, Mapping):
            return {key: repeat(each) for key, each in value.items()}
        if isinstance(value, (tuple, list)):
            has_tensors = any(True for _ in iter_tensors(value))
            if len(value) == num_rows and not has_tensors:  # one object per row, such as a string
                return type(value)(value[row] for row in source_rows)
            return type(value)(map(repeat, value))
        return value

    filled = LoadedBatch({key: repeat(value) for key, value in batch.items()}).copy_metadata_from(batch)
    filled.origin = origin._replace(indices=[origin.indices[row] for row in source_rows])
    return filled
