"""Loaders of a rank: a group of training micro-batches for each step, and batches of held-out data.

Batches are read in this process or by worker processes. The loaders take part in no collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from pipeline.data.batches import (
    Batch,
    LoadedBatch,
    as_batch,
    describe_origin,
    find_bad_value,
    iter_tensors,
    locate_sample,
    map_tensors,
    raise_if_error,
)
from pipeline.data.bundle import Collate
from pipeline.data.random_numbers import (
    derive_seed,
    derive_seeds,
    isolate_random_numbers,
    seed_host_generators,
)
from pipeline.data.sampler import (
    NONE_LEFT_OUT,
    BatchIndices,
    EvalSampler,
    LeftOutPositions,
    MixtureOrder,
    SampleOrder,
    SourceCounts,
)
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import DataError, PipelineError

BATCHES_PER_WORKER = 2  # batches that each worker prefetches

MAX_LISTED_SAMPLES = 8  # samples that a message names

# Samples whose order is computed by one call: numpy takes as long for one micro-batch as for hundreds.
SAMPLES_PER_ORDER_CALL = 4096


class BatchReader(Dataset[Any]):
    """Data set whose index is a BatchIndices: each read returns one batch. It can run in workers.

    The random numbers that a user's data set draws are a function of the seed and a position in the order. So
    they are the same in this process and in a worker, at any time of reading, and after a resume. In
    `augmented` and `__getitem__` the position is the sample's, so the numbers do not depend on the number of
    ranks. In `__getitems__` and the collate function, the position is that of the batch's first sample. A
    collate function is not seeded if the data set has `augmented` (in training) or is deterministic.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        collate: Collate,
        seed: int,
        *,
        is_training: bool,
        sources: Sequence[Sequence[tuple[str, int]]] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Initialize the reader.

        Args:
            datasets: Map-style data sets.
            collate: Makes a batch of a list of samples, or of the result of `__getitems__`.
            seed: Seed of the random numbers that samples draw.
            is_training: Whether to read samples by `augmented`, if a data set has it.
            sources: For each data set, the name and the number of samples of each of its sources; `None` if
                no source is known by name.
            vocab_size: Number of token ids that the model has; `None` to accept any id.
        """
        self._datasets = datasets
        self._collate = collate
        self._seed = seed
        self._is_training = is_training
        self._sources = sources or [()] * len(datasets)
        self._vocab_size = vocab_size

    def __getitems__(self, selection: BatchIndices) -> LoadedBatch | PipelineError:
        """Return the batch of the selected samples, or an expected error, for `raise_if_error` to raise.

        The error is not raised here: torch would put a worker's traceback into its message.
        """
        try:
            batch = as_batch(self._read_and_collate(selection), len(selection.indices))
            batch.origin = describe_origin(batch, selection.indices, self._sources[selection.dataset])
            if self._vocab_size is not None:
                check_token_ids(batch, self._vocab_size)
            return batch
        except PipelineError as error:
            return error

    def _read_and_collate(self, selection: BatchIndices) -> Any:
        dataset = self._datasets[selection.dataset]
        if self._is_training and hasattr(dataset, "augmented"):
            by_position = enumerate(selection.indices, start=selection.position)
            return self._collate(
                [
                    dataset.augmented(index, derive_seed(self._seed, position))
                    for position, index in by_position
                ]
            )
        if getattr(dataset, "is_deterministic", False):
            return self._collate_samples(dataset, selection.indices)
        with isolate_random_numbers(self._seed, selection.position):
            return self._collate_samples(dataset, selection.indices, selection.position)

    def _collate_samples(self, dataset: Any, indices: list[int], position: int | None = None) -> Any:
        """Read samples and collate them.

        Args:
            dataset: Data set to read.
            indices: Indices of the samples in the data set.
            position: Position of the first sample in the order, which seeds the generators anew for each
                sample; `None` if the data set draws no random numbers.
        """
        base = dataset
        while isinstance(base, Subset):  # Subset has __getitems__ even if its data set has not
            base = base.dataset
        if hasattr(base, "__getitems__"):
            return self._collate(dataset.__getitems__(indices))
        if position is None or type(base) in (TensorDataset, list):  # these types draw no random numbers
            return self._collate([dataset[index] for index in indices])
        seeds = derive_seeds(self._seed, position, len(indices))
        samples = []
        for seed, index in zip(seeds, indices, strict=True):
            seed_host_generators(seed)
            samples.append(dataset[index])
        seed_host_generators(derive_seed(self._seed, position, len(indices)))
        return self._collate(samples)


def check_token_ids(batch: LoadedBatch, vocab_size: int) -> None:
    """Check that the token ids of a batch are below `vocab_size`, the number of rows of the embedding.

    Raises:
        DataError: An id has no row in the embedding. The message names the id and its sample.
    """
    wrong = find_bad_value(batch, "input_ids", vocab_size, None)
    if wrong is not None:
        raise DataError(
            f"'input_ids' has {wrong.value}{wrong.sample}, and the model has {vocab_size} token ids: "
            f"expected 0 to {vocab_size - 1} (model.vocab_size); use the tokenizer that belongs to the model"
        )


def read_batches(
    reader: BatchReader,
    selections: Iterable[BatchIndices],
    num_workers: int,
    *,
    pin_memory: bool,
    persistent: bool,
) -> Iterable[LoadedBatch | PipelineError]:
    """Return an iterable of the selected batches, with an error in place of a batch that cannot be read.

    Args:
        reader: Reads a batch.
        selections: Samples of each batch. The result can be iterated as often as this argument.
        num_workers: Number of worker processes that prefetch batches; 0 to read in this process.
        pin_memory: Whether to copy batches to page-locked memory.
        persistent: Whether the workers stay alive between two passes.
    """
    # By default each iteration draws from torch's global generator, which would change dropout.
    generator = torch.Generator()
    generator.manual_seed(0)
    return DataLoader(
        reader,
        batch_sampler=selections,  # type: ignore[arg-type]  # BatchIndices in place of a list of indices
        collate_fn=_return_unchanged,
        num_workers=num_workers,
        prefetch_factor=BATCHES_PER_WORKER if num_workers else None,
        persistent_workers=persistent and num_workers > 0,
        pin_memory=pin_memory,
        generator=generator,
    )


def _return_unchanged(batch: Any) -> Any:
    return batch


class BatchSource(Protocol):
    """Source of one rank's training data: a group of micro-batches for each optimizer step.

    Rollouts can implement this protocol, because `next_group` may generate rows. The state is the position in
    the data. A run that resumes from a state must get the same rows as a run that was never interrupted.
    """

    @property
    def samples_seen(self) -> int:
        """Position in the data: samples that all ranks have returned so far, plus those left out."""

    def next_group(self) -> list[Batch]:
        """Return this rank's micro-batches of the next optimizer step."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the position in the data by name, such as `train/epoch`. Not collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, strings and lists of them, the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, possibly of another number of ranks."""

    def close(self) -> None:
        """Stop workers and close files and connections."""


