"""Forms of samples and batches, and the one form that loaders, engines and objectives know: a dict.

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

TUPLE_NAMES = ("inputs", "targets")  # the first entries of a tuple
FIELD_PREFIX = "field_"  # its further ones: field_2, field_3, ...
IGNORE_INDEX = -100  # the label that counts in no loss
MAX_LISTED_ENTRIES = 12  # entries of a batch that a message lists
Batch = dict[str, Any]


class MissingEntryError(DataError, KeyError):
    """A batch was asked for an entry that it does not have."""

    __str__ = PipelineError.__str__  # a KeyError would be shown in quotes


class ValueRange(NamedTuple):
    """Range of the whole numbers of one entry."""

    lowest: int
    lowest_counted: int
    """Lowest number without IGNORE_INDEX; 0 if none is negative."""
    highest: int


class BatchOrigin(NamedTuple):
    """Samples of a batch as it was read."""

    indices: Sequence[int]
    """Indices in the data set."""
    sources: Sequence[tuple[str, int]]
    """(name, samples) of each source of the data set, one behind the other."""
    value_ranges: Mapping[str, ValueRange] = MappingProxyType({})
    """Ranges of the entries, measured where the batch was read: no step looks at the values again."""


class LoadedBatch(Batch):
    """A batch on its way to the model and the loss.

    Values are tensors (also in nested tuples, lists and dicts) or what else a data set gave, such as strings.

    Attributes:
        num_samples: None where it was not loaded.
        host: Where it was moved to a device: what it was on the host, so that a look at a value there waits
            for no device.
        reading: Its samples, where it was loaded.
    """

    num_samples: int | None = None
    host: Batch | None = None
    origin: BatchOrigin | None = None

    def copy_metadata_from(self, other: Mapping[str, Any]) -> LoadedBatch:
        """Return this batch, with what is known of the other."""
        for name in ("num_samples", "host", "origin"):
            setattr(self, name, getattr(other, name, None))
        return self

    def __missing__(self, key: str) -> Any:
        raise MissingEntryError(f"{key!r} was asked of a batch that has no such entry: {format_batch(self)}")


def get_host_batch(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch as it was before it went to a device, where that is known."""
    return getattr(batch, "host", None) or batch


def count_samples(batch: Mapping[str, Any]) -> int:
    """Return the number of samples: as it was loaded, or the length of its first tensor."""
    known = getattr(get_host_batch(batch), "num_samples", None)
    return known if known is not None else next((len(t) for t in iter_tensors(batch) if t.dim()), 1)


def map_tensors(batch: Mapping[str, Any], move: Callable[[str, Tensor], Tensor]) -> LoadedBatch:
    """Return the batch with `move(key, tensor)` for each tensor; it remembers the host's."""
    result = LoadedBatch(
        {
            key: move(key, value) if isinstance(value, Tensor) else _mapped(value, key, move)
            for key, value in batch.items()
        }
    )
    result.host = get_host_batch(batch)  # type: ignore[assignment]
    return result


def _mapped(value: Any, key: str, move: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return move(key, value)
    if isinstance(value, Mapping):
        return {name: _mapped(each, key, move) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(each, key, move) for each in value)
    return value


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            if isinstance(each, Tensor):
                yield each
            else:
                yield from iter_tensors(each)


def format_batch(batch: Mapping[str, Any]) -> str:
    """Return `inputs (8, 3) float32, names (list of str)`: entries of a batch, for a message."""
    parts = [f"{key} {describe_value(value)}" for key, value in list(batch.items())[:MAX_LISTED_ENTRIES]]
    return ", ".join(parts) + ", ..." * (len(batch) > MAX_LISTED_ENTRIES) or "nothing"


def describe_value(value: Any) -> str:
    """Return the shape and type of a tensor, or the type of anything else."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)) and value:
        return f"({type(value).__name__} of {type(value[0]).__name__})"
    return f"({type(value).__name__})"


def as_batch(collated: Any, samples: int | None = None) -> LoadedBatch:
    """Return a batch in the one form.

    Args:
        collated: A dict, or a tuple or list whose first entry is the model's (`inputs`, or the entries of a
            dict), whose second is the target (`targets`), and whose further ones are `field_2`, `field_3`
            ...; a named tuple keeps its names; a tensor or array is `inputs`.
        samples: How many samples it was made of.

    Raises:
        DataError: it is nothing of that, or empty.
    """
    if isinstance(collated, PackedSequence):
        raise DataError(_NO_PACKED)
    if isinstance(collated, Mapping):
        entries = dict(collated)
    elif isinstance(collated, tuple) and hasattr(collated, "_asdict"):
        entries = collated._asdict()
    elif isinstance(collated, (tuple, list)) and collated:
        entries = dict(zip(map(_name, range(len(collated))), collated, strict=True))
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
        {key: value if isinstance(value, Tensor) else _tensors_in(value) for key, value in entries.items()}
    )
    lengths = [len(tensor) for tensor in iter_tensors(batch) if tensor.dim()]
    if not lengths or 0 in lengths[:1]:
        raise DataError(
            f"a batch without a sample: {format_batch(batch)}; a collate that leaves samples out must keep at least "
            "one, and a data set must give tensors"
        )
    # A tensor may begin with another dimension, such as time; a collate may leave samples out.
    batch.num_samples = samples if samples in lengths else lengths[0]
    return batch


def raise_if_error(batch: Any) -> Batch:
    """Return a batch of a loader.

    Raises:
        PipelineError: the loader gave it in place of a batch.
    """
    if isinstance(batch, PipelineError):
        raise batch
    loaded: Batch = batch
    return loaded


_NO_PACKED = (
    "the batch holds a PackedSequence, which cannot be divided over devices; collate with pad_sequence, hand "
    "on the lengths, and let the model's forward call pack_padded_sequence"
)


def _name(place: int) -> str:
    return TUPLE_NAMES[place] if place < len(TUPLE_NAMES) else f"{FIELD_PREFIX}{place}"


def _tensors_in(value: Any) -> Any:
    """Return a value with tensors in place of arrays and numbers."""
    if isinstance(value, PackedSequence):
        raise DataError(_NO_PACKED)
    if isinstance(value, Mapping):
        return {key: _tensors_in(each) for key, each in value.items()}
    if _is_numeric(value):
        return _tensor_of(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {key: _tensors_in(each) for key, each in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_tensors_in(each) for each in value)
    return value


def _is_numeric(value: Any) -> bool:
    """Return whether it is a number, a tensor, an array of numbers, or lists of numbers of one length."""
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


def _tensor_of(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value) if value.flags.writeable else value.copy())
    return torch.as_tensor(np.array(value) if isinstance(value, np.generic) else value)


def stack_samples(samples: Sequence[Any], where: str = "samples") -> Any:
    """Make samples of one form a batch: tensors and numbers along a new first axis, others listed.

    Raises:
        DataError: they differ in form or shape, or are nothing of that; the message names both.
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
        raise DataError(f"{where} of one batch differ in type: {', '.join(kinds)}; give all the same form")
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
            raise DataError(_uneven(where, [len(sample) for sample in samples]))
        names: Sequence[str] = getattr(first, "_fields", [_name(place) for place in range(len(first))])
        pairs = zip(names, zip(*samples, strict=True), strict=True)
        columns = [stack_samples(column, f"{inside}{name}") for name, column in pairs]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if not all(forms):
        return list(samples)
    values = [_tensor_of(sample) for sample in samples]
    shapes = list(dict.fromkeys(tuple(value.shape) for value in values))
    if len(shapes) > 1:
        raise DataError(_uneven(where, shapes))
    return torch.stack(values)


