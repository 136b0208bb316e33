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
from pipeline.data.random_numbers import derive_seed, derive_seeds, isolate_random_numbers, seed_all
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

PREFETCH = 2  # batches that each worker prefetches

ORDER_BLOCK = 4096  # samples ordered per call: numpy takes as long for one micro-batch as for hundreds


class BatchReader(Dataset[Any]):
    """Data set whose index is a BatchIndices: it reads one batch, and a DataLoader can run it in workers.

    Random numbers are a function of the seed and a position. They are the same in this process and in a
    worker, independent of when the batch is read, and after a resume. In `augmented` and `__getitem__` the
    position is the sample's, so the numbers do not depend on the number of ranks. In `__getitems__` and the
    collate function the position is that of the batch's first sample.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        collate: Collate,
        seed: int,
        *,
        is_training: bool,
        sources: Sequence[Sequence[tuple[str, int]]] | None = None,
        num_words: int | None = None,
    ) -> None:
        """Initialize the reader.

        Args:
            datasets: Map-style data sets.
            collate: Makes a batch of a list of samples, or of the result of `__getitems__`.
            seed: Seed of the random numbers that samples draw.
            is_training: Whether to read samples by `augmented`, if a data set has it.
            sources: Name and number of samples of each source, for each data set.
            num_words: Number of token ids that the model has; `None` to accept any id.
        """
        self._datasets = datasets
        self._collate = collate
        self._seed = seed
        self._is_training = is_training
        self._sources = sources or [()] * len(datasets)
        self._num_words = num_words

    def __getitems__(self, draw: BatchIndices) -> LoadedBatch | PipelineError:
        try:
            batch = as_batch(self._read_and_collate(draw), len(draw.indices))
            batch.origin = describe_origin(batch, draw.indices, self._sources[draw.dataset])
            if self._num_words is not None:
                check_ids(batch, self._num_words)
            return batch
        except PipelineError as error:
            return error  # returned, because torch puts a worker's traceback into the message of a raised one

    def _read_and_collate(self, draw: BatchIndices) -> Any:
        dataset = self._datasets[draw.dataset]
        if self._is_training and hasattr(dataset, "augmented"):
            places = enumerate(draw.indices, start=draw.position)
            return self._collate(
                [dataset.augmented(i, derive_seed(self._seed, place)) for place, i in places]
            )
        if getattr(dataset, "is_deterministic", False):
            return self._read(dataset, draw.indices)
        with isolate_random_numbers(self._seed, draw.position):
            return self._read(dataset, draw.indices, draw.position)

    def _read(self, dataset: Any, indices: list[int], position: int | None = None) -> Any:
        """Read and collate samples; `position` is the first one's, or `None` if nothing random is drawn."""
        source = dataset
        while isinstance(source, Subset):  # Subset has __getitems__ even if its data set has not
            source = source.dataset
        if hasattr(source, "__getitems__"):
            return self._collate(dataset.__getitems__(indices))
        if position is None or type(source) in (TensorDataset, list):  # these types draw no random numbers
            return self._collate([dataset[index] for index in indices])
        samples = []
        for bits, index in zip(derive_seeds(self._seed, position, len(indices)), indices, strict=True):
            seed_all(bits)
            samples.append(dataset[index])
        seed_all(derive_seed(self._seed, position, len(indices)))
        return self._collate(samples)


def check_ids(batch: LoadedBatch, num_words: int) -> None:
    """Check that the token ids of a batch are below `num_words`, the rows of the model's embedding.

    Raises:
        DataError: An id has no row in the embedding. The message names the id and its sample.
    """
    if (wrong := find_bad_value(batch, "input_ids", num_words, None)) is not None:
        raise DataError(
            f"'input_ids' has {wrong.value}{wrong.sample}, and the model knows {num_words} words: expected 0 "
            f"to {num_words - 1} (model.vocab_size); use the tokenizer that belongs to the model"
        )


