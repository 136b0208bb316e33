"""A new run's weights from elsewhere: the files, found behind a path, and which tensor goes where.

Rank 0 reads, one tensor at a time; every rank ends up with its values, whole or in ZeRO-3's shards. Nothing
in the files is run: pickles are read by torch's restricted reader. What lies outside the folder that was
named is not read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES
from tokenizers import Tokenizer
from torch import Tensor, nn

from pipeline.config.model_schema import ModelSection
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, phase
from pipeline.errors import ModelError, format_names, summarize_error
from pipeline.files import DESCRIPTION_LIMIT, path_inside, read_regular_file, read_weight_map
from pipeline.models.embeddings import fill_rows, find_vocabulary_parameters
from pipeline.models.sharding import Sharding

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


class TensorEntry(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    """In words where it is none that a model here could have."""


class WeightFile(Protocol):
    """Weights by name."""

    entries: Mapping[str, TensorEntry]
    files: Sequence[Path]
    """Those whose content decides all values; empty where that is not known."""

    def read(self, name: str) -> Tensor:
        """Return the values, on the CPU, in the file's shape and dtype."""
        ...

    def close(self) -> None: ...


def weights_error(path: Path, what: str, key: str = "model.weights") -> ModelError:
    return ModelError(f"{key}: {path} {what}")


def _checked(path: Path, there: list[str], expected: list[str] | None) -> list[str]:
    """Return the names to take from a file: those its index says, else all."""
    for name in expected or ():
        if name not in there:
            raise weights_error(path, f"lacks {name!r}, which its index says it holds")
    return there if expected is None else expected


class SafetensorsFiles:
    """One file or several; values are mapped or read when asked for."""

    def __init__(self, files: dict[Path, list[str] | None], key: str = "model.weights"):
        self.files: Sequence[Path] = list(files)
        self._key = key
        entries: dict[str, TensorEntry] = {}
        self._places: dict[str, tuple[Path, Any]] = {}
        self._stack = ExitStack()
        for path, expected in files.items():
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
                for name in _checked(path, list(file.keys()), expected):
                    about = file.get_slice(name)
                    dtype = about.get_dtype()
                    entries[name] = TensorEntry(tuple(about.get_shape()), _TYPES.get(dtype, dtype))
                    self._places[name] = path, file
            except (SafetensorError, OSError) as error:
                what = f"cannot be read as safetensors: {_first_sentence(error)}"
                raise weights_error(path, what, key) from None
        self.entries: Mapping[str, TensorEntry] = entries

    def read(self, name: str) -> Tensor:
        path, file = self._places[name]
        try:
            values: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise weights_error(
                path, f"cannot be read: {name}: {_first_sentence(error)}", self._key
            ) from None
        return values

    def close(self) -> None:
        self._stack.close()


