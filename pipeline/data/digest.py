"""Compares the data sets of all ranks by a few samples of each.

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
from pipeline.data.random_numbers import isolate_random_numbers
from pipeline.distributed.process_group import Job
from pipeline.errors import DataError

log = logging.getLogger(__name__)

SAMPLES_COMPARED = 5  # samples of a data set that are read: the first, and others drawn by its length


def check_same_data(job: Job, data: DataBundle, *, is_custom: bool) -> None:
    """Check that every rank has rank 0's data. Collective.

    Args:
        is_custom: It is a data set of the user's own: some samples are read and compared, but for one that
            gives another sample each time it is read.

    Raises:
        DataError: a rank has other data (two machines with different files); on every rank.
    """
    if job.ranks.world_size == 1:
        return
    looks = digest_samples(data) if is_custom else []
    everyones = job.gather_object((platform.node(), data.fingerprint, looks))
    first_host, first_fingerprint, first_looks = everyones[0]
    for rank, (host, fingerprint, its) in enumerate(everyones):
        where = find_first_difference(first_looks, its)
        if where is None and fingerprint == first_fingerprint:
            continue
        draws = job.gather_object(
            is_custom and find_first_difference(looks, digest_samples(data)) is not None
        )
        if any(draws) and fingerprint == first_fingerprint:
            log.info("two reads of one sample differ: whether all ranks have the same data is not known")
            return
        raise DataError(
            f"rank {rank} on {host} prepared other data than rank 0 on {first_host} "
            f"({where or 'its content'} differs); give every machine the same files"
        )


class SampleDigest(NamedTuple):
    """One sample: a hash of what must be equal, and numbers that may differ by a machine's rounding."""

    where: str
    exact: str
    moments: tuple[float, ...]
    """Mean and root mean square of each array of floating-point numbers or of 8-bit ones (decoded images)."""


def digest_samples(data: DataBundle) -> list[SampleDigest]:
    """Return the sizes of all data sets, and samples of each: of the same places on every rank.

    Numbers that a sample draws from the generators of torch, numpy and Python are the same on every rank.
    """
    datasets: dict[str, Any] = {"train": data.train, **data.eval, **data.eval_sets}
    sizes = {name: len(dataset) for name, dataset in datasets.items()}
    looks = [SampleDigest("the number of samples", repr(sizes), ())]
    for name, dataset in datasets.items():
        drawn = np.random.default_rng(sizes[name]).integers(sizes[name], size=SAMPLES_COMPARED - 1).tolist()
        for index in dict.fromkeys([0, *drawn]):
            with isolate_random_numbers(index):
                exact, moments = _look(dataset[index])
            digest = hashlib.blake2b(repr(exact).encode(), digest_size=16).hexdigest()
            looks.append(SampleDigest(f"sample {index} of {name!r}", digest, tuple(moments)))
    return looks


def find_first_difference(ours: Sequence[SampleDigest], theirs: Sequence[SampleDigest]) -> str | None:
    """Return where the looks of two ranks differ first; `None`: they are of the same data."""
    for one, other in zip(ours, theirs, strict=False):
        if one.exact != other.exact or len(one.moments) != len(other.moments):
            return one.where
        if not np.allclose(one.moments, other.moments, rtol=1e-3, atol=1e-6, equal_nan=True):
            return one.where
    return None


def _look(value: Any) -> tuple[Any, list[float]]:
    """Return what must be equal of a part of a sample, and moments; of an unknown object only its type."""
    if isinstance(value, (str, bytes, int, type(None))):
        return value, []
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=lambda pair: repr(pair[0]))
    if isinstance(value, (list, tuple)):
        inside = [_look(each) for each in value]
        return [exact for exact, _ in inside], [moment for _, moments in inside for moment in moments]
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # numpy has no bf16
    array = np.asarray(value)
    if array.dtype == object:
        return type(value).__name__, []
    form = (type(value).__name__, array.shape, str(array.dtype))
    if array.dtype.kind != "f" and array.dtype != np.uint8:
        return (form, array.tobytes()), []
    numbers = array.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    moments = [float(numbers.mean()), float(np.sqrt((numbers**2).mean()))] if numbers.size else []
    return (form, numbers.size), moments