@runtime_checkable
class PrefetchingSource(Protocol):
    """A source that can read a group before `next_group` is called."""

    is_prefetching: bool
    """Whether `prefetch` reads a group; if false, the training step does not call it."""

    def prefetch(self) -> None:
        """Begin to read the next group. Called after the kernels of a step are launched."""


@runtime_checkable
class ReplayableSource(Protocol):
    """A source with a fixed order of samples: groups can be described, read again and left out."""

    def describe(self, first: int, last: int) -> str:
        """Describe the samples at positions [first, last) of the order by source and index."""

    def read_again(self, first: int) -> list[Batch]:
        """Return the group that begins at position `first` of the order."""

    def leave_out(self, ranges: Iterable[Sequence[int]]) -> None:
        """Exclude ranges of positions, [first, last) each, from all later steps."""


class TrainLoader:
    """Loads a rank's micro-batches of a map-style data set, prefetches them to the device and replays them.

    Implements BatchSource, PrefetchingSource and ReplayableSource.

    `prefetch` reads the next group and copies it on a separate stream, so that the step waits neither for the
    read nor for the copy. There is no thread: in this process it would compete with the step for the GIL, and
    worker processes read in parallel anyway.

    On a CPU nothing is prefetched. The step is complete before `prefetch` is called, so prefetching would
    save no time, and it might read a group of a custom data set that is never used. A group's content does
    not depend on when it is read: see BatchReader.

    Args:
        dataset: Map-style data set with at least one sample; it may be smaller than a global batch.
        collate: Makes a batch of a list of samples, or of the result of `__getitems__`.
        order: Order of the samples.
        device: Device of this rank.
        micro_batch_size: Samples per micro-batch and rank.
        gradient_accumulation_steps: Micro-batches per optimizer step and rank.
        dp_rank: Data-parallel rank; ranks with equal values read the same samples.
        dp_world_size: Number of data-parallel ranks.
        seed: Seed of the random numbers that the data set draws.
        num_workers: Number of worker processes that prefetch batches; 0 to read in this process.
        is_prefetching: Whether to prefetch to the device; `None` to prefetch on every device but a CPU.
        vocab_size: Number of token ids that the model has, against which `input_ids` are checked; `None` for
            no check.
        left_out: Ranges of positions that no step takes, [first, last) each.

    Attributes:
        samples_per_epoch: Samples of one pass over the data, over all ranks.
        global_batch_size: Samples of an optimizer step, over all ranks.
        samples_seen: Position in the order: samples that all ranks have returned so far, plus those left out.
        is_prefetching: Whether `prefetch` reads a group.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Collate,
        order: MixtureOrder,
        device: torch.device,
        *,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_world_size: int,
        seed: int,
        num_workers: int,
        is_prefetching: bool | None = None,
        vocab_size: int | None = None,
        left_out: Iterable[Sequence[int]] = (),
    ) -> None:
        assert order.num_samples == len(dataset)  # type: ignore[arg-type]
        assert 0 <= dp_rank < dp_world_size
        self.samples_per_epoch = order.samples_per_epoch
        self.global_batch_size = micro_batch_size * gradient_accumulation_steps * dp_world_size
        self.samples_seen = 0
        self._left_out = LeftOutPositions(left_out)
        self._order = order
        self._reader = BatchReader(
            [dataset], collate, seed, is_training=True, sources=[order.sources], vocab_size=vocab_size
        )
        self._iter_selections = partial(
            iter_batch_indices,
            order,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
        )
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self._num_workers = num_workers
        self._batches: Iterator[Any] | None = None
        self._device = device
        self.is_prefetching = device.type != "cpu" if is_prefetching is None else is_prefetching
        # torch.cuda, or torch.cpu, whose streams do nothing.
        self._stream_module: Any = getattr(torch, device.type)
        self._copy_stream = self._stream_module.Stream() if self.is_prefetching else None
        self._prefetched: list[Batch] | None = None
        self._counts = SourceCounts(order)

    @property
    def steps_per_epoch(self) -> float:
        """Number of optimizer steps in one pass over the data, not rounded."""
        return self.samples_per_epoch / self.global_batch_size

    def metrics(self) -> dict[str, float]:
        """Return the samples and epochs so far, and the samples of each source if there are several.

        The values are the same on every rank.
        """
        row: dict[str, float] = {
            "train/samples_seen": self.samples_seen,
            "train/epoch": self.samples_seen / self.samples_per_epoch,
        }
        if len(self._order.names) > 1:
            counts = self.source_samples()
            row |= {f"data/{name}_samples": count for name, count in counts.items()}
        return row

    def source_samples(self) -> dict[str, int]:
        """Return the number of samples returned so far over all ranks, by source."""
        return self._counts.count_up_to(self.samples_seen)

    @tag_errors(Phase.DATA)
    def next_group(self) -> list[Batch]:
        """Return the next group of micro-batches: on the device if groups are prefetched, else on the host.

        Raises:
            DataError: A sample cannot be read, samples cannot be collated, or a token id is out of range.
        """
        if self.is_prefetching:
            self.prefetch()
            group = self._take_prefetched()
        else:
            group = self._read_group()
        if self._left_out.ranges:
            self.samples_seen = self._left_out.find_start(self.samples_seen, self.global_batch_size)
        self.samples_seen += self.global_batch_size
        return group

    @tag_errors(Phase.DATA)
    def prefetch(self) -> None:
        """Read the next group and start to copy it to the device, without waiting for the copy.

        Does nothing if groups are not prefetched, or one already is.

        Raises:
            DataError: As `next_group`.
        """
        if not self.is_prefetching or self._prefetched is not None:
            return
        group = self._read_group()
        with self._stream_module.stream(self._copy_stream):
            self._prefetched = [
                map_tensors(batch, lambda _, tensor: tensor.to(self._device, non_blocking=True))
                for batch in group
            ]

    def _read_group(self) -> list[Batch]:
        """Return the next group in host memory; start the workers if none run."""
        if self._batches is None:
            # The selections are endless, so workers stay alive without being persistent.
            batches = read_batches(
                self._reader,
                self._iter_selections(samples_seen=self.samples_seen, left_out=self._left_out),
                self._num_workers,
                pin_memory=self._device.type == "cuda",
                persistent=False,
            )
            self._batches = iter(batches)
        return [raise_if_error(next(self._batches)) for _ in range(self._gradient_accumulation_steps)]

    def _take_prefetched(self) -> list[Batch]:
        """Return the prefetched group, and let the device's current stream wait for its copy."""
        group = self._prefetched
        self._prefetched = None
        assert group is not None
        current = self._stream_module.current_stream()
        current.wait_stream(self._copy_stream)  # the device waits, not the host
        for tensor in (tensor for tensor in iter_tensors(group) if tensor.is_cuda):
            # Without this, the copy stream could reuse the memory before the step has read it.
            tensor.record_stream(current)
        return group

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data; prefetched groups do not count."""
        return {
            "samples_seen": self.samples_seen,
            "source_samples": self.source_samples(),
            "left_out": [list(each) for each in self._left_out.ranges],
        }

    def leave_out(self, ranges: Iterable[Sequence[int]]) -> None:
        """Exclude ranges of positions, [first, last) each, and discard prefetched groups."""
        self._left_out = LeftOutPositions([*self._left_out.ranges, *ranges])
        self.close()

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Divide the following global batches into other micro-batches, and discard prefetched groups.

        The product of the two sizes must not change, so that `global_batch_size` stays the same.
        """
        self._iter_selections = partial(
            self._iter_selections,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self.close()

    def read_again(self, first: int) -> list[Batch]:
        """Read the group that begins at position `first` once more, in this process and in host memory."""
        selections = islice(self._iter_selections(samples_seen=first), self._gradient_accumulation_steps)
        return [raise_if_error(batch) for batch in map(self._reader.__getitems__, selections)]

    def describe(self, first: int, last: int) -> str:
        """Describe the samples at positions [first, last), such as `wiki 7, 12; code 3 ...`.

        Names each sample by its source and its index in the source, up to MAX_LISTED_SAMPLES samples.
        """
        positions = np.arange(first, min(last, first + MAX_LISTED_SAMPLES))
        by_source = defaultdict[str, list[str]](list)
        for index in self._order.samples_at(positions).tolist():
            name, index_in_source = locate_sample(index, self._order.sources)
            by_source[name].append(str(index_in_source))
        text = "; ".join(f"{name} {', '.join(indices)}" for name, indices in by_source.items())
        return text + " ..." if last - first > MAX_LISTED_SAMPLES else text

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, possibly of another number of ranks or another batch size.

        The state of a user's own source may have only `samples_seen`.

        Raises:
            DataError: The weights of `data.curriculum` give other samples than the run has seen.
        """
        self.leave_out(state.get("left_out", ()))
        self.seek(int(state["samples_seen"]), state.get("source_samples"))

    def seek(self, samples_seen: int, source_samples: Mapping[str, int] | None = None) -> None:
        """Continue at position `samples_seen` of the order, which does not depend on the number of ranks.

        Args:
            samples_seen: Samples that all ranks together have taken or left out.
            source_samples: Samples so far by source; `None` to count them from the order.

        Raises:
            DataError: The weights of `data.curriculum` give other counts than `source_samples`.
        """
        assert samples_seen >= 0
        self.close()
        self.samples_seen = samples_seen
        self._counts.seek(samples_seen, source_samples)

    def close(self) -> None:
        """Stop the workers and discard prefetched groups; `next_group` starts new workers."""
        self._prefetched = None
        self._batches = None  # the iterator's destructor stops its workers


class EvalLoader:
    """Iterates over `(name, batch, is_real)` of each data set in order; every rank gets equally many batches.

    Forward passes may be collective (ZeRO-3). So a rank that has no samples left gets a batch of one sample
    with `is_real` False: it must run the forward pass and not count the result. The last real batch of a data
    set may have fewer samples.

    Args:
        datasets: Map-style data sets by name; at least one, each with at least one sample.
        collate: Makes a batch of a list of samples, or of the result of `__getitems__`.
        names_in_mean: Names of the data sets whose mean is `eval/loss`; empty for all.
        micro_batch_size: Samples per batch and rank.
        dp_rank: Data-parallel rank; ranks with equal values read the same samples.
        dp_world_size: Number of data-parallel ranks.
        max_samples: Maximum number of samples of a data set over all ranks; `None` for all.
        num_workers: Number of worker processes, which stay alive between two passes; 0 to read in this
            process.
        pin_memory: Whether to copy batches to page-locked memory.
        vocab_size: Number of token ids that the model has; `None` for no check.
        token_bytes: See the attribute.

    Attributes:
        names: Names of all data sets, in the order of evaluation.
        names_in_mean: Names of the data sets whose mean is `eval/loss`.
        token_bytes: Bytes of text of each token id; `None` if they are not known.

    Raises:
        DataError: A data set is empty.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset[Any]],
        collate: Collate,
        *,
        names_in_mean: Iterable[str],
        micro_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        max_samples: int | None,
        num_workers: int,
        pin_memory: bool,
        vocab_size: int | None = None,
        token_bytes: NDArray[np.int64] | None = None,
    ) -> None:
        assert datasets
        self.token_bytes = token_bytes
        self.names = tuple(datasets)
        self.names_in_mean = tuple(names_in_mean) or self.names
        lengths = {name: _check_length(name, dataset) for name, dataset in datasets.items()}
        sizes = list(lengths.values())
        if max_samples is not None:
            sizes = [min(size, max_samples) for size in sizes]
        self._sampler = EvalSampler(
            sizes, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_world_size=dp_world_size
        )
        # One reader for all data sets: a pool of workers for each would leave many processes idle.
        reader = BatchReader(
            list(datasets.values()),
            collate,
            seed=0,
            is_training=False,
            sources=[[(f"{name}, held out", length)] for name, length in lengths.items()],
            vocab_size=vocab_size,
        )
        self._batches = read_batches(
            reader,
            self._sampler,
            num_workers,
            pin_memory=pin_memory,
            persistent=True,
        )

    def __iter__(self) -> Iterator[tuple[str, Batch, bool]]:
        for selection, batch in zip(self._sampler, self._batches, strict=False):
            yield self.names[selection.dataset], raise_if_error(batch), self._sampler.is_real(selection)


