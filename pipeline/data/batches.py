"""Converts samples and batches of any form to the one that loaders, engines and objectives use: a dict.

A sample or a batch may be a dict, a tuple or list `(input, target, ...)`, a named tuple or a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pipeline.errors import DataError, PipelineError

TUPLE_NAMES = ("inputs", "targets")  # names of the first entries of a tuple
FIELD_PREFIX = "field_"  # prefix of the names of the tuple's further entries: field_2, field_3, ...
IGNORE_INDEX = -100  # the label that is excluded from every loss
MAX_LISTED_ENTRIES = 12  # entries of a batch that a message lists
Batch = dict[str, Any]


class MissingEntryError(DataError, KeyError):
    """Code read an entry that the batch does not have."""

    __str__ = PipelineError.__str__  # KeyError would put quotes around the message


class ValueRange(NamedTuple):
    """Range of the integers in one entry of a batch."""

    lowest: int
    """Lowest value, IGNORE_INDEX included."""
    lowest_counted: int
    """Lowest value apart from IGNORE_INDEX; 0 if IGNORE_INDEX is the only negative value."""
    highest: int
    """Highest value."""


class BatchOrigin(NamedTuple):
    """Samples that a batch was made of, and ranges of its values."""

    indices: Sequence[int]
    """Indices of the samples in the data set."""
    sources: Sequence[tuple[str, int]]
    """Name and number of samples of each source, in the order of the data set; empty if not known."""
    value_ranges: Mapping[str, ValueRange] = MappingProxyType({})
    """Ranges of the integer entries by name, measured when the batch is read, so that no step scans the
    values again. An entry that is missing here was not measured."""


class LoadedBatch(Batch):
    """A batch with metadata: its number of samples, their origin, and the host copy of a moved batch.

    Its values are tensors, nested tuples, lists and dicts of tensors, or other objects such as strings.

    Attributes:
        num_samples: Number of samples on this rank; `None` if no loader made the batch.
        host: The same batch in host memory if this one was moved to a device, else `None`. Code that inspects
            values reads the host batch, so that it does not synchronize with the device.
        origin: Samples that the batch was made of; `None` if no loader made it.
    """

    num_samples: int | None = None
    host: Batch | None = None
    origin: BatchOrigin | None = None

    def copy_metadata_from(self, other: Mapping[str, Any]) -> LoadedBatch:
        """Copy `num_samples`, `host` and `origin` from `other`, and return this batch."""
        for name in ("num_samples", "host", "origin"):
            setattr(self, name, getattr(other, name, None))
        return self

    def __missing__(self, key: str) -> Any:
        raise MissingEntryError(f"the batch has no entry {key!r}; it has: {format_batch(self)}")


def get_host_batch(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch as it was before it was moved to a device, or the batch itself if it was not moved."""
    return getattr(batch, "host", None) or batch


def count_samples(batch: Mapping[str, Any]) -> int:
    """Return the number of samples of a batch on this rank.

    If no loader made the batch, this is the length of its first tensor with a dimension; 1 if it has none.
    """
    num_samples: int | None = getattr(get_host_batch(batch), "num_samples", None)
    if num_samples is not None:
        return num_samples
    return next((len(tensor) for tensor in iter_tensors(batch) if tensor.dim()), 1)


def map_tensors(batch: Mapping[str, Any], function: Callable[[str, Tensor], Tensor]) -> LoadedBatch:
    """Return the batch with each tensor replaced by `function(key, tensor)`.

    Args:
        batch: The batch; it is not modified.
        function: Function of a tensor and the name of the batch's entry that contains it.

    Returns:
        A new batch, whose `host` is the original or the original's `host`.
    """
    result = LoadedBatch(
        {
            key: function(key, value) if isinstance(value, Tensor) else _map_value(value, key, function)
            for key, value in batch.items()
        }
    )
    result.host = get_host_batch(batch)  # type: ignore[assignment]
    return result


