"""Files of weights from elsewhere: found behind a path, and read a tensor at a time.

Nothing in them is run: pickles are read by torch's restricted reader. What lies outside the folder that was
named is not read.
"""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from torch import Tensor

from pipeline.errors import ModelError, one_line
from pipeline.files import DESCRIPTION_LIMIT, inside, read_plain, weight_map

# In this order: as transformers looks for them.
IN_FOLDERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
DEEPSPEED = "*_model_states.pt"
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
    files: Sequence[Path]
    """Those whose content decides all values; empty where that is not known."""

    def read(self, name: str) -> Tensor:
        """The values, on the CPU, in the file's shape and dtype."""
        ...

    def close(self) -> None: ...


def refusal(path: Path, what: str, key: str = "model.weights") -> ModelError:
    return ModelError(f"{key}: {path} {what}")


def _checked(path: Path, there: list[str], expected: list[str] | None) -> list[str]:
    """The names to take from a file: those its index says, else all."""
    for name in expected or ():
        if name not in there:
            raise refusal(path, f"lacks {name!r}, which its index says it holds")
    return there if expected is None else expected


class Safetensors:
    """One file or several; values are mapped or read when asked for."""

    def __init__(self, files: dict[Path, list[str] | None], key: str = "model.weights"):
        self.files: Sequence[Path] = list(files)
        self._key = key
        entries: dict[str, Entry] = {}
        self._places: dict[str, tuple[Path, Any]] = {}
        self._stack = ExitStack()
        for path, expected in files.items():
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
                for name in _checked(path, list(file.keys()), expected):
                    about = file.get_slice(name)
                    dtype = about.get_dtype()
                    entries[name] = Entry(tuple(about.get_shape()), _TYPES.get(dtype, dtype))
                    self._places[name] = path, file
            except (SafetensorError, OSError) as error:
                what = f"cannot be read as safetensors: {_first_sentence(error)}"
                raise refusal(path, what, key) from None
        self.entries: Mapping[str, Entry] = entries

    def read(self, name: str) -> Tensor:
        path, file = self._places[name]
        try:
            values: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise refusal(path, f"cannot be read: {name}: {_first_sentence(error)}", self._key) from None
        return values

    def close(self) -> None:
        self._stack.close()


class Pickles:
    """Mapped, not read, where the file is of the kind that torch writes since 1.6."""

    def __init__(self, files: dict[Path, list[str] | None]):
        self.files: Sequence[Path] = list(files)
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


OpenCheckpoint = Callable[[Path], WeightFile | None]
"""Opens a folder that holds a checkpoint of ours; None: it is none."""


def open_weights(path: Path, open_checkpoint: OpenCheckpoint) -> WeightFile:
    """A file, a folder of them, a run directory (its newest checkpoint that verifies) or a checkpoint.

    Raises:
        ModelError: there is none, it cannot be read, or something in it would have to be run.
    """
    if path.is_dir():
        return open_checkpoint(path) or _open_folder(path)
    if not path.exists():
        raise refusal(path, "does not exist")
    if path.match(DEEPSPEED):
        raise _of_deepspeed(path, path.parent)
    return _open_files({path: None})


def open_hub(name: str) -> WeightFile:
    """The safetensors of a hub repository that this machine has fetched.

    Raises:
        ModelError: it has not.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.safetensors"], local_files_only=True))
    except Exception as error:  # of the hub's client, a dozen kinds
        raise ModelError(f"{name} is not in the hub's cache here: {_first_sentence(error)}") from None
    _refuse_quantised(folder)
    files = sorted(folder.glob("*.safetensors"))  # links into the cache's own folder of blobs
    if not files:
        raise ModelError(f"{name} has no safetensors in the hub's cache here")
    return Safetensors(dict.fromkeys(files))


def tokenizer_beside(path: Path) -> Path | None:
    """The tokenizer.json of these weights: in their folder, or in the run they are of; None: neither has."""
    folder = path if path.is_dir() else path.parent
    places = (folder, folder / "model", folder.parent.parent / "model")  # the last of a checkpoint
    files = (place / "tokenizer.json" for place in places)
    return next((file for file in files if file.is_file()), None)


def _open_folder(folder: Path) -> WeightFile:
    _refuse_quantised(folder)
    for name in IN_FOLDERS:
        if (folder / name).exists():
            is_index = name.endswith(".json")
            return _open_files(_listed(folder, name) if is_index else {_inside(folder, name): None})
    if (folder / "checkpoints").is_dir():
        raise refusal(folder, "is a run directory without a checkpoint")
    if any(folder.glob(DEEPSPEED)) or any(folder.glob(f"*/{DEEPSPEED}")):
        raise _of_deepspeed(folder, folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return _open_files({_inside(folder, found[0]): None})
    many = f"; it has {', '.join(found[:3])}{' ...' * (len(found) > 3)}: name one of them" if found else ""
    expected = f"{', '.join(IN_FOLDERS)}, or a run directory"
    raise refusal(folder, f"holds no weights: expected {expected}{many}")


def _refuse_quantised(folder: Path) -> None:
    try:
        config = json.loads(read_plain(folder / "config.json", DESCRIPTION_LIMIT))
        given = config.get("quantization_config")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if given:
        raise refusal(
            folder, f"holds weights that are quantised already ({method_of(given)}); take the original ones"
        )


def method_of(given: Any) -> str:
    """Of a quantization_config, in a word."""
    return str(given.get("quant_method") if isinstance(given, dict) else given)[:50]


def _of_deepspeed(path: Path, folder: Path) -> ModelError:
    what = "is part of" if path != folder else "is"
    return refusal(
        path,
        f"{what} a checkpoint of DeepSpeed's own; run `python zero_to_fp32.py . OUT --safe_serialization` "
        "where its zero_to_fp32.py lies, and give OUT",
    )


def _inside(folder: Path, name: str) -> Path:
    """The file of that name, which must lie in the folder: names and links may lead anywhere."""
    path = inside(folder, name)
    if path is None:
        raise refusal(folder, f"points outside of itself: {name[:100]!r}")
    try:
        is_there = path.is_file()
    except (OSError, ValueError):  # a name that cannot be
        is_there = False
    if not is_there:
        raise refusal(folder, f"has no file {name[:100]!r}")
    return path


def _listed(folder: Path, index: str) -> dict[Path, list[str] | None]:
    """file -> the names of its tensors, of an index of several files."""
    try:
        places = weight_map(_inside(folder, index))
    except (OSError, ValueError):
        raise refusal(folder / index, "cannot be read as an index of weights") from None
    files = {place: _inside(folder, place) for place in dict.fromkeys(places.values())}
    listed: dict[Path, list[str] | None] = {}
    for name, place in places.items():
        listed.setdefault(files[place], []).append(name)  # type: ignore[union-attr]
    return listed


def _open_files(files: dict[Path, list[str] | None]) -> WeightFile:
    suffixes = {path.suffix for path in files}
    for path in files:
        if not path.is_file():
            raise refusal(path, "is no file")
    if suffixes == {".safetensors"}:
        return Safetensors(files)
    if suffixes <= set(PICKLES):
        return Pickles(files)
    raise refusal(next(iter(files)), f"cannot be read; expected .safetensors, {', '.join(PICKLES)}")
