"""Whether all ranks were given the same data set: a few samples of each, compared.

Data that is prepared here has a fingerprint of its content. Of a data set of the user's own only arguments
are known, and two machines may hold different files under the same path.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pipeline.data.bundle import DataBundle
from pipeline.data.random_numbers import own_random_numbers
from pipeline.distributed.process_group import Job
from pipeline.errors import DataError

log = logging.getLogger(__name__)

PLACES = 5  # samples of a data set that are read: the first, and others drawn by its length


def check_same_data(job: Job, data: DataBundle, *, is_custom: bool) -> None:
    """Whether every rank has rank 0's data. Collective.

    Args:
        is_custom: It is a data set of the user's own: some samples are read and compared, but for one that
            gives another sample each time it is read.

    Raises:
        DataError: a rank has other data (two machines with different files); on every rank.
    """
    if job.ranks.world_size == 1:
        return
    looks = look_at(data) if is_custom else []
    everyones = job.gather_object((platform.node(), data.fingerprint, looks))
    first_host, first_fingerprint, first_looks = everyones[0]
    for rank, (host, fingerprint, its) in enumerate(everyones):
        where = first_difference(first_looks, its)
        if where is None and fingerprint == first_fingerprint:
            continue
        draws = job.gather_object(is_custom and first_difference(looks, look_at(data)) is not None)
        if any(draws) and fingerprint == first_fingerprint:
            log.info("two reads of one sample differ: whether all ranks have the same data is not known")
            return
        raise DataError(
            f"rank {rank} on {host} prepared other data than rank 0 on {first_host} "
            f"({where or 'its content'} differs); give every machine the same files"
        )


class Look(NamedTuple):
    """One sample: what must be the same to the last bit, and what may differ by a machine's rounding."""

    where: str
    exact: str
    """Hash of structure, names, shapes, types, text and whole numbers."""
    moments: tuple[float, ...]
    """Mean and root mean square of each array of floating-point numbers or of 8-bit ones (decoded images)."""

    def is_like(self, other: Look) -> bool:
        return (
            self.exact == other.exact
            and len(self.moments) == len(other.moments)
            and np.allclose(self.moments, other.moments, rtol=1e-3, atol=1e-6, equal_nan=True)
        )


def look_at(data: DataBundle) -> list[Look]:
    """The sizes of all data sets, and samples of each: of the same places on every rank.

    What a sample draws from the generators of torch, numpy and Python is the same on every rank.
    """
    datasets: dict[str, Any] = {"train": data.train, **data.eval, **data.eval_sets}
    sizes = {name: len(dataset) for name, dataset in datasets.items()}
    looks = [Look("the number of samples", repr(sizes), ())]
    for name, dataset in datasets.items():
        size = sizes[name]
        drawn = np.random.default_rng(size).integers(size, size=PLACES - 1).tolist()
        for index in dict.fromkeys([0, *drawn]):
            with own_random_numbers(index):
                sample = dataset[index]
            exact, moments = hashlib.blake2b(digest_size=16), list[float]()
            _take(sample, exact, moments)
            looks.append(Look(f"sample {index} of {name!r}", exact.hexdigest(), tuple(moments)))
    return looks


def first_difference(ours: Sequence[Look], theirs: Sequence[Look]) -> str | None:
    """Where two ranks' looks part; None: they are of the same data."""
    if len(ours) != len(theirs):
        return ours[0].where
    return next((one.where for one, other in zip(ours, theirs, strict=True) if not one.is_like(other)), None)


def _take(value: Any, exact: Any, moments: list[float]) -> None:
    """Adds a part of a sample; of an object that is neither numbers, text nor a container, only its type."""
    if isinstance(value, Mapping):
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            exact.update(repr(key).encode())
            _take(item, exact, moments)
    elif isinstance(value, (str, bytes, int, type(None))):
        exact.update(repr(value).encode())
    elif isinstance(value, (list, tuple)):
        exact.update(f"{len(value)} items".encode())
        for item in value:
            _take(item, exact, moments)
    else:
        array = _array(value)
        exact.update(
            f"{type(value).__name__}{None if array is None else (array.shape, array.dtype)}".encode()
        )
        if array is None:
            return
        if array.dtype.kind == "f" or array.dtype == np.uint8:
            numbers = array.astype(np.float64)
            numbers = numbers[np.isfinite(numbers)]
            exact.update(f"{numbers.size} finite".encode())
            moments += [float(numbers.mean()), float(np.sqrt((numbers**2).mean()))] if numbers.size else []
        else:
            exact.update(np.ascontiguousarray(array).tobytes())


def _array(value: Any) -> Any:
    """As numpy sees it: a tensor, an image, a number; None where it sees nothing but an object."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # numpy has no bf16
    array = np.asarray(value)
    return None if array.dtype == object else array