def _map_value(value: Any, key: str, function: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(key, value)
    if isinstance(value, Mapping):
        return {name: _map_value(each, key, function) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_map_value(each, key, function) for each in value)
    return value


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in a nested value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            if isinstance(each, Tensor):
                yield each
            else:
                yield from iter_tensors(each)


def format_batch(batch: Mapping[str, Any]) -> str:
    """Return the entries of a batch for a message, such as `inputs (8, 3) float32, names (list of str)`."""
    parts = [f"{key} {describe_value(value)}" for key, value in list(batch.items())[:MAX_LISTED_ENTRIES]]
    return ", ".join(parts) + ", ..." * (len(batch) > MAX_LISTED_ENTRIES) or "nothing"


def describe_value(value: Any) -> str:
    """Return the shape and dtype of a tensor or array, or the type of any other value, for a message."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)) and value:
        return f"({type(value).__name__} of {type(value[0]).__name__})"
    return f"({type(value).__name__})"


def as_batch(collated: Any, samples: int | None = None) -> LoadedBatch:
    """Return a batch of any form as a dict.

    Args:
        collated: One of these. A dict. A tensor or array, which becomes `inputs`. A named tuple, which keeps
            its names. A tuple or list, whose entries become `inputs` (or the entries of a dict), `targets`,
            `field_2`, `field_3` and so on.
        samples: Number of samples that were collated; `None` to take the length of the first tensor.

    Raises:
        DataError: The batch has none of these forms, or it is empty.
    """
    if isinstance(collated, PackedSequence):
        raise DataError(_PACKED_SEQUENCE_MESSAGE)
    if isinstance(collated, Mapping):
        entries = dict(collated)
    elif isinstance(collated, tuple) and hasattr(collated, "_asdict"):
        entries = collated._asdict()
    elif isinstance(collated, (tuple, list)) and collated:
        entries = {_get_entry_name(index): value for index, value in enumerate(collated)}
        if isinstance(collated[0], Mapping):
            del entries[_get_entry_name(0)]
            entries = {**collated[0], **entries}
    elif isinstance(collated, (Tensor, np.ndarray)):
        entries = {"inputs": collated}
    else:
        what = "an empty list" if isinstance(collated, (tuple, list)) else f"a {type(collated).__name__}"
        raise DataError(
            f"the batch is {what}; expected a dict of tensors, a tuple (inputs, targets), or a tensor: see "
            "what the data set's collate function returns"
        )
    for key in entries:
        if not isinstance(key, str):
            raise DataError(f"the batch has an entry called {key!r}; names of entries must be strings")
    batch = LoadedBatch(
        {key: value if isinstance(value, Tensor) else _to_tensors(value) for key, value in entries.items()}
    )
    lengths = [len(tensor) for tensor in iter_tensors(batch) if tensor.dim()]
    if not lengths or lengths[0] == 0:
        raise DataError(
            f"a batch without a sample: {format_batch(batch)}; a collate function that leaves samples out "
            "must keep at least one, and a data set must return tensors"
        )
    # A tensor may begin with another dimension, such as time, and a collate function may leave samples out.
    batch.num_samples = samples if samples in lengths else lengths[0]
    return batch


def raise_if_error(batch: Any) -> Batch:
    """Return the argument if it is a batch; raise it if it is an error.

    Raises:
        PipelineError: The reader returned this error in place of a batch (see loader.BatchReader).
    """
    if isinstance(batch, PipelineError):
        raise batch
    loaded: Batch = batch
    return loaded


_PACKED_SEQUENCE_MESSAGE = (
    "the batch contains a PackedSequence, which cannot be divided over devices; collate with pad_sequence, "
    "pass the lengths along, and let the model's forward call pack_padded_sequence"
)


def _get_entry_name(index: int) -> str:
    """Return the name of the entry at `index` of a tuple."""
    return TUPLE_NAMES[index] if index < len(TUPLE_NAMES) else f"{FIELD_PREFIX}{index}"


def _to_tensors(value: Any) -> Any:
    """Return a nested value with tensors in place of arrays and numbers.

    Raises:
        DataError: The value contains a PackedSequence.
    """
    if isinstance(value, PackedSequence):
        raise DataError(_PACKED_SEQUENCE_MESSAGE)
    if isinstance(value, Mapping):
        return {key: _to_tensors(each) for key, each in value.items()}
    if _is_numeric(value):
        return _to_tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {key: _to_tensors(each) for key, each in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_to_tensors(each) for each in value)
    return value


def _is_numeric(value: Any) -> bool:
    """Return whether `value` can become a tensor.

    This holds for a number, a tensor, a numeric array, and lists of numbers, nested with equal lengths.
    """
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biuf"
    if isinstance(value, list) and value:
        if isinstance(value[0], list):
            is_regular = all(isinstance(each, list) and len(each) == len(value[0]) for each in value)
            return is_regular and all(map(_is_numeric, value))
        return all(isinstance(each, (bool, int, float, np.number)) for each in value)
    return isinstance(value, (bool, int, float))


def _to_tensor(value: Any) -> Tensor:
    """Return a numeric value (see `_is_numeric`) as a tensor, without a copy where possible."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value) if value.flags.writeable else value.copy())
    return torch.as_tensor(np.array(value) if isinstance(value, np.generic) else value)


WHOLE_SAMPLES = "samples"  # used in place of an entry's name if entire samples are stacked


def stack_samples(samples: Sequence[Any], where: str = WHOLE_SAMPLES) -> Any:
    """Make a batch of samples of one type.

    Tensors and numbers are stacked along a new first axis. Other values become a list.

    Args:
        samples: Samples of a batch, or their values of one entry; at least one.
        where: Name of the entry for messages; WHOLE_SAMPLES if `samples` are entire samples.

    Raises:
        DataError: The samples differ in type, entries or shape, one has no entries, or it contains a
            PackedSequence.
    """
    first = samples[0]
    if where == WHOLE_SAMPLES and not _is_sample(first):
        raise DataError(
            f"the data set gave {_describe_non_sample(first)} for a sample; expected a dict, a tuple or a "
            "tensor with entries"
        )
    if isinstance(first, PackedSequence):
        raise DataError(_PACKED_SEQUENCE_MESSAGE)
    are_numeric = [_is_numeric(sample) for sample in samples]  # reads every number of a list, so only once
    _check_same_type(samples, are_numeric, where)
    prefix = "" if where == WHOLE_SAMPLES else f"{where}."
    if isinstance(first, Mapping):
        keys = [set(sample) for sample in samples]
        missing_in_some = set.union(*keys) - set.intersection(*keys)
        if missing_in_some:
            names = ", ".join(sorted(map(str, missing_in_some)))
            raise DataError(f"{where} of one batch differ in their entries: some lack {names}")
        return {key: stack_samples([sample[key] for sample in samples], f"{prefix}{key}") for key in first}
    is_list_of_numbers = where != WHOLE_SAMPLES and are_numeric[0]
    if isinstance(first, (tuple, list)) and not is_list_of_numbers:
        return _stack_sequences(samples, where, prefix)
    if not are_numeric[0]:
        return list(samples)
    tensors = [_to_tensor(sample) for sample in samples]
    shapes = list(dict.fromkeys(tuple(tensor.shape) for tensor in tensors))
    if len(shapes) > 1:
        raise DataError(_format_uneven_message(where, shapes))
    return torch.stack(tensors)


def _check_same_type(samples: Sequence[Any], are_numeric: Sequence[bool], where: str) -> None:
    """Raise DataError if samples differ in type, apart from the types of which tensors are made."""
    type_names = list(dict.fromkeys(type(sample).__name__ for sample in samples))
    are_containers = {isinstance(sample, (Mapping, tuple)) for sample in samples}
    is_mixed = len(are_containers) > 1 or len(set(are_numeric)) > 1
    if is_mixed or (True in are_containers and len(type_names) > 1):
        raise DataError(
            f"{where} of one batch differ in type: {', '.join(type_names)}; return the same type for every "
            "sample"
        )


def _stack_sequences(samples: Sequence[Any], where: str, prefix: str) -> Any:
    """Stack tuples or lists entry by entry, and return the same type; `prefix` begins the entries' names.

    Raises:
        DataError: The samples differ in length, or the values of an entry cannot be stacked.
    """
    first = samples[0]
    lengths = [len(sample) for sample in samples]
    if len(set(lengths)) > 1:
        raise DataError(_format_uneven_message(where, [f"{length} entries" for length in lengths]))
    names: Sequence[str] = getattr(first, "_fields", [_get_entry_name(index) for index in range(len(first))])
    columns = [
        stack_samples(column, f"{prefix}{name}")
        for name, column in zip(names, zip(*samples, strict=True), strict=True)
    ]
    return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)


