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
FIELD_PREFIX = "field_"  # begins the names of its further entries: field_2, field_3, ...
IGNORE_INDEX = -100  # the label that is excluded from every loss
MAX_LISTED_ENTRIES = 12  # entries of a batch that a message lists
Batch = dict[str, Any]


class MissingEntryError(DataError, KeyError):
    """Code read an entry that the batch does not have."""

    __str__ = PipelineError.__str__  # KeyError would put quotes around the message


class ValueRange(NamedTuple):
    """Range of the integers in one entry of a batch."""

    lowest: int
    lowest_counted: int
    """Lowest value apart from IGNORE_INDEX; 0 if no other value is negative."""
    highest: int


class BatchOrigin(NamedTuple):
    """Samples that a batch was made of."""

    indices: Sequence[int]
    """Indices of the samples in the data set."""
    sources: Sequence[tuple[str, int]]
    """Name and number of samples of each source, in the order of the data set."""
    value_ranges: Mapping[str, ValueRange] = MappingProxyType({})
    """Ranges of the integer entries, measured when the batch is read; no step scans the values again."""


class LoadedBatch(Batch):
    """A batch on its way to the model and the loss.

    Its values are tensors, nested tuples, lists and dicts of tensors, or other objects such as strings.

    Attributes:
        num_samples: Number of samples; `None` if no loader made the batch.
        host: The same batch in host memory, if this one was moved to a device. Code that inspects values
            reads them there, and so does not wait for the device.
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
    """Return the batch as it was before it was moved to a device, or the batch itself if that is unknown."""
    return getattr(batch, "host", None) or batch


def count_samples(batch: Mapping[str, Any]) -> int:
    """Return the number of samples that the loader noted, or else the length of the first tensor."""
    known = getattr(get_host_batch(batch), "num_samples", None)
    return known if known is not None else next((len(t) for t in iter_tensors(batch) if t.dim()), 1)


def map_tensors(batch: Mapping[str, Any], move: Callable[[str, Tensor], Tensor]) -> LoadedBatch:
    """Return the batch with each tensor replaced by `move(key, tensor)`; its `host` is the original."""
    result = LoadedBatch(
        {
            key: move(key, value) if isinstance(value, Tensor) else _map_value(value, key, move)
            for key, value in batch.items()
        }
    )
    result.host = get_host_batch(batch)  # type: ignore[assignment]
    return result


def _map_value(value: Any, key: str, move: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return move(key, value)
    if isinstance(value, Mapping):
        return {name: _map_value(each, key, move) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_map_value(each, key, move) for each in value)
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
    """Return the shape and dtype of a tensor or array, or the type of any other value."""
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
        samples: Number of samples in the batch.

    Raises:
        DataError: The batch has none of these forms, or it is empty.
    """
    if isinstance(collated, PackedSequence):
        raise DataError(_NO_PACKED)
    if isinstance(collated, Mapping):
        entries = dict(collated)
    elif isinstance(collated, tuple) and hasattr(collated, "_asdict"):
        entries = collated._asdict()
    elif isinstance(collated, (tuple, list)) and collated:
        entries = dict(zip(map(_entry_name, range(len(collated))), collated, strict=True))
        if isinstance(collated[0], Mapping):
            entries = {**collated[0], **{key: entries[key] for key in list(entries)[1:]}}
    elif isinstance(collated, (Tensor, np.ndarray)):
        entries = {"inputs": collated}
    else:
        what = "an empty list" if isinstance(collated, (tuple, list)) else f"a {type(collated).__name__}"
        raise DataError(
            f"the batch is {what}; expected a dict of tensors, a tuple (inputs, targets), or a tensor: see "
            "what the data set's collate returns"
        )
    for key in entries:
        if not isinstance(key, str):
            raise DataError(f"the batch has an entry called {key!r}; names are strings")
    batch = LoadedBatch(
        {key: value if isinstance(value, Tensor) else _to_tensors(value) for key, value in entries.items()}
    )
    lengths = [len(tensor) for tensor in iter_tensors(batch) if tensor.dim()]
    if not lengths or 0 in lengths[:1]:
        raise DataError(
            f"a batch without a sample: {format_batch(batch)}; a collate that leaves samples out must keep "
            "at least one, and a data set must give tensors"
        )
    # A tensor may begin with another dimension, such as time, and a collate function may drop samples.
    batch.num_samples = samples if samples in lengths else lengths[0]
    return batch


