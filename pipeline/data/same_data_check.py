"""Compares the data sets of all ranks by a few samples of each.

Data that this package prepares has a fingerprint of its content. A custom data set has a fingerprint of its
function and its size alone, and two machines may have different files under the same path. So some samples of
it are compared.
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

SAMPLES_COMPARED = 5  # samples of a data set that are read: the first one, and random ones


def check_same_data(job: Job, data: DataBundle, *, is_custom: bool) -> None:
    """Check that every rank has the same data as rank 0. Collective.

    Args:
        job: The ranks to compare.
        data: Data of this rank.
        is_custom: Whether the data sets are the user's own. Then some samples are read and compared. If a
            sample differs each time it is read, this is logged, and only a different fingerprint is an error.

    Raises:
        DataError: A rank has other data, such as from a machine with different files; raised on every rank.
    """
    if job.ranks.world_size == 1:
        return
    digests = digest_samples(data) if is_custom else []
    gathered = job.gather_object((platform.node(), data.fingerprint, digests))
    first_host, first_fingerprint, first_digests = gathered[0]
    # All ranks find the same difference, so all of them take part in the second gather_object.
    for rank, (host, fingerprint, digests_of_rank) in enumerate(gathered):
        difference = find_first_difference(first_digests, digests_of_rank)
        if difference is None and fingerprint == first_fingerprint:
            continue
        is_unstable = is_custom and find_first_difference(digests, digest_samples(data)) is not None
        any_unstable = any(job.gather_object(is_unstable))
        if any_unstable and fingerprint == first_fingerprint:
            log.info("two reads of one sample differ: whether all ranks have the same data cannot be checked")
            return
        raise DataError(
            f"rank {rank} on {host} prepared other data than rank 0 on {first_host} "
            f"({difference or 'its content'} differs); give every machine the same files"
        )


class SampleDigest(NamedTuple):
    """Digest of one sample, or of the sizes of all data sets."""

    name: str
    """Name for messages, such as `sample 3 of 'train'`."""
    exact: str
    """Hash of the values that must be equal, 32 hexadecimal digits; for all data sets, their sizes."""
    moments: tuple[float, ...]
    """Mean and root mean square of each floating-point or 8-bit array, which may differ by rounding errors;
    decoded images are 8-bit."""


def digest_samples(data: DataBundle) -> list[SampleDigest]:
    """Return digests of the sizes of all data sets and of some samples, at the same indices on every rank.

    Random numbers that a data set draws from torch, numpy and Python are the same on every rank. The states
    of the generators are restored afterwards.
    """
    datasets: dict[str, Any] = {"train": data.train, **data.eval, **data.eval_sets}
    sizes = {name: len(dataset) for name, dataset in datasets.items()}
    digests = [SampleDigest("the number of samples", repr(sizes), ())]
    for name, dataset in datasets.items():
        generator = np.random.default_rng(seed=sizes[name])  # the same indices on every rank
        random_indices = generator.integers(sizes[name], size=SAMPLES_COMPARED - 1).tolist()
        for index in dict.fromkeys([0, *random_indices]):
            with isolate_random_numbers(index):
                exact, moments = _summarize(dataset[index])
            digest = hashlib.blake2b(repr(exact).encode(), digest_size=16).hexdigest()
            digests.append(SampleDigest(f"sample {index} of {name!r}", digest, tuple(moments)))
    return digests


def find_first_difference(ours: Sequence[SampleDigest], theirs: Sequence[SampleDigest]) -> str | None:
    """Return the name of the first digest in which two ranks differ; `None` if all are equal."""
    for one, other in zip(ours, theirs, strict=False):
        if one.exact != other.exact or len(one.moments) != len(other.moments):
            return one.name
        if not np.allclose(one.moments, other.moments, rtol=1e-3, atol=1e-6, equal_nan=True):
            return one.name
    return None


def _summarize(value: Any) -> tuple[Any, list[float]]:
    """Return the values of a nested value that must be equal, and the moments of the others.

    Moments are taken of floating-point and 8-bit arrays; of these, only shape, dtype and the number of finite
    values must be equal. An object of unknown type is represented by the name of the type.
    """
    if isinstance(value, (str, bytes, int, type(None))):
        return value, []
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=lambda pair: repr(pair[0]))
    if isinstance(value, (list, tuple)):
        inside = [_summarize(each) for each in value]
        return [exact for exact, _ in inside], [moment for _, moments in inside for moment in moments]
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value  # numpy does not support bf16
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
