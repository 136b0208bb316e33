"""A rank's micro-batches on its device, copied while the step before is computed; and the data's cursor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.data.batches import Batch, moved, tensors
from pipeline.data.loader import TrainLoader
from pipeline.data.mixture import SourceCounts


class DevicePrefetcher:
    """A TrainLoader whose batches are on the device.

    `fetch_ahead`, called once a step is on its way, reads the next group and copies it on a stream of its
    own, so that neither is waited for. There is no thread: what is read in this process shares Python with
    the step, and worker processes read ahead by themselves.

    On a CPU nothing is fetched ahead: the step has been computed when `fetch_ahead` is called, so it would be
    the same work a little earlier, and a data set of one's own would see a group that is then thrown away.
    When a group is read does not change what is in it: see Fetch.

    Args:
        loader: Pins its batches where `device` is a GPU.
        device: Of this rank.
        is_ahead: Whether to fetch ahead; by default on anything but a CPU.
    """

    def __init__(self, loader: TrainLoader, device: torch.device, is_ahead: bool | None = None) -> None:
        self._loader = loader
        self._device = device
        self._is_ahead = device.type != "cpu" if is_ahead is None else is_ahead
        self._streams: Any = getattr(torch, device.type)  # torch.cuda; torch.cpu has streams that do nothing
        self._stream = self._streams.Stream() if self._is_ahead else None
        self._ahead: list[Batch] | None = None
        self._samples_seen = 0
        self._counts = SourceCounts(loader.order)

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self._loader.global_batch_size

    @property
    def samples_per_epoch(self) -> int:
        return self._loader.order.samples_per_epoch

    @property
    def samples_seen(self) -> int:
        """Samples of the steps handed out so far, over all ranks."""
        return self._samples_seen

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._samples_seen / self.samples_per_epoch

    def source_samples(self) -> dict[str, int]:
        """Samples handed out so far, over all ranks, by source. The same on every rank; not collective."""
        return self._counts.up_to(self._samples_seen)

    def next_group(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step, on the device."""
        if self._is_ahead:
            self.fetch_ahead()
            group = self._take()
        else:
            group = self._loader.next_group()
        self._samples_seen += self.global_batch_size
        return group

    def fetch_ahead(self) -> None:
        """Starts to bring the next group to the device; waits for the loader, not for the device."""
        if not self._is_ahead or self._ahead is not None:
            return
        group = self._loader.next_group()
        with self._streams.stream(self._stream):
            self._ahead = [
                moved(batch, lambda _, tensor: tensor.to(self._device, non_blocking=True)) for batch in group
            ]

    def _take(self) -> list[Batch]:
        group, self._ahead = self._ahead, None
        assert group is not None
        current = self._streams.current_stream()
        current.wait_stream(self._stream)  # the device waits, not the host
        for tensor in (tensor for tensor in tensors(group) if tensor.is_cuda):
            tensor.record_stream(current)  # else the copying stream, whose memory it is, reuses it too early
        return group

    def state_dict(self) -> dict[str, Any]:
        """Where the data is: what was handed out, not what was fetched ahead."""
        return {"samples_seen": self._samples_seen, "source_samples": self.source_samples()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`, also one of another number of ranks or another batch size.

        `source_samples` may be missing: checkpoints of an earlier version have none.
        """
        self.seek(int(state["samples_seen"]))
        self._counts.seek(self._samples_seen, state.get("source_samples"))

    def seek(self, samples_seen: int) -> None:
        """Go on as if `samples_seen` samples had been handed out; what was fetched ahead is dropped."""
        self._ahead = None
        self._loader.seek(samples_seen)
        self._samples_seen = samples_seen
        self._counts.seek(samples_seen, None)

    def close(self) -> None:
        """Ends the workers and drops what was fetched ahead, to be fetched again if there is a next group."""
        self._ahead = None
        self._loader.seek(self._samples_seen)