def read_batches(
    fetch: BatchReader, draws: Iterable[BatchIndices], num_workers: int, *, pin_memory: bool, persistent: bool
) -> Iterable[LoadedBatch | PipelineError]:
    """Return an iterable of the batches that `draws` describes; it can be iterated as often as `draws`.

    Args:
        fetch: Reads a batch.
        draws: Samples of each batch.
        num_workers: Number of worker processes that prefetch batches; 0 to read in this process.
        pin_memory: Whether to copy batches to page-locked memory.
        persistent: Whether the workers are kept between two passes.
    """
    # By default each iteration draws from torch's global generator, which would change dropout.
    generator = torch.Generator()
    generator.manual_seed(0)
    return DataLoader(
        fetch,
        batch_sampler=draws,  # type: ignore[arg-type]  # BatchIndices in place of a list of indices
        collate_fn=_return_unchanged,
        num_workers=num_workers,
        prefetch_factor=PREFETCH if num_workers else None,
        persistent_workers=persistent and num_workers > 0,
        pin_memory=pin_memory,
        generator=generator,
    )


def _return_unchanged(batch: Any) -> Any:
    return batch


MAX_LISTED_SAMPLES = 8  # samples that a message names


class BatchSource(Protocol):
    """Source of one rank's training data: a group of micro-batches for each optimizer step.

    Rollouts can implement it, because rows may be made when they are asked for. The state is the position in
    the data. A run that resumes from it gets the rows that the uninterrupted run would have got.
    """

    @property
    def samples_seen(self) -> int:
        """Number of samples returned so far over all ranks, including those that were left out."""

    def next_group(self) -> list[Batch]:
        """Return this rank's micro-batches of the next optimizer step."""

    def metrics(self) -> dict[str, float]:
        """Return metrics that tell the position in the data, such as the epoch. Not collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, strings and lists of them, the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, possibly of another number of ranks."""

    def close(self) -> None:
        """Stop workers and free what the source has opened."""


@runtime_checkable
class PrefetchingSource(Protocol):
    """A source that can read a group before it is asked for."""

    is_prefetching: bool
    """Whether `prefetch` reads a group; the step calls it only then."""

    def prefetch(self) -> None:
        """Begin to read the next group. Called after a step is launched."""


@runtime_checkable
class ReplayableSource(Protocol):
    """A source with a fixed order of samples: groups can be described, read again and left out."""

    def describe(self, first: int, last: int) -> str:
        """Describe the samples at positions [first, last) of the order by source and index."""

    def read_again(self, first: int) -> list[Batch]:
        """Return the group that begins at position `first` of the order."""

    def leave_out(self, stretches: Iterable[Sequence[int]]) -> None:
        """Exclude positions of the order, [first, last) each, from all later steps."""


