"""Loaders of a rank: a group of training micro-batches for each step, and the held-out batches.

Batches are read in this process or by workers. Enters no collective and moves nothing to a device.
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
from pipeline.distributed.progress import Phase, phase
from pipeline.errors import DataError, PipelineError

PREFETCH = 2  # batches a worker fetches ahead

ORDER_BLOCK = 4096  # samples ordered at once: numpy calls cost the same for one micro-batch as for hundreds


class BatchReader(Dataset[Any]):
    """Reads one batch: a data set whose index is a Draw, so that torch's workers can be handed it.

    Random numbers are a function of the seed and a position: the same in this process and in a worker,
    whenever it is fetched, and after a resume. Those of `augmented` and `__getitem__` go by the sample's own
    position, and are the same at any number of ranks; those of `__getitems__` and the collate by the batch's.
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
        """Make a reader; sources: (name, samples) of each part of each data set."""
        self._datasets = datasets
        self._collate = collate
        self._seed = seed
        self._is_training = is_training
        self._sources = sources or [()] * len(datasets)
        self._num_words = num_words

    def __getitems__(self, draw: BatchIndices) -> LoadedBatch | PipelineError:
        try:
            batch = as_batch(self._collated(draw), len(draw.indices))
            batch.origin = describe_origin(batch, draw.indices, self._sources[draw.dataset])
            if self._num_words is not None:
                check_ids(batch, self._num_words)
            return batch
        except PipelineError as error:
            return error  # as a value: what a worker raises arrives with its traceback for a message

    def _collated(self, draw: BatchIndices) -> Any:
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
        """Read samples; position: of the first one; `None`: nothing is drawn."""
        source = dataset
        while isinstance(source, Subset):  # it has __getitems__ whatever it is a part of
            source = source.dataset
        if hasattr(source, "__getitems__"):
            return self._collate(dataset.__getitems__(indices))
        if position is None or type(source) in (TensorDataset, list):  # which draw nothing
            return self._collate([dataset[index] for index in indices])
        samples = []
        for bits, index in zip(derive_seeds(self._seed, position, len(indices)), indices, strict=True):
            seed_all(bits)
            samples.append(dataset[index])
        seed_all(derive_seed(self._seed, position, len(indices)))
        return self._collate(samples)


def check_ids(batch: LoadedBatch, num_words: int) -> None:
    """Check the ids of a batch where it is read.

    Args:
        num_words: Rows of the model's table of words.

    Raises:
        DataError: an id has no row there; names it and its sample.
    """
    if (wrong := find_bad_value(batch, "input_ids", num_words, None)) is not None:
        raise DataError(
            f"'input_ids' has {wrong.value}{wrong.sample}, and the model knows {num_words} words: expected 0 "
            f"to {num_words - 1} (model.vocab_size; the tokenizer that made them must be the model's)"
        )