def _is_sample(value: Any) -> bool:
    """Return whether `value` is a container with entries, a tensor, a numeric array or a number."""
    return len(value) > 0 if isinstance(value, (Mapping, tuple, list)) else _is_numeric(value)


def _describe_non_sample(value: Any) -> str:
    """Return the words for a value that is not a sample, such as `a dict without entries`."""
    if value is None:
        return "None"
    return f"a {type(value).__name__}" if value else f"a {type(value).__name__} without entries"


def _format_uneven_message(where: str, shapes: list[Any]) -> str:
    """Return the message for values of different lengths or shapes."""
    return (
        f"{where} of one batch cannot be stacked: {' and '.join(map(str, shapes[:3]))}; make them equal, or "
        "give the data set a `collate_fn` that pads (docs/how-to/extending.md)"
    )


INTEGER_TYPES = (torch.int64, torch.int32, torch.int16)  # dtypes of indices; uint8 is the dtype of pixels
# Entries whose values are not measured: they are no indices, or this package makes them itself.
UNMEASURED_ENTRIES = ("position_ids", "attention_mask", "segments", "segment_kinds")


class BadValue(NamedTuple):
    """A value that is out of range."""

    value: int
    """The value itself."""
    sample: str
    """Text such as ` (sample 7 of wiki)` to append to a message; empty if the sample is not known."""