def _check_length(name: str, dataset: Dataset[Any]) -> int:
    """Return the number of samples of an evaluation data set; raise DataError if it is empty."""
    length = len(dataset)  # type: ignore[arg-type]
    if length == 0:
        raise DataError(
            f"the evaluation data set {name!r} ({type(dataset).__name__}) is empty: expected a sample or more"
        )
    return length


def iter_batch_indices(
    order: SampleOrder,
    *,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    dp_rank: int,
    dp_world_size: int,
    samples_seen: int,
    left_out: LeftOutPositions = NONE_LEFT_OUT,
) -> Iterator[BatchIndices]:
    """Yield the samples of one rank's micro-batches, without end, from position `samples_seen` on.

    If a step begins at position p, its micro-batch m has the `micro_batch_size` samples from position
    p + (m * dp_world_size + dp_rank) * micro_batch_size on. So a step takes the same samples for any number
    of ranks and accumulation steps.
    """
    global_batch_size = micro_batch_size * gradient_accumulation_steps * dp_world_size
    micro_batches = np.arange(gradient_accumulation_steps) * dp_world_size + dp_rank
    offsets = micro_batches[:, None] * micro_batch_size + np.arange(micro_batch_size)  # (M, B)
    steps = max(1, SAMPLES_PER_ORDER_CALL // offsets.size)
    start = samples_seen  # earliest position at which the next step may begin
    while True:
        step_starts = left_out.find_starts(start, global_batch_size, steps)
        positions = (step_starts[:, None, None] + offsets).reshape(-1, micro_batch_size)
        samples = order.samples_at(positions)  # (steps * M, B)
        for position, indices in zip(positions[:, 0].tolist(), samples.tolist(), strict=True):
            yield BatchIndices(0, position, indices)
        start = int(step_starts[-1]) + global_batch_size