def _is_sample(value: Any) -> bool:
    """Return whether it has entries, or is a tensor, an array of numbers or a number."""
    return len(value) > 0 if isinstance(value, (Mapping, tuple, list)) else _is_numeric(value)


def _uneven(where: str, shapes: list[Any]) -> str:
    return (
        f"{where} of one batch cannot be stacked: {' and '.join(map(str, shapes[:3]))}; make them equal, or "
        "give the data set a `collate_fn` that pads (docs/your-own-model.md)"
    )


INTEGER_TYPES = (torch.int64, torch.int32, torch.int16)  # uint8 is pixels, which nothing looks up
UNMEASURED = (
    "position_ids",
    "attention_mask",
    "segments",
    "segment_kinds",
)  # made by the data pipeline itself, or no indices


class BadValue(NamedTuple):
    """A number that is out of range."""

    value: int
    sample: str
    """` (sample 7 of wiki)`, or empty: not known."""


def describe_origin(
    batch: LoadedBatch, indices: Sequence[int], sources: Sequence[tuple[str, int]]
) -> BatchOrigin:
    """Return the samples of a batch with the ranges of its entries."""
    extents = {}
    for name, value in batch.items():
        if name in UNMEASURED or not isinstance(value, Tensor) or value.dtype not in INTEGER_TYPES:
            continue
        if value.device.type != "cpu" or not value.numel():
            continue
        values = value.numpy()  # torch would wake all its threads for a few kB
        lowest = counted = int(values.min())
        if lowest < 0:
            below = values[values < 0]
            counted = int(below[below != IGNORE_INDEX].min(initial=0))
        extents[name] = ValueRange(lowest, counted, int(values.max()))
    return BatchOrigin(indices, sources, extents)


def _is_looked_at(value: Any) -> bool:
    is_whole = isinstance(value, Tensor) and value.dtype in INTEGER_TYPES
    return is_whole and value.device.type == "cpu" and value.numel() > 0


def find_bad_value(
    batch: Mapping[str, Any], name: str, below: int, ignored: int | None = IGNORE_INDEX
) -> BadValue | None:
    """Return the first number of an entry that is not in [0, below), where there is one.

    Reads host memory alone, and only if the batch's known range does not fit.

    Args:
        ignored: Number that is allowed besides; `None` if there is none.
    """
    host = get_host_batch(batch)
    reading: BatchOrigin | None = getattr(host, "origin", None)
    extent = reading.value_ranges.get(name) if reading is not None else None
    if extent is not None:
        lowest = extent.lowest_counted if ignored == IGNORE_INDEX else extent.lowest
        if lowest >= 0 and extent.highest < below:
            return None
    value = host.get(name)
    if not isinstance(value, Tensor) or not _is_looked_at(value):
        return None
    values = value.numpy()
    wrong = (values < 0) | (values >= below)
    if ignored is not None:
        wrong &= values != ignored
    if not wrong.any():
        return None
    place = np.argwhere(wrong)[0].tolist()
    sample = ""
    # A collate may have made other rows.
    if reading is not None and (len(values) if values.ndim else 1) == len(reading.indices):
        source, own = locate_sample(reading.indices[place[0] if place else 0], reading.sources)
        sample = f" (sample {own} of {source})" if source else f" (sample {own})"
    return BadValue(int(values[tuple(place)]), sample)


def locate_sample(index: int, sources: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """Return the source of a sample, and its index there; an empty name: not known.

    Args:
        index: In the data set of all sources.
        sources: (name, samples) of what it consists of, one behind the other.
    """
    own = index
    for name, samples in sources:
        if own < samples:
            return name, own
        own -= samples
    return "", index


def collate_items(items: Any) -> Any:
    """Return a batch as it is (from a vectorised `__getitems__`), or samples of one shape stacked."""
    return stack_samples(items) if isinstance(items, list) and items else items