class TrainLoader:
    """Loader of a map-style data set, which prefetches batches to the device and can replay them.

    Implements BatchSource, PrefetchingSource and ReplayableSource.

    `prefetch` reads the next group and copies it on a separate stream, so that the step waits for neither.
    There is no thread: in this process it would compete with the step for the GIL, and worker processes read
    in parallel anyway.

    On a CPU nothing is prefetched. The step is complete when `prefetch` is called, so that the work would
    only be done earlier, and a custom data set might be read for a group that is never used. A group's
    content does not depend on when it is read: see BatchReader.

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
        is_prefetching: Whether to prefetch to the device; by default on every device but a CPU.
        num_words: Number of token ids that the model has, against which `input_ids` are checked; `None` for
            no check.
        left_out: Positions of the order that no step takes, [first, last) each.
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
        num_words: int | None = None,
        left_out: Iterable[Sequence[int]] = (),
    ) -> None:
        assert order.num_samples == len(dataset)  # type: ignore[arg-type]
        assert 0 <= dp_rank < dp_world_size
        self.samples_per_epoch = order.samples_per_epoch
        self.global_batch_size = micro_batch_size * gradient_accumulation_steps * dp_world_size
        self.samples_seen = 0
        self._left_out = LeftOutPositions(left_out)
        self._order = order
        sources = [order.sources]
        self._fetch = BatchReader(
            [dataset], collate, seed, is_training=True, sources=sources, num_words=num_words
        )
        self._draws_from = partial(
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
        self._streams: Any = getattr(torch, device.type)  # torch.cuda; torch.cpu has streams that do nothing
        self._stream = self._streams.Stream() if self.is_prefetching else None
        self._ahead: list[Batch] | None = None
        self._counts = SourceCounts(order)

    @property
    def steps_per_epoch(self) -> float:
        """Number of optimizer steps in one pass over the data, not rounded."""
        return self.samples_per_epoch / self.global_batch_size

    def metrics(self) -> dict[str, float]:
        """Return samples and epochs so far, and the samples of each source if there are several.

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
        """Return the next group, on the device if groups are prefetched, else in host memory."""
        if self.is_prefetching:
            self.prefetch()
            group = self._take()
        else:
            group = self._read()
        if self._left_out.stretches:
            self.samples_seen = self._left_out.start(self.samples_seen, self.global_batch_size)
        self.samples_seen += self.global_batch_size
        return group

    @tag_errors(Phase.DATA)
    def prefetch(self) -> None:
        """Read the next group and start to copy it to the device, without waiting for the copy."""
        if not self.is_prefetching or self._ahead is not None:
            return
        group = self._read()
        with self._streams.stream(self._stream):
            self._ahead = [
                map_tensors(batch, lambda _, tensor: tensor.to(self._device, non_blocking=True))
                for batch in group
            ]

    def _read(self) -> list[Batch]:
        if self._batches is None:
            # The iterator is endless, so its workers live on without being persistent.
            batches = read_batches(
                self._fetch,
                self._draws_from(samples_seen=self.samples_seen, left_out=self._left_out),
                self._num_workers,
                pin_memory=self._device.type == "cuda",
                persistent=False,
            )
            self._batches = iter(batches)
        return [raise_if_error(next(self._batches)) for _ in range(self._gradient_accumulation_steps)]

    def _take(self) -> list[Batch]:
        group = self._ahead
        self._ahead = None
        assert group is not None
        current = self._streams.current_stream()
        current.wait_stream(self._stream)  # the device waits, not the host
        for tensor in (tensor for tensor in iter_tensors(group) if tensor.is_cuda):
            # The memory belongs to the copying stream, which would otherwise reuse it too early.
            tensor.record_stream(current)
        return group

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data; prefetched groups do not count."""
        return {
            "samples_seen": self.samples_seen,
            "source_samples": self.source_samples(),
            "left_out": [list(stretch) for stretch in self._left_out.stretches],
        }

    def leave_out(self, stretches: Iterable[Sequence[int]]) -> None:
        """Exclude positions of the order, [first, last) each, and drop prefetched groups."""
        self._left_out = LeftOutPositions([*self._left_out.stretches, *stretches])
        self.close()

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Divide the following global batches into other micro-batches, and drop prefetched groups.

        The new sizes must have the same product.
        """
        how = {
            "micro_batch_size": micro_batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
        }
        self._draws_from = partial(self._draws_from, **how)
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self.close()

    def read_again(self, first: int) -> list[Batch]:
        """Read the group that begins at position `first` of the order once more, in this process."""
        draws = islice(self._draws_from(samples_seen=first), self._gradient_accumulation_steps)
        return [raise_if_error(batch) for batch in map(self._fetch.__getitems__, draws)]

    def describe(self, first: int, last: int) -> str:
        """Describe samples, MAX_LISTED_SAMPLES of them at most, such as `wiki 7, 12; code 3 ...`."""
        own = defaultdict[str, list[str]](list)
        for index in self._order.samples_at(np.arange(first, min(last, first + MAX_LISTED_SAMPLES))).tolist():
            name, place = locate_sample(index, self._order.sources)
            own[name].append(str(place))
        named = "; ".join(f"{name} {', '.join(places)}" for name, places in own.items())
        return f"{named}{' ...' if last - first > MAX_LISTED_SAMPLES else ''}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, possibly of another number of ranks or another batch size.

        The state of a user's own source may have only `samples_seen`.
        """
        self.leave_out(state.get("left_out", ()))
        self.seek(int(state["samples_seen"]), state.get("source_samples"))

    def seek(self, samples_seen: int, source_samples: Mapping[str, int] | None = None) -> None:
        """Continue after `samples_seen` samples over all ranks, whatever their number was."""
        assert samples_seen >= 0
        self.close()
        self.samples_seen = samples_seen
        self._counts.seek(samples_seen, source_samples)

    def close(self) -> None:
        """Stop the workers and drop prefetched groups; `next_group` starts new workers."""
        self._ahead = None
        self._batches = None  # the iterator's destructor stops its workers


class EvalLoader:
    """Iterates over `(name, batch, is_real)` of each data set in order; every rank gets as many batches.

    Forward passes may be collective (ZeRO-3). A rank that has no samples left therefore gets a batch of one
    sample with `is_real` False, which it must run and not count. The last real batch of a data set may be
    short.

    Args:
        datasets: Map-style data sets by name; at least one, each with at least one sample.
        collate: Makes a batch of a list of samples, or of the result of `__getitems__`.
        total: Names of the data sets whose mean is `eval/loss`; empty for all.
        micro_batch_size: Samples per batch and rank.
        dp_rank: Data-parallel rank; ranks with equal values read the same samples.
        dp_world_size: Number of data-parallel ranks.
        max_samples: Maximum number of samples of a data set over all ranks; `None` for all.
        num_workers: Number of worker processes, which are kept between two passes.
        pin_memory: Whether to copy batches to page-locked memory.
        num_words: Number of token ids that the model has; `None` for no check.

    Raises:
        DataError: A data set is empty.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset[Any]],
        collate: Collate,
        *,
        total: Iterable[str],
        micro_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        max_samples: int | None,
        num_workers: int,
        pin_memory: bool,
        num_words: int | None = None,
    ) -> None:
        assert datasets
        self.names = tuple(datasets)
        self.total = tuple(total) or self.names
        whole = {name: _check_length(name, dataset) for name, dataset in datasets.items()}
        sizes = list(whole.values())
        if max_samples is not None:
            sizes = [min(size, max_samples) for size in sizes]
        self._sampler = EvalSampler(
            sizes, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_world_size=dp_world_size
        )
        sets = list(datasets.values())
        sources = [[(f"{name}, held out", size)] for name, size in whole.items()]
        # One reader for all sets: a pool of workers for each would leave many processes idle.
        self._batches = read_batches(
            BatchReader(sets, collate, 0, is_training=False, sources=sources, num_words=num_words),
            self._sampler,
            num_workers,
            pin_memory=pin_memory,
            persistent=True,
        )

    def __iter__(self) -> Iterator[tuple[str, Batch, bool]]:
        for draw, batch in zip(self._sampler, self._batches, strict=False):
            yield self.names[draw.dataset], raise_if_error(batch), self._sampler.is_real(draw)


def _check_length(name: str, dataset: Dataset[Any]) -> int:
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

    Micro-batch m of optimizer step s takes the positions s * global + (m * dp_world_size + dp_rank) * micro +
    [0, micro). So a step takes the same samples whatever the number of ranks and accumulation steps.
    """
    global_batch_size = micro_batch_size * gradient_accumulation_steps * dp_world_size
    micro_batches = np.arange(gradient_accumulation_steps) * dp_world_size + dp_rank
    offsets = micro_batches[:, None] * micro_batch_size + np.arange(micro_batch_size)  # (M, B)
    steps = max(1, ORDER_BLOCK // offsets.size)
    start = samples_seen
    while True:
        firsts = left_out.starts(start, global_batch_size, steps)
        positions = (firsts[:, None, None] + offsets).reshape(-1, micro_batch_size)
        samples = order.samples_at(positions)  # (steps * M, B)
        for position, indices in zip(positions[:, 0].tolist(), samples.tolist(), strict=True):
            yield BatchIndices(0, position, indices)
        start = int(firsts[-1]) + global_batch_size