class PickledFiles:
    """Mapped, not read, where the file is of the kind that torch writes since 1.6."""

    def __init__(self, files: dict[Path, list[str] | None]):
        self.files: Sequence[Path] = list(files)
        self._tensors: dict[str, Tensor] = {}
        for path, expected in files.items():
            found = _tensors_of(_unpickled(path), path)
            self._tensors |= {name: found[name] for name in _checked(path, list(found), expected)}
        self.entries: Mapping[str, TensorEntry] = {
            name: TensorEntry(tuple(t.shape), _dtype(t)) for name, t in self._tensors.items()
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
            raise weights_error(
                path,
                f"holds {refused[1][:100]}, which would have to be run as code and is not; save "
                "model.state_dict() instead of the model, or safetensors",
            ) from None
        raise weights_error(path, f"cannot be read as weights: {_first_sentence(error)}") from None


def _tensors_of(content: Any, path: Path) -> dict[str, Tensor]:
    found = list(_state_dicts(content, 3))
    if len(found) == 1:
        return found[0][1]
    if not found:
        raise weights_error(path, "holds no tensors by name: expected a state dict")
    places = ", ".join(place for place, _ in found)
    raise weights_error(path, f"holds several models ({places}); save the one that is meant alone")


def _state_dicts(content: Any, depth: int, place: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (where, tensors by name): those in envelopes; only if there are none, the tensors here."""
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
    """Return the first sentence that says something of the file."""
    return summarize_error(error, 10_000).split("WeightsUnpickler error: ")[-1].split(". ")[0][:200]


OpenCheckpoint = Callable[[Path], WeightFile | None]
"""Opens a folder that holds a checkpoint of ours; None: it is none."""


def open_weights(path: Path, open_checkpoint: OpenCheckpoint) -> WeightFile:
    """Open a file, a folder of them, a run directory (its newest whole checkpoint) or a checkpoint.

    Raises:
        ModelError: there is none, it cannot be read, or something in it would have to be run.
    """
    if path.is_dir():
        return open_checkpoint(path) or _open_folder(path)
    if not path.exists():
        raise weights_error(path, "does not exist")
    if path.match(DEEPSPEED):
        raise _of_deepspeed(path, path.parent)
    return _open_files({path: None})


def open_hub(name: str) -> WeightFile:
    """Open the safetensors of a hub repository that this machine has fetched.

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
    return SafetensorsFiles(dict.fromkeys(files))


def tokenizer_beside(path: Path) -> Path | None:
    """Return the tokenizer.json of these weights: in their folder, or in their run; `None`: in neither."""
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
        raise weights_error(folder, "is a run directory without a checkpoint")
    if any(folder.glob(DEEPSPEED)) or any(folder.glob(f"*/{DEEPSPEED}")):
        raise _of_deepspeed(folder, folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return _open_files({_inside(folder, found[0]): None})
    many = f"; it has {', '.join(found[:3])}{' ...' * (len(found) > 3)}: name one of them" if found else ""
    expected = f"{', '.join(IN_FOLDERS)}, or a run directory"
    raise weights_error(folder, f"holds no weights: expected {expected}{many}")


def _refuse_quantised(folder: Path) -> None:
    try:
        config = json.loads(read_regular_file(folder / "config.json", DESCRIPTION_LIMIT))
        given = config.get("quantization_config")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if given:
        raise weights_error(
            folder,
            f"holds weights that are quantised already ({get_quantisation_method(given)}); take the original ones",
        )


def get_quantisation_method(given: Any) -> str:
    """Return the method of a quantization_config, in a word."""
    return str(given.get("quant_method") if isinstance(given, dict) else given)[:50]


def _of_deepspeed(path: Path, folder: Path) -> ModelError:
    what = "is part of" if path != folder else "is"
    return weights_error(
        path,
        f"{what} a checkpoint of DeepSpeed's own; run `python zero_to_fp32.py . OUT --safe_serialization` "
        "where its zero_to_fp32.py lies, and give OUT",
    )


def _inside(folder: Path, name: str) -> Path:
    """Return the file of that name, which must be in the folder: names and links may lead anywhere."""
    path = path_inside(folder, name)
    if path is None:
        raise weights_error(folder, f"points outside of itself: {name[:100]!r}")
    try:
        is_there = path.is_file()
    except (OSError, ValueError):  # a name that cannot be
        is_there = False
    if not is_there:
        raise weights_error(folder, f"has no file {name[:100]!r}")
    return path


def _listed(folder: Path, index: str) -> dict[Path, list[str] | None]:
    """file -> the names of its tensors, of an index of several files."""
    try:
        places = read_weight_map(_inside(folder, index))
    except (OSError, ValueError):
        raise weights_error(folder / index, "cannot be read as an index of weights") from None
    files = {place: _inside(folder, place) for place in dict.fromkeys(places.values())}
    listed: dict[Path, list[str] | None] = {}
    for name, place in places.items():
        listed.setdefault(files[place], []).append(name)  # type: ignore[union-attr]
    return listed


def _open_files(files: dict[Path, list[str] | None]) -> WeightFile:
    suffixes = {path.suffix for path in files}
    for path in files:
        if not path.is_file():
            raise weights_error(path, "is no file")
    if suffixes == {".safetensors"}:
        return SafetensorsFiles(files)
    if suffixes <= set(PICKLES):
        return PickledFiles(files)
    raise weights_error(next(iter(files)), f"cannot be read; expected .safetensors, {', '.join(PICKLES)}")


log = logging.getLogger(__name__)

# What DistributedDataParallel, torch.compile, DeepSpeed, FSDP and activation checkpointing put between names.
WRAPPERS = {"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class LoadPlan:
    """What is loaded, and what does not fit."""

    moves: list[tuple[str, str]] = field(default_factory=list)
    """(name in the model, name in the files); of tied weights one."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    """With both shapes, in words."""
    grown: list[str] = field(default_factory=list)
    """Names in the model of what gets rows that the files lack."""
    drawn: list[str] = field(default_factory=list)
    """Those of what such files need not have."""

    def remarks(self) -> str:
        """Return what does not fit, in one line; empty: everything fits."""
        kinds = ("missing", self.missing), ("unexpected", self.unexpected), ("mismatched", self.mismatched)
        return "; ".join(f"{kind}: {format_names(names)}" for kind, names in kinds if names)


@phase(Phase.WEIGHTS)
def load_weights(
    model: nn.Module,
    config: ModelSection,
    sharding: Sharding,
    job: Job,
    open_checkpoint: OpenCheckpoint,
    new_ids: Mapping[str, int] | None = None,
) -> None:
    """Fill the model, whole or in shards, from `config.weights`. Collective.

    Host memory beside the model: the largest tensor, on rank 0 also in the dtype of the file.

    Args:
        open_checkpoint: pipeline.checkpoint.initial_weights has it.
        new_ids: Token -> id of a tokenizer that was trained for this run, in which nobody named one.

    Raises:
        ModelError: nothing can be read from there, or it does not fit and `config.strict` is set; the weights
            were trained with other ids.
    """
    assert config.weights is not None
    targets = collect_tensors(model)
    path = Path(os.path.expanduser(config.weights))
    with ExitStack() as opened:
        sources: list[WeightFile] = []  # of rank 0

        def planned() -> LoadPlan:
            sources.append(opened.enter_context(closing(open_weights(path, open_checkpoint))))
            if new_ids is not None:
                _refuse_other_ids(path, new_ids)
            found = plan_load(model, targets, sources[0], config)
            _refuse(found, path, config)
            return found

        answer = job.on_main(planned)
        for name, key in answer.moves:
            fill_tensor(targets[name], sources[0].read(key) if sources else None, sharding, job)
        for name in answer.drawn:
            draw_parameter(model, name, sharding)
        for name in answer.grown:
            targets[name].has_new_rows = True  # type: ignore[attr-defined] # an adapter leaves it trained
    if job.ranks.is_main_process:
        log.info("%d tensors are from %s", len(answer.moves), path)
        if remarks := answer.remarks():
            log.warning("model.strict is off, so this stays as it was drawn or is left out: %s", remarks)


def _refuse_other_ids(path: Path, new_ids: Mapping[str, int]) -> None:
    """Refuse weights of another tokenizer: rows of their embedding are those of other words."""
    file = tokenizer_beside(path)
    if file is None:
        log.warning(
            "model.weights: nothing beside %s says which tokenizer they were trained with, and the one that "
            "was trained on this data has ids of its own; data.tokenizer.pretrained names the right one",
            path,
        )
        return
    try:
        ids = Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"model.weights: {file} is no tokenizer: {summarize_error(error)}") from None
    if any(new_ids.get(token) != number for token, number in ids.items()):
        raise ModelError(
            f"model.weights: {path} was trained with another tokenizer than the one that was trained on this "
            f"data; use its own: data.tokenizer.pretrained={file}"
        )


def _refuse(found: LoadPlan, path: Path, config: ModelSection) -> None:
    if not found.moves:
        raise ModelError(f"model.weights: nothing in {path} fits the model; {found.remarks()}")
    if config.strict and (remarks := found.remarks()):
        raise ModelError(
            f"model.weights: {path} does not fit the model; {remarks}; model.strict=false loads what fits"
        )


def collect_tensors(model: nn.Module) -> dict[str, Tensor]:
    """name -> parameter or buffer, as a state dict names them; tied ones under each of their names."""
    state = model.state_dict(keep_vars=True)
    return {name: target for name, target in state.items() if isinstance(target, Tensor)}


def plan_load(
    model: nn.Module, targets: Mapping[str, Tensor], source: WeightFile, config: ModelSection
) -> LoadPlan:
    """Return which tensor of the files goes where, and what does not fit."""
    base = str(getattr(model, "base_model_prefix", ""))
    keys = match_names(list(source.entries), targets, base)
    vocabulary = {id(p) for p in find_vocabulary_parameters(model)}
    if config.grow_vocabulary and not vocabulary:
        raise ModelError(
            f"model.grow_vocabulary: a {type(model).__name__} has no get_input_embeddings() that says which "
            "parameter has a row for each token"
        )
    result = LoadPlan()
    tied: dict[int, list[str]] = {}
    for name, target in targets.items():
        tied.setdefault(id(target), []).append(name)
    for names in tied.values():
        there = [name for name in names if name in keys]
        if not there:
            is_drawn = names[0] in getattr(model, "drawn_beside_weights", ())
            (result.drawn if is_drawn else result.missing).append(names[0])
            continue
        target, entries = targets[there[0]], [source.entries[keys[name]] for name in there]
        problem = _mismatch(target, entries[0], id(target) in vocabulary, config.grow_vocabulary)
        if problem is None and _differ(source, [keys[name] for name in there]):
            problem = f"one tensor in the model, but not the same as {keys[there[1]]} in the file"
        if problem is None:
            result.moves.append((there[0], keys[there[0]]))
            if entries[0].shape != tuple(getattr(target, "ds_shape", target.shape)):
                result.grown.append(there[0])
        else:
            result.mismatched.append(f"{there[0]} ({problem})")
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for key in sorted(source.entries.keys() - set(keys.values())):
        if not any(re.search(pattern, key) for pattern in ignored):
            result.unexpected.append(key)
    return result


def _mismatch(target: Any, entry: TensorEntry, is_vocabulary: bool, may_grow: bool) -> str | None:
    """Return why a tensor of the files cannot become this one; `None`: it can."""
    shape = tuple(getattr(target, "ds_shape", target.shape))  # of a whole one, where it is sharded
    if entry.dtype != target.dtype and not (entry.dtype in FLOATS and target.dtype in FLOATS):
        there = str(entry.dtype).removeprefix("torch.")
        return f"{there} in the file, {str(target.dtype).removeprefix('torch.')} in the model"
    if entry.shape == shape:
        return None
    same_rows = shape and entry.shape and entry.shape[1:] == shape[1:]
    fewer_rows = is_vocabulary and same_rows and 0 < entry.shape[0] < shape[0]
    if fewer_rows and may_grow:
        return None
    hint = "; model.grow_vocabulary=true adds the rows" if fewer_rows else ""
    return f"{list(entry.shape)} in the file, {list(shape)} in the model{hint}"


def _differ(source: WeightFile, keys: list[str]) -> bool:
    """Return whether what the model ties is two things in the files."""
    return any(
        source.entries[key].shape != source.entries[keys[0]].shape
        or not torch.equal(source.read(keys[0]), source.read(key))
        for key in keys[1:]
    )


def match_names(keys: list[str], names: Iterable[str], base: str = "") -> dict[str, str]:
    """Return name in the model -> key in the files, of all keys that become a name without their wrappers.

    The model's own names decide. If all keys begin with one wrapper, it is taken from all of them where more
    of them are names then. A key that is a name stands for it. Any other key stands for the longest name that
    is left when some of its wrappers are taken away, if no other key does.

    Args:
        base: Prefix in a head model of transformers of what its base model has without.
    """
    known = dict.fromkeys(names)
    shortened, uniform = dict(zip(keys, keys, strict=True)), keys
    while uniform and len(heads := {key.partition(".")[0] for key in uniform}) == 1 and heads <= WRAPPERS:
        uniform = [key.partition(".")[2] for key in uniform]
        if len(known.keys() & uniform) > len(known.keys() & shortened.values()):
            shortened = dict(zip(keys, uniform, strict=True))
    found = {short: key for key, short in shortened.items() if short in known}
    by_bare: dict[str, list[str]] = {}
    for name in known:
        by_bare.setdefault(_bare(name), []).append(name)
    for key, short in shortened.items():
        if short in known:
            continue
        for whole in (short, f"{base}.{short}") if base else (short,):
            fitting = [n for n in by_bare.get(_bare(whole), ()) if n not in found and _contains(whole, n)]
            if fitting:
                found[max(fitting, key=len)] = key
                break
    return found


def _bare(name: str) -> str:
    """Return the name without any wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _contains(key: str, name: str) -> bool:
    """Return whether the parts of the name are in the key, in this order."""
    parts = iter(key.split("."))
    return all(part in parts for part in name.split("."))


@torch.no_grad()
def draw_parameter(model: Any, name: str, sharding: Sharding) -> None:
    """Draw first values of a parameter: the same ones under every split, by the process's seed."""
    parameter = model.get_parameter(name)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{torch.initial_seed()} {name}".encode()))
    values = torch.empty(getattr(parameter, "ds_shape", parameter.shape))
    values.normal_(0.0, getattr(model.config, "initializer_range", 0.02), generator=generator)
    with sharding.gather([parameter]):
        parameter.data.copy_(values)


@torch.no_grad()
def fill_tensor(target: Tensor, values: Tensor | None, sharding: Sharding, job: Job) -> None:
    """Fill this parameter or buffer of all ranks with rank 0's values, which the others do not have."""
    if isinstance(target, nn.Parameter) and sharding.zero3_config is not None:
        with sharding.gather([target]):  # which keeps rank 0's
            if values is not None:
                _put(target.data, values)
        return
    with sharding.gather([target] if isinstance(target, nn.Parameter) else []):
        if not job.is_distributed:
            assert values is not None
            _put(target.data, values)
            return
        whole = target.data
        if whole.device.type != "cpu" or not whole.is_contiguous():
            whole = torch.empty(target.shape, dtype=target.dtype)
        if values is not None:
            _put(whole, values)
        if whole.numel():
            dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # gloo has no 16-bit integers
        if whole.data_ptr() != target.data_ptr():
            target.data.copy_(whole)


def _put(target: Tensor, values: Tensor) -> None:
    if target.shape == values.shape:
        target.copy_(values)
    else:
        fill_rows(target, values)