def describe_origin(
    batch: LoadedBatch, indices: Sequence[int], sources: Sequence[tuple[str, int]]
) -> BatchOrigin:
    """Return the origin of a batch in host memory, with the ranges of its integer entries.

    Args:
        batch: The batch.
        indices: Indices of the batch's samples in the data set.
        sources: Name and number of samples of each source, in the order of the data set.
    """
    value_ranges = {}
    for name, value in batch.items():
        if name in UNMEASURED_ENTRIES or not isinstance(value, Tensor) or value.dtype not in INTEGER_TYPES:
            continue
        if value.device.type != "cpu" or value.numel() == 0:
            continue
        values = value.numpy()  # torch would start all its threads for a few kB
        lowest = int(values.min())
        lowest_counted = lowest
        if lowest < 0:
            negative = values[values < 0]
            lowest_counted = int(negative[negative != IGNORE_INDEX].min(initial=0))
        value_ranges[name] = ValueRange(lowest, lowest_counted, int(values.max()))
    return BatchOrigin(indices, sources, value_ranges)


def find_bad_value(
    batch: Mapping[str, Any], name: str, upper_bound: int, ignored: int | None = IGNORE_INDEX
) -> BadValue | None:
    """Return the first value of an entry that is not in [0, upper_bound).

    Only values in host memory are read, and only if the range in `BatchOrigin.value_ranges` is too wide or
    missing. So no call synchronizes with the device.

    Args:
        batch: The batch, on any device.
        name: Name of the entry.
        upper_bound: Upper bound of the values (exclusive).
        ignored: Further value that is allowed; `None` to allow no other.

    Returns:
        The value; `None` if all values are allowed, or the entry has no integers in host memory.
    """
    host = get_host_batch(batch)
    origin: BatchOrigin | None = getattr(host, "origin", None)
    value_range = origin.value_ranges.get(name) if origin is not None else None
    if value_range is not None:
        lowest = value_range.lowest_counted if ignored == IGNORE_INDEX else value_range.lowest
        if lowest >= 0 and value_range.highest < upper_bound:
            return None
    value = host.get(name)
    if not isinstance(value, Tensor) or value.dtype not in INTEGER_TYPES:
        return None
    if value.device.type != "cpu" or value.numel() == 0:
        return None
    values = value.numpy()
    wrong = (values < 0) | (values >= upper_bound)
    if ignored is not None:
        wrong &= values != ignored
    if not wrong.any():
        return None
    place = np.argwhere(wrong)[0].tolist()  # index along each dimension
    row = place[0] if place else 0
    num_rows = len(values) if values.ndim else 1
    sample = ""
    # Rows correspond to samples only if the collate function neither added nor removed any.
    if origin is not None and num_rows == len(origin.indices):
        source, index = locate_sample(origin.indices[row], origin.sources)
        sample = f" (sample {index} of {source})" if source else f" (sample {index})"
    return BadValue(int(values[tuple(place)]), sample)


def locate_sample(index: int, sources: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Return the name of a sample's source, and the sample's index in that source.

    If the source is not known, the name is empty and the index is the one in the data set.

    Args:
        index: Index in the data set, which concatenates all sources.
        sources: Name and number of samples of each source, in the order of the data set.
    """
    index_in_source = index
    for name, num_samples in sources:
        if index_in_source < num_samples:
            return name, index_in_source
        index_in_source -= num_samples
    return "", index


def collate_items(items: Any) -> Any:
    """Stack a list of samples; return anything else, such as a batch from `__getitems__`, unchanged.

    Raises:
        DataError: The samples cannot be stacked (see `stack_samples`).
    """
    return stack_samples(items) if isinstance(items, list) and items else items