def raise_if_error(batch: Any) -> Batch:
    """Return what a loader yielded if it is a batch.

    Raises:
        PipelineError: The loader yielded this error in place of a batch.
    """
    if isinstance(batch, PipelineError):
        raise batch
    loaded: Batch = batch
    return loaded


_NO_PACKED = (
    "the batch holds a PackedSequence, which cannot be divided over devices; collate with pad_sequence, pass "
    "the lengths along, and let the model's forward call pack_padded_sequence"
)


def _entry_name(place: int) -> str:
    return TUPLE_NAMES[place] if place < len(TUPLE_NAMES) else f"{FIELD_PREFIX}{place}"


def _to_tensors(value: Any) -> Any:
    """Return a nested value with tensors in place of arrays and numbers."""
    if isinstance(value, PackedSequence):
        raise DataError(_NO_PACKED)
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
    """Return whether `value` is a number, a tensor, a numeric array, or nested lists of equal lengths."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biuf"
    if isinstance(value, list) and value:
        if isinstance(value[0], list):
            same = all(isinstance(each, list) and len(each) == len(value[0]) for each in value)
            return same and all(map(_is_numeric, value))
        return all(isinstance(each, (bool, int, float, np.number)) for each in value)
    return isinstance(value, (bool, int, float))


def _to_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value) if value.flags.writeable else value.copy())
    return torch.as_tensor(np.array(value) if isinstance(value, np.generic) else value)


def stack_samples(samples: Sequence[Any], where: str = "samples") -> Any:
    """Make a batch of samples of one form.

    Tensors and numbers are stacked along a new first axis. Other values become a list.

    Args:
        samples: Samples of a batch, or their values of one entry; at least one.
        where: Name of the entry in messages.

    Raises:
        DataError: The samples differ in form or shape, or one has no entries.
    """
    first = samples[0]
    if where == "samples" and not _is_sample(first):
        what = "None" if first is None else f"a {type(first).__name__}{' without entries' * (not first)}"
        raise DataError(
            f"the data set gave {what} for a sample; expected a dict, a tuple or a tensor with entries"
        )
    if isinstance(first, PackedSequence):
        raise DataError(_NO_PACKED)
    kinds = list(dict.fromkeys(type(sample).__name__ for sample in samples))
    forms = [isinstance(sample, (Mapping, tuple)) + 2 * _is_numeric(sample) for sample in samples]
    if any(forms) and (len(set(forms)) > 1 or (1 in forms and len(kinds) > 1)):
        raise DataError(
            f"{where} of one batch differ in type: {', '.join(kinds)}; return the same type for every sample"
        )
    inside = "" if where == "samples" else f"{where}."
    if isinstance(first, Mapping):
        keys = [set(sample) for sample in samples]
        if differing := set.union(*keys) - set.intersection(*keys):
            lacking = ", ".join(sorted(map(str, differing)))
            raise DataError(f"{where} of one batch differ in their entries: some lack {lacking}")
        return {key: stack_samples([sample[key] for sample in samples], f"{inside}{key}") for key in first}
    is_row = where != "samples" and set(forms) == {2}
    if isinstance(first, (tuple, list)) and not is_row:
        if len({len(sample) for sample in samples}) > 1:
            raise DataError(_uneven_message(where, [len(sample) for sample in samples]))
        names: Sequence[str] = getattr(first, "_fields", [_entry_name(place) for place in range(len(first))])
        pairs = zip(names, zip(*samples, strict=True), strict=True)
        columns = [stack_samples(column, f"{inside}{name}") for name, column in pairs]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if not all(forms):
        return list(samples)
    values = [_to_tensor(sample) for sample in samples]
    shapes = list(dict.fromkeys(tuple(value.shape) for value in values))
    if len(shapes) > 1:
        raise DataError(_uneven_message(where, shapes))
    return torch.stack(values)


def _is_sample(value: Any) -> bool:
    """Return whether `value` is a container with entries, a tensor, a numeric array or a number."""
    return len(value) > 0 if isinstance(value, (Mapping, tuple, list)) else _is_numeric(value)


def _uneven_message(where: str, shapes: list[Any]) -> str:
    return (
        f"{where} of one batch cannot be stacked: {' and '.join(map(str, shapes[:3]))}; make them equal, or "
        "give the data set a `collate_fn` that pads (docs/your-own-model.md)"
    )


INTEGER_TYPES = (torch.int64, torch.int32, torch.int16)  # uint8 holds pixels, which are no indices
# Entries that are no indices, or that this package makes itself.
UNMEASURED = ("position_ids", "attention_mask", "segments", "segment_kinds")


class BadValue(NamedTuple):
    """A value that is out of range."""

    value: int
    sample: str
    """Text such as ` (sample 7 of wiki)`; empty if the sample is not known."""


def describe_origin(
    batch: LoadedBatch, indices: Sequence[int], sources: Sequence[tuple[str, int]]
) -> BatchOrigin:
    """Return the samples of a batch, with the ranges of its integer entries."""
    value_ranges = {}
    for name, value in batch.items():
        if name in UNMEASURED or not isinstance(value, Tensor) or value.dtype not in INTEGER_TYPES:
            continue
        if value.device.type != "cpu" or not value.numel():
            continue
        values = value.numpy()  # torch would start all its threads for a few kB
        lowest = counted = int(values.min())
        if lowest < 0:
            below = values[values < 0]
            counted = int(below[below != IGNORE_INDEX].min(initial=0))
        value_ranges[name] = ValueRange(lowest, counted, int(values.max()))
    return BatchOrigin(indices, sources, value_ranges)


def _has_integers_on_host(value: Any) -> bool:
    is_integer = isinstance(value, Tensor) and value.dtype in INTEGER_TYPES
    return is_integer and value.device.type == "cpu" and value.numel() > 0


def find_bad_value(
    batch: Mapping[str, Any], name: str, below: int, ignored: int | None = IGNORE_INDEX
) -> BadValue | None:
    """Return the first value of an entry that is not in [0, below); `None` if there is none.

    Only host memory is read, and only if the value range that was noted when the batch was read is too wide.

    Args:
        batch: The batch, on any device.
        name: Name of the entry.
        below: Upper bound of the values (exclusive).
        ignored: Further value that is allowed; `None` if there is none.
    """
    host = get_host_batch(batch)
    origin: BatchOrigin | None = getattr(host, "origin", None)
    value_range = origin.value_ranges.get(name) if origin is not None else None
    if value_range is not None:
        lowest = value_range.lowest_counted if ignored == IGNORE_INDEX else value_range.lowest
        if lowest >= 0 and value_range.highest < below:
            return None
    value = host.get(name)
    if not isinstance(value, Tensor) or not _has_integers_on_host(value):
        return None
    values = value.numpy()
    wrong = (values < 0) | (values >= below)
    if ignored is not None:
        wrong &= values != ignored
    if not wrong.any():
        return None
    place = np.argwhere(wrong)[0].tolist()
    sample = ""
    # The rows are samples only if the collate function kept their number.
    if origin is not None and (len(values) if values.ndim else 1) == len(origin.indices):
        source, own = locate_sample(origin.indices[place[0] if place else 0], origin.sources)
        sample = f" (sample {own} of {source})" if source else f" (sample {own})"
    return BadValue(int(values[tuple(place)]), sample)


def locate_sample(index: int, sources: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Return the name of a sample's source, and the sample's index in that source.

    The name is empty if the source is not known.

    Args:
        index: Index in the data set of all sources.
        sources: Name and number of samples of each source, in the order of the data set.
    """
    own = index
    for name, samples in sources:
        if own < samples:
            return name, own
        own -= samples
    return "", index


def collate_items(items: Any) -> Any:
    """Stack a list of samples; return anything else, such as a batch from `__getitems__`, unchanged."""
    return stack_samples(items) if isinstance(items, list) and items else items
