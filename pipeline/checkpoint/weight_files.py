"""Kinds of files that weights come in, behind one interface: shapes by name, values a tensor at a time.

Nothing in them is run: pickles are read by torch's restricted reader.
"""

from __future__ import annotations

import math
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.checkpoint.export import weights_of
from pipeline.checkpoint.layout import DTYPES
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.errors import ModelError, one_line
from pipeline.shards import Region

PICKLES = (".pt", ".pth", ".bin")
# Under these a training program keeps the model beside its optimizer.
ENVELOPES = ("state_dict", "model_state_dict", "model", "module")


class Entry(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    """In words where it is none that a model here could have."""


class WeightFile(Protocol):
    """Weights by name."""

    entries: Mapping[str, Entry]

    def read(self, name: str) -> Tensor:
        """The values, on the CPU, in the file's shape and dtype."""
        ...

    def close(self) -> None: ...


def refusal(path: Path, what: str) -> ModelError:
    return ModelError(f"model.weights: {path} {what}")


class OwnCheckpoint:
    """One of our own."""

    def __init__(self, reader: CheckpointReader):
        self._reader = reader
        self._kinds = {name: kind for name, (kind, _, _) in weights_of(reader.manifest).items()}
        self.entries: Mapping[str, Entry] = {
            name: Entry(shape, dtype) for name, (_, shape, dtype) in weights_of(reader.manifest).items()
        }

    def read(self, name: str) -> Tensor:
        shape, dtype = self.entries[name]
        assert isinstance(dtype, torch.dtype)
        values = torch.empty(math.prod(shape), dtype=dtype)
        self._reader.read(name, self._kinds[name], Region(shape, None, 0, len(values)), values)
        return values.view(shape)

    def close(self) -> None:
        self._reader.close()


def _checked(path: Path, there: list[str], expected: list[str] | None) -> list[str]:
    """The names to take from a file: those its index says, else all."""
    for name in expected or ():
        if name not in there:
            raise refusal(path, f"lacks {name!r}, which its index says it holds")
    return there if expected is None else expected


class Safetensors:
    """One file or several; values are mapped or read when asked for."""

    def __init__(self, files: dict[Path, list[str] | None]):
        entries: dict[str, Entry] = {}
        self._places: dict[str, tuple[Path, Any]] = {}
        self._stack = ExitStack()
        for path, expected in files.items():
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
                for name in _checked(path, list(file.keys()), expected):
                    about = file.get_slice(name)
                    dtype = about.get_dtype()
                    entries[name] = Entry(tuple(about.get_shape()), DTYPES.get(dtype, dtype))
                    self._places[name] = path, file
            except (SafetensorError, OSError) as error:
                raise refusal(path, f"cannot be read as safetensors: {_first_sentence(error)}") from None
        self.entries: Mapping[str, Entry] = entries

    def read(self, name: str) -> Tensor:
        path, file = self._places[name]
        try:
            values: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise refusal(path, f"cannot be read: {name}: {_first_sentence(error)}") from None
        return values

    def close(self) -> None:
        self._stack.close()


class Pickles:
    """Mapped, not read, where the file is of the kind that torch writes since 1.6."""

    def __init__(self, files: dict[Path, list[str] | None]):
        self._tensors: dict[str, Tensor] = {}
        for path, expected in files.items():
            found = _tensors_of(_unpickled(path), path)
            self._tensors |= {name: found[name] for name in _checked(path, list(found), expected)}
        self.entries: Mapping[str, Entry] = {
            name: Entry(tuple(t.shape), _dtype(t)) for name, t in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors.clear()


def _dtype(tensor: Tensor) -> torch.dtype | str:
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    return tensor.dtype if is_plain else f"{tensor.layout} on {tensor.device.type}".removeprefix("torch.")


def _unpickled(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of formats that the restricted reader may not know
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a file from elsewhere may make its reader raise anything
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            raise refusal(
                path,
                f"holds {refused[1][:100]}, which would have to be run as code and is not; save "
                "model.state_dict() instead of the model, or safetensors",
            ) from None
        raise refusal(path, f"cannot be read as weights: {_first_sentence(error)}") from None


def _tensors_of(content: Any, path: Path) -> dict[str, Tensor]:
    found = list(_state_dicts(content, 3))
    if len(found) == 1:
        return found[0][1]
    if not found:
        raise refusal(path, "holds no tensors by name: expected a state dict")
    places = ", ".join(place for place, _ in found)
    raise refusal(path, f"holds several models ({places}); save the one that is meant alone")


def _state_dicts(content: Any, depth: int, place: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(where, tensors by name): those in envelopes; only where there are none, the tensors here."""
    if not isinstance(content, dict) or depth < 0:
        return
    inner = [
        each
        for key in ENVELOPES
        for each in _state_dicts(content.get(key), depth - 1, f"{place}.{key}".strip("."))
    ]
    own = {key: t for key, t in content.items() if isinstance(key, str) and isinstance(t, Tensor)}
    if inner:
        yield from inner
    elif own:
        yield place, own


def _first_sentence(error: Exception) -> str:
    """The first sentence that says something of the file."""
    return one_line(error, 10_000).split("WeightsUnpickler error: ")[-1].split(". ")[0][:200]