def read_batches(
    fetch: BatchReader, draws: Iterable[BatchIndices], num_workers: int, *, pin_memory: bool, persistent: bool
) -> Iterable[LoadedBatch | PipelineError]:
    """Return the batches of these draws, to be iterated over as often as `draws` can be.

    Args:
        num_workers: Processes that fetch ahead; 0 fetches in this one.
        pin_memory: Copy batches to page-locked memory.
        persistent: The workers stay between two passes.
    """
    # Its own generator: by default each iteration draws from torch's global one, and dropout would differ.
    generator = torch.Generator()
    generator.manual_seed(0)
    return DataLoader(
        fetch,
        batch_sampler=draws,  # type: ignore[arg-type]  # one Draw for a list of indices
        collate_fn=_as_it_is,
        num_workers=num_workers,
        prefetch_factor=PREFETCH if num_workers else None,
        persistent_workers=persistent and num_workers > 0,
        pin_memory=pin_memory,
        generator=generator,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


MAX_LISTED_SAMPLES = 8  # samples that a line names


class BatchSource(Protocol):
    """The training rows of one rank: a group of micro-batches for each optimizer step.

    A rollout can serve it: nothing has to be known before it is made. The state says where the source is. A
    run that resumes from it is given the rows that the unbroken run would have been given.
    """

    @property
    def samples_seen(self) -> int:
        """Number of samples handed out so far, over all ranks, with those passed over."""

    def next_group(self) -> list[Batch]:
        """Return this rank's micro-batches of the next optimizer step."""

    def metrics(self) -> dict[str, float]:
        """Return the columns of a row that say how far the source is. Not collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain numbers, names and lists of them, the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, also from one of another number of ranks."""

    def close(self) -> None:
        """End what the source has started."""


@runtime_checkable
class PrefetchingSource(Protocol):
    """A source that can read a group before it is asked for."""

    is_prefetching: bool
    """Whether it does."""

    def prefetch(self) -> None:
        """Begin with the next group. Called once a step is on its way."""


@runtime_checkable
class ReplayableSource(Protocol):
    """A source whose samples have a fixed order, so that a group can be named, read again and left out."""

    def describe(self, first: int, last: int) -> str:
        """Return in words which samples are at [first, last) of the order: by source and index."""

    def read_again(self, first: int) -> list[Batch]:
        """Return the group that begins at a position of the order."""

    def leave_out(self, stretches: Iterable[Sequence[int]]) -> None:
        """Have no later step take the samples at these positions of the order, [first, last) each."""


class TrainLoader:
    """A BatchSource, PrefetchingSource and ReplayableSource that reads a data set, and brings the batches to the device.

    `prefetch` reads the next group and copies it on a stream of its own, so that neither is waited for.
    There is no thread: what is read in this process shares Python with the step, and worker processes read
    ahead by themselves.

    On a CPU nothing is fetched ahead: the step has been computed when `prefetch` is called, so it would be
    the same work a little earlier, and a data set of one's own would see a group that is then thrown away.
    When a group is read does not change what is in it: see Fetch.

    Args:
        dataset: Map-style, at least one sample; it may be smaller than a global batch.
        collate: Makes a batch of what the data set returns for a list of indices.
        order: Of the samples.
        device: Of this rank.
        micro_batch_size: Samples of one micro-batch of one rank.
        gradient_accumulation_steps: Micro-batches of one rank in an optimizer step.
        dp_rank: This rank among those that split the batch.
        dp_world_size: Number of those ranks.
        seed: Fixes the random numbers that the data set draws.
        num_workers: Processes that fetch ahead; 0 fetches in this one.
        is_prefetching: Whether to fetch ahead; by default on anything but a CPU.
        num_words: That the model knows: `input_ids` are held to it. None: they are not.
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
        """Optimizer steps of one pass over the data, not rounded."""
        return self.samples_per_epoch / self.global_batch_size

    def metrics(self) -> dict[str, float]:
        """See BatchSource. The same on every rank; the samples of each source where there are several."""
        row: dict[str, float] = {
            "train/samples_seen": self.samples_seen,
            "train/epoch": self.samples_seen / self.samples_per_epoch,
        }
        if len(self._order.names) > 1:
            counts = self.source_samples()
            row |= {f"data/{name}_samples": count for name, count in counts.items()}
        return row

    def source_samples(self) -> dict[str, int]:
        """Return the samples handed out so far, over all ranks, by their source."""
        return self._counts.count_up_to(self.samples_seen)

    @phase(Phase.DATA)
    def next_group(self) -> list[Batch]:
        """See BatchSource. On the device, where groups are fetched ahead."""
        if self.is_prefetching:
            self.prefetch()
            group = self._take()
        else:
            group = self._read()
        if self._left_out.stretches:
            self.samples_seen = self._left_out.start(self.samples_seen, self.global_batch_size)
        self.samples_seen += self.global_batch_size
        return group

    @phase(Phase.DATA)
    def prefetch(self) -> None:
        """Begin to bring the next group to the device; wait until it is read, not for the device."""
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
            # The draws never end, so neither do the workers: nothing to keep them for.
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
        group, self._ahead = self._ahead, None
        assert group is not None
        current = self._streams.current_stream()
        current.wait_stream(self._stream)  # the device waits, not the host
        for tensor in (tensor for tensor in iter_tensors(group) if tensor.is_cuda):
            tensor.record_stream(current)  # else the copying stream, whose memory it is, reuses it too early
        return group

    def state_dict(self) -> dict[str, Any]:
        """Return where the data is: what was handed out, not what was fetched ahead."""
        return {
            "samples_seen": self.samples_seen,
            "source_samples": self.source_samples(),
            "left_out": [list(stretch) for stretch in self._left_out.stretches],
        }

    def leave_out(self, stretches: Iterable[Sequence[int]]) -> None:
        """See ReplayableSource. What was fetched ahead is read anew."""
        self._left_out = LeftOutPositions([*self._left_out.stretches, *stretches])
        self.close()

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Divide the next groups of as many samples into other micro-batches.

        What was fetched ahead is read anew.
        """
        how = {
            "micro_batch_size": micro_batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
        }
        self._draws_from = partial(self._draws_from, **how)
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self.close()

    def read_again(self, first: int) -> list[Batch]:
        """See ReplayableSource. In this process."""
        draws = islice(self._draws_from(samples_seen=first), self._gradient_accumulation_steps)
        return [raise_if_error(batch) for batch in map(self._fetch.__getitems__, draws)]

    def describe(self, first: int, last: int) -> str:
        """See ReplayableSource. At most SHOWN of them: `wiki 7, 12; code 3 ...`."""
        own = defaultdict[str, list[str]](list)
        for index in self._order.samples_at(np.arange(first, min(last, first + MAX_LISTED_SAMPLES))).tolist():
            name, place = locate_sample(index, self._order.sources)
            own[name].append(str(place))
        named = "; ".join(f"{name} {', '.join(places)}" for name, places in own.items())
        return f"{named}{' ...' if last - first > MAX_LISTED_SAMPLES else ''}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, also one of another number of ranks or another batch size.

        The state of a source of the user's own may have `samples_seen` alone.
        """
        self.leave_out(state.get("left_out", ()))
        self.seek(int(state["samples_seen"]), state.get("source_samples"))

    def seek(self, samples_seen: int, source_samples: Mapping[str, int] | None = None) -> None:
        """Go on as if `samples_seen` samples had been handed out, also by another number of ranks."""
        assert samples_seen >= 0
        self.close()
        self.samples_seen = samples_seen
        self._counts.seek(samples_seen, source_samples)

    def close(self) -> None:
        """End the workers and drop what was fetched ahead; a next group is read anew."""
        self._ahead = None
        self._batches = None  # the iterator's destructor stops its workers


class EvalLoader:
    """Iterates over `(name, batch, is_real)`: each data set in order, as many batches on every rank.

    Forward passes may be collective (ZeRO-3), so a rank without samples left gets a batch of one sample with
    `is_real` False, to be run and not counted. The last real batch of a data set may be short.

    Args:
        datasets: Map-style, by name; at least one, and in each at least one sample.
        collate: Makes a batch of what a data set returns for a list of indices.
        total: Names of those that `eval/loss` is the mean over; none: all.
        micro_batch_size: Samples of one batch of one rank.
        dp_rank: This rank among those that split the data.
        dp_world_size: Number of those ranks.
        max_samples: Samples of a data set over all ranks at the most, the first ones; None: all.
        num_workers: Processes that fetch ahead; they stay between two passes.
        pin_memory: Copy batches to page-locked memory.
        num_words: See TrainLoader.

    Raises:
        DataError: a data set is empty.
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
        whole = {name: _length(name, dataset) for name, dataset in datasets.items()}
        sizes = list(whole.values())
        if max_samples is not None:
            sizes = [min(size, max_samples) for size in sizes]
        self._sampler = EvalSampler(
            sizes, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_world_size=dp_world_size
        )
        sets, sources = (
            list(datasets.values()),
            [[(f"{name}, held out", size)] for name, size in whole.items()],
        )
        # One reader of all sets: each with workers of its own would leave a crowd of idle processes.
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


def _length(name: str, dataset: Dataset[Any]) -> int:
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
    """Yield what one rank's micro-batches are made of, without end, from `samples_seen` on.

    Of optimizer step s, micro-batch m belongs at positions s * global + (m * dp_world_size + dp_rank) * micro
    + [0, micro). So a step takes the same samples whatever the number of ranks and of accumulation steps.
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
