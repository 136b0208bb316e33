"""Initial weights from files: finds the files that a path means, and matches their tensors by name.

Rank 0 reads one tensor at a time, and every rank gets its values, whole or in ZeRO-3's shards. Nothing in the
files is executed: pickles are read by torch's restricted reader. Files outside of the named folder are not
read.
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
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import ModelError, format_names, summarize_error
from pipeline.files import MAX_DESCRIPTION_BYTES, find_path_inside, read_regular_file, read_weight_map
from pipeline.models.embeddings import fill_rows, find_vocabulary_parameters
from pipeline.models.sharding import Sharding

log = logging.getLogger(__name__)

# Files of a folder in the order in which transformers looks for them.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
DEEPSPEED_PATTERN = "*_model_states.pt"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin")
# Keys under which training programs save the model in one file with its optimizer.
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "module")
MAX_STATE_DICT_DEPTH = 3  # of such keys inside each other
# Parts of names that DistributedDataParallel, torch.compile, DeepSpeed, FSDP and activation checkpointing
# insert.
WRAPPER_NAMES = {
    "module",
    "_orig_mod",
    "_forward_module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
}
FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # cast into each other


class TensorEntry(NamedTuple):
    """The shape and dtype of a tensor in a file, known before its values are read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    """Data type; a description in words if no parameter can have it, such as a sparse or quantized tensor."""


class WeightFile(Protocol):
    """A source of weights by name, opened for reading."""

    entries: Mapping[str, TensorEntry]
    """Tensors by name, without their values."""
    files: Sequence[Path]
    """Files whose content decides all values; empty if they are not known."""

    def read(self, name: str) -> Tensor:
        """Return the values, on the CPU, in the file's shape and dtype."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def build_weights_error(path: Path, problem: str, key: str = "model.weights") -> ModelError:
    """Return an error about a path that a recipe's key names.

    Args:
        path: The path.
        problem: The rest of the sentence that begins with the path, and what to do.
        key: The key of the recipe.
    """
    return ModelError(f"{key}: {path} {problem}")


def _select_names(path: Path, names: list[str], expected: list[str] | None) -> list[str]:
    """Return the names of the tensors to read from a file.

    Args:
        path: The file.
        names: The names of its tensors.
        expected: The names that an index lists for the file; `None`: there is no index, so read all.

    Raises:
        ModelError: The file lacks a name that the index lists.
    """
    if expected is None:
        return names
    for name in expected:
        if name not in names:
            raise build_weights_error(path, f"lacks {name!r}, which its index lists; save or fetch it again")
    return expected


class SafetensorsFiles:
    """One or several safetensors files, whose values are mapped or read one tensor at a time.

    Args:
        files: The files, each with the names that an index lists for it; `None`: all names.
        key: The key of the recipe that names the files, for messages.
    """

    def __init__(self, files: dict[Path, list[str] | None], key: str = "model.weights"):
        self.files: Sequence[Path] = list(files)
        self._key = key
        entries: dict[str, TensorEntry] = {}
        self._places: dict[str, tuple[Path, Any]] = {}
        self._stack = ExitStack()
        for path, expected in files.items():
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
                for name in _select_names(path, list(file.keys()), expected):
                    header = file.get_slice(name)
                    dtype = header.get_dtype()
                    entries[name] = TensorEntry(tuple(header.get_shape()), _TYPES.get(dtype, dtype))
                    self._places[name] = path, file
            except (SafetensorError, OSError) as error:
                reason = _get_first_sentence(error)
                problem = f"cannot be read as safetensors: {reason}; save or fetch it again"
                raise build_weights_error(path, problem, key) from None
        self.entries: Mapping[str, TensorEntry] = entries

    def read(self, name: str) -> Tensor:
        """See WeightFile.read."""
        path, file = self._places[name]
        try:
            values: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            problem = f"cannot be read: {name}: {_get_first_sentence(error)}; save or fetch it again"
            raise build_weights_error(path, problem, self._key) from None
        return values

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


class PickledFiles:
    """Files of torch.save, mapped instead of read if torch 1.6 or newer has written them.

    Args:
        files: The files, each with the names that an index lists for it; `None`: all names.
    """

    def __init__(self, files: dict[Path, list[str] | None]):
        self.files: Sequence[Path] = list(files)
        self._tensors: dict[str, Tensor] = {}
        for path, expected in files.items():
            tensors = _find_tensors(_unpickle(path), path)
            self._tensors |= {name: tensors[name] for name in _select_names(path, list(tensors), expected)}
        self.entries: Mapping[str, TensorEntry] = {
            name: TensorEntry(tuple(t.shape), _describe_dtype(t)) for name, t in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """See WeightFile.read."""
        return self._tensors[name]

    def close(self) -> None:
        """Drop the mapped tensors."""
        self._tensors.clear()


def _describe_dtype(tensor: Tensor) -> torch.dtype | str:
    """Return the dtype of a dense tensor on the CPU, and a description in words of any other tensor."""
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    if is_dense and tensor.device.type == "cpu":
        return tensor.dtype
    return f"{tensor.layout} on {tensor.device.type}".removeprefix("torch.")


def _unpickle(path: Path) -> Any:
    """Return the content of a file of torch.save, by torch's restricted reader.

    Raises:
        ModelError: The file cannot be read, or contains code.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about formats that the restricted reader may not know
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch's reader may raise anything for an untrusted file
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise build_weights_error(
                path,
                f"contains {code[1][:100]}, which is code and is not run; save model.state_dict() instead "
                "of the model, or safetensors",
            ) from None
        problem = f"cannot be read as weights: {_get_first_sentence(error)}; save or fetch it again"
        raise build_weights_error(path, problem) from None


def _find_tensors(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the tensors of the only state dict in a file's content.

    Raises:
        ModelError: There is no state dict, or there are several.
    """
    state_dicts = list(_find_state_dicts(content, MAX_STATE_DICT_DEPTH))
    if len(state_dicts) == 1:
        return state_dicts[0][1]
    if not state_dicts:
        raise build_weights_error(path, "has no tensors by name; save model.state_dict()")
    places = ", ".join(place for place, _ in state_dicts)
    raise build_weights_error(path, f"contains several models ({places}); save only the one to load")


def _find_state_dicts(content: Any, depth: int, place: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (keys that lead to it, state dict) for each state dict in a file's content.

    Tensors of a dictionary count as a state dict only if none is found under STATE_DICT_KEYS.

    Args:
        content: The content, or a part of it.
        depth: The number of keys that may still be followed.
        place: The keys that lead to `content`, joined by dots.
    """
    if not isinstance(content, dict) or depth < 0:
        return
    nested = [
        each
        for key in STATE_DICT_KEYS
        for each in _find_state_dicts(content.get(key), depth - 1, f"{place}.{key}".strip("."))
    ]
    tensors = {key: t for key, t in content.items() if isinstance(key, str) and isinstance(t, Tensor)}
    if nested:
        yield from nested
    elif tensors:
        yield place, tensors


def _get_first_sentence(error: Exception) -> str:
    """Return the first sentence of a library's error that is about the file, not about the library."""
    return summarize_error(error, 10_000).split("WeightsUnpickler error: ")[-1].split(". ")[0][:200]


OpenCheckpoint = Callable[[Path], WeightFile | None]
"""Function that opens a folder with a checkpoint of this trainer; it returns `None` for other folders."""


def open_weights(path: Path, open_checkpoint: OpenCheckpoint) -> WeightFile:
    """Open a file, a folder of files, a checkpoint, or a run directory (its newest intact checkpoint).

    Args:
        path: The path.
        open_checkpoint: Opens checkpoints of this trainer and run directories.

    Raises:
        ModelError: There is no such path, it cannot be read, or it contains code that would have to be run.
    """
    if path.is_dir():
        return open_checkpoint(path) or _open_folder(path)
    if not path.exists():
        raise build_weights_error(path, "does not exist; give a file, a folder or a run directory")
    if path.match(DEEPSPEED_PATTERN):
        raise _build_deepspeed_error(path, path.parent)
    return _open_files({path: None})


def open_hub(name: str) -> WeightFile:
    """Open the safetensors of a hub repository in this machine's cache.

    Raises:
        ModelError: The repository is not in the cache, or its weights there are quantized or no safetensors.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.safetensors"], local_files_only=True))
    except Exception as error:  # the hub's client raises a dozen kinds
        raise ModelError(
            f"{name} is not in the hub's cache on this machine ({_get_first_sentence(error)}); "
            f"download it: hf download {name}"
        ) from None
    _refuse_quantized(folder)
    files = sorted(folder.glob("*.safetensors"))  # links into the cache's folder of blobs
    if not files:
        raise ModelError(
            f"{name} has no safetensors in the hub's cache on this machine; download them: hf download {name}"
        )
    return SafetensorsFiles(dict.fromkeys(files))


def find_tokenizer(path: Path) -> Path | None:
    """Return the tokenizer.json that belongs to a path with weights; `None` if there is none."""
    folder = path if path.is_dir() else path.parent
    run_directory = folder.parent.parent  # if the folder is a checkpoint
    folders = (folder, folder / "model", run_directory / "model")
    files = (each / "tokenizer.json" for each in folders)
    return next((file for file in files if file.is_file()), None)


def _open_folder(folder: Path) -> WeightFile:
    """Open the weights of a folder that is no checkpoint of this trainer.

    Raises:
        ModelError: The folder has no weights, or weights that cannot be loaded.
    """
    _refuse_quantized(folder)
    for name in WEIGHT_FILES:
        if not (folder / name).exists():
            continue
        if name.endswith(".json"):
            return _open_files(_read_index(folder, name))
        return _open_files({_resolve_inside(folder, name): None})
    if (folder / "checkpoints").is_dir():
        raise build_weights_error(
            folder, "is a run directory without a checkpoint; give a run that saved one"
        )
    if any(folder.glob(DEEPSPEED_PATTERN)) or any(folder.glob(f"*/{DEEPSPEED_PATTERN}")):
        raise _build_deepspeed_error(folder, folder)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(names) == 1:
        return _open_files({_resolve_inside(folder, names[0]): None})
    hint = ""
    if names:
        listed = ", ".join(names[:3]) + " ..." * (len(names) > 3)
        hint = f"; it has {listed}: name one of them"
    expected = f"{', '.join(WEIGHT_FILES)}, or a run directory"
    raise build_weights_error(folder, f"has no weights; expected {expected}{hint}")


def _refuse_quantized(folder: Path) -> None:
    """Refuse a folder whose config.json says that its weights are quantized."""
    try:
        config = json.loads(read_regular_file(folder / "config.json", MAX_DESCRIPTION_BYTES))
        quantization = config.get("quantization_config")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if quantization:
        raise build_weights_error(
            folder,
            f"has weights that are already quantized ({get_quantization_method(quantization)}); "
            "use the original model",
        )


def get_quantization_method(quantization_config: Any) -> str:
    """Return the name of the method in the `quantization_config` of a model's config."""
    is_dict = isinstance(quantization_config, dict)
    method = quantization_config.get("quant_method") if is_dict else quantization_config
    return str(method)[:50]


def _build_deepspeed_error(path: Path, folder: Path) -> ModelError:
    """Return an error about a path that is DeepSpeed's checkpoint in `folder`, or a file in it."""
    relation = "is part of" if path != folder else "is"
    return build_weights_error(
        path,
        f"{relation} a checkpoint in DeepSpeed's format; run `python zero_to_fp32.py . OUT "
        "--safe_serialization` in the folder with its zero_to_fp32.py, and give OUT",
    )


def _resolve_inside(folder: Path, name: str) -> Path:
    """Return the path of a file by its name, which must lie inside the folder after links are followed.

    Raises:
        ModelError: The name leads out of the folder, or there is no such file.
    """
    path = find_path_inside(folder, name)
    if path is None:
        raise build_weights_error(folder, f"names a file outside of itself: {name[:100]!r}; fetch it again")
    try:
        is_there = path.is_file()
    except (OSError, ValueError):  # the system refuses such a name
        is_there = False
    if not is_there:
        raise build_weights_error(folder, f"has no file {name[:100]!r}; save or fetch it again")
    return path


def _read_index(folder: Path, index: str) -> dict[Path, list[str] | None]:
    """Return the files that an index lists, each with the names of its tensors.

    Raises:
        ModelError: The index cannot be read, or lists a file that is missing or outside of the folder.
    """
    try:
        file_names = read_weight_map(_resolve_inside(folder, index))
    except (OSError, ValueError):
        raise build_weights_error(
            folder / index, "cannot be read as an index of weights; fetch it again"
        ) from None
    paths = {name: _resolve_inside(folder, name) for name in dict.fromkeys(file_names.values())}
    tensors: dict[Path, list[str] | None] = {}
    for tensor, file_name in file_names.items():
        tensors.setdefault(paths[file_name], []).append(tensor)  # type: ignore[union-attr]
    return tensors


def _open_files(files: dict[Path, list[str] | None]) -> WeightFile:
    """Open files of one format, each with the names that an index lists for it (`None`: all)."""
    suffixes = {path.suffix for path in files}
    for path in files:
        if not path.is_file():
            raise build_weights_error(path, "is not a file; give a file with weights")
    if suffixes == {".safetensors"}:
        return SafetensorsFiles(files)
    if suffixes <= set(PICKLE_SUFFIXES):
        return PickledFiles(files)
    if len(suffixes) > 1:
        problem = (
            f"is listed with files of other formats ({', '.join(sorted(suffixes))}); save all as safetensors"
        )
    else:
        problem = (
            f"is of no known format; give a file that ends in .safetensors, {', '.join(PICKLE_SUFFIXES)}"
        )
    raise build_weights_error(next(iter(files)), problem)


@dataclass
class LoadPlan:
    """The tensors to load, and those that do not fit."""

    moves: list[tuple[str, str]] = field(default_factory=list)
    """Pairs (name in the model, name in the files), one pair for tied weights."""
    missing: list[str] = field(default_factory=list)
    """Names in the model of tensors that the files lack."""
    unexpected: list[str] = field(default_factory=list)
    """Names in the files of tensors that the model lacks."""
    mismatched: list[str] = field(default_factory=list)
    """Descriptions of tensors whose shape or dtype differs: the name in the model, and both values."""
    grown: list[str] = field(default_factory=list)
    """Names in the model of parameters with more rows than the files have; also in `moves`."""
    drawn: list[str] = field(default_factory=list)
    """Names in the model of parameters that the files lack, and need not have: they are drawn."""

    def describe_misfits(self) -> str:
        """Return a line about the tensors that do not fit; empty if all fit."""
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("mismatched", self.mismatched),
        )
        return "; ".join(f"{kind}: {format_names(names)}" for kind, names in kinds if names)


@tag_errors(Phase.WEIGHTS)
def load_weights(
    model: nn.Module,
    config: ModelSection,
    sharding: Sharding,
    job: Job,
    open_checkpoint: OpenCheckpoint,
    new_ids: Mapping[str, int] | None = None,
) -> None:
    """Fill the model, whole or in shards, from `config.weights`. Collective.

    Besides the model, host memory needs room for the largest tensor, and on rank 0 also for a copy of that
    tensor in the dtype of the file.

    Args:
        model: The model to fill.
        config: The recipe's model section.
        sharding: The split in which the model was built.
        job: The ranks, of which rank 0 reads.
        open_checkpoint: Opens checkpoints of this trainer; see pipeline.checkpoint.initial_weights.
        new_ids: The id of each token if the tokenizer was trained on this run's data; `None`: the recipe
            names a tokenizer, and nothing is compared.

    Raises:
        ModelError: The weights cannot be read, they do not fit and `config.strict` is set, or they were
            trained with another tokenizer.
    """
    assert config.weights is not None
    targets = collect_tensors(model)
    path = Path(os.path.expanduser(config.weights))
    with ExitStack() as opened:
        sources: list[WeightFile] = []  # filled on rank 0 only

        def open_and_plan() -> LoadPlan:
            sources.append(opened.enter_context(closing(open_weights(path, open_checkpoint))))
            if new_ids is not None:
                _refuse_other_ids(path, new_ids)
            plan = plan_load(model, targets, sources[0], config)
            _refuse_misfits(plan, path, config)
            return plan

        plan = job.run_on_main_rank(open_and_plan)
        for name, key in plan.moves:
            fill_tensor(targets[name], sources[0].read(key) if sources else None, sharding, job)
        for name in plan.drawn:
            draw_parameter(model, name, sharding)
        for name in plan.grown:
            targets[name].has_new_rows = True  # type: ignore[attr-defined] # an adapter trains these
    if job.ranks.is_main_process:
        log.info("loaded %d tensors from %s", len(plan.moves), path)
        if misfits := plan.describe_misfits():
            log.warning(
                "model.strict is false: these tensors keep their initial values, or are not in the model: %s",
                misfits,
            )


def _refuse_other_ids(path: Path, new_ids: Mapping[str, int]) -> None:
    """Refuse weights that were trained with another tokenizer: rows of embeddings would get other tokens.

    Without a tokenizer beside the weights, this cannot be checked, and a warning says so.
    """
    file = find_tokenizer(path)
    if file is None:
        log.warning(
            "model.weights: %s has no tokenizer beside it, so its token ids may differ from those of the "
            "tokenizer that was trained on this data; name its tokenizer in data.tokenizer.pretrained",
            path,
        )
        return
    try:
        ids = Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(
            f"model.weights: {file} cannot be read as a tokenizer: {summarize_error(error)}; fetch it again"
        ) from None
    if any(new_ids.get(token) != number for token, number in ids.items()):
        raise ModelError(
            f"model.weights: {path} was trained with another tokenizer than the one that this run trained on "
            f"its data; use the tokenizer of the weights: data.tokenizer.pretrained={file}"
        )


def _refuse_misfits(plan: LoadPlan, path: Path, config: ModelSection) -> None:
    """Refuse weights if no tensor fits the model, or if `model.strict` is set and not every tensor fits."""
    misfits = plan.describe_misfits()
    if not plan.moves:
        raise ModelError(
            f"model.weights: no tensor in {path} fits the model; {misfits}; give weights of this architecture"
        )
    if config.strict and misfits:
        raise ModelError(
            f"model.weights: {path} does not fit the model; {misfits}; set model.strict=false to load only "
            "the tensors that fit"
        )


def collect_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by their names in a state dict, tied ones under each of their names."""
    state = model.state_dict(keep_vars=True)
    return {name: target for name, target in state.items() if isinstance(target, Tensor)}


def plan_load(
    model: nn.Module, targets: Mapping[str, Tensor], source: WeightFile, config: ModelSection
) -> LoadPlan:
    """Return which tensor of the files is loaded into each parameter and buffer, and which do not fit.

    Tied tensors of the files are read and compared.

    Raises:
        ModelError: `model.grow_vocabulary` is set, but the model does not name its embeddings.
    """
    base = str(getattr(model, "base_model_prefix", ""))
    keys = match_names(list(source.entries), targets, base)
    vocabulary = {id(p) for p in find_vocabulary_parameters(model)}
    if config.grow_vocabulary and not vocabulary:
        raise ModelError(
            f"model.grow_vocabulary: a {type(model).__name__} has no get_input_embeddings(), which names the "
            "parameter with a row for each token; define it, or leave model.grow_vocabulary out"
        )
    result = LoadPlan()
    names_by_id: dict[int, list[str]] = {}  # several names for tied weights
    for name, target in targets.items():
        names_by_id.setdefault(id(target), []).append(name)
    for names in names_by_id.values():
        present = [name for name in names if name in keys]
        if not present:
            is_drawn = names[0] in getattr(model, "drawn_beside_weights", ())
            (result.drawn if is_drawn else result.missing).append(names[0])
            continue
        name = present[0]
        target = targets[name]
        entry = source.entries[keys[name]]
        problem = _describe_mismatch(target, entry, id(target) in vocabulary, config.grow_vocabulary)
        if problem is None and _differ(source, [keys[each] for each in present]):
            problem = f"one tensor in the model, but different from {keys[present[1]]} in the file"
        if problem is not None:
            result.mismatched.append(f"{name} ({problem})")
            continue
        result.moves.append((name, keys[name]))
        if entry.shape != _get_whole_shape(target):
            result.grown.append(name)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for key in sorted(source.entries.keys() - set(keys.values())):
        if not any(re.search(pattern, key) for pattern in ignored):
            result.unexpected.append(key)
    return result


def _describe_mismatch(target: Any, entry: TensorEntry, is_vocabulary: bool, may_grow: bool) -> str | None:
    """Return the reason why a tensor of the files cannot fill this one; `None` if it can."""
    shape = _get_whole_shape(target)
    are_floats = entry.dtype in FLOAT_DTYPES and target.dtype in FLOAT_DTYPES
    if entry.dtype != target.dtype and not are_floats:
        file_dtype = str(entry.dtype).removeprefix("torch.")
        model_dtype = str(target.dtype).removeprefix("torch.")
        return f"{file_dtype} in the file, {model_dtype} in the model"
    if entry.shape == shape:
        return None
    has_rows_of_same_shape = shape and entry.shape and entry.shape[1:] == shape[1:]
    lacks_rows = is_vocabulary and has_rows_of_same_shape and 0 < entry.shape[0] < shape[0]
    if lacks_rows and may_grow:
        return None
    hint = "; set model.grow_vocabulary=true to add rows" if lacks_rows else ""
    return f"{list(entry.shape)} in the file, {list(shape)} in the model{hint}"


def _get_whole_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the whole parameter if ZeRO 3 has sharded it."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _differ(source: WeightFile, keys: list[str]) -> bool:
    """Return whether the files have different values for one parameter that the model ties."""
    return any(
        source.entries[key].shape != source.entries[keys[0]].shape
        or not torch.equal(source.read(keys[0]), source.read(key))
        for key in keys[1:]
    )


def match_names(keys: list[str], names: Iterable[str], base: str = "") -> dict[str, str]:
    """Return the key in the files for each name in the model that has one.

    Keys may have names of wrappers such as `module.` in them. First, if all keys begin with the same wrapper,
    it is removed from all of them, provided that more keys are then names in the model. Then a key that is a
    name in the model matches that name. From any other key, some or all wrappers are removed to get a name in
    the model that no other key has matched; of several such names, the longest is chosen.

    Args:
        keys: The names in the files.
        names: The names in the model.
        base: The prefix that a head model of transformers adds to the names of its base model.
    """
    model_names = dict.fromkeys(names)
    shortened = dict(zip(keys, keys, strict=True))
    stripped = keys
    while stripped:
        first_parts = {key.partition(".")[0] for key in stripped}
        if len(first_parts) != 1 or not first_parts <= WRAPPER_NAMES:
            break
        stripped = [key.partition(".")[2] for key in stripped]
        if len(model_names.keys() & stripped) > len(model_names.keys() & shortened.values()):
            shortened = dict(zip(keys, stripped, strict=True))
    matches = {short: key for key, short in shortened.items() if short in model_names}
    by_bare_name: dict[str, list[str]] = {}
    for name in model_names:
        by_bare_name.setdefault(_strip_wrappers(name), []).append(name)
    for key, short in shortened.items():
        if short in model_names:
            continue
        candidates = [short, f"{base}.{short}"] if base else [short]
        for candidate in candidates:
            same_bare_name = by_bare_name.get(_strip_wrappers(candidate), ())
            fitting = [name for name in same_bare_name if name not in matches and _contains(candidate, name)]
            if fitting:
                matches[max(fitting, key=len)] = key
                break
    return matches


def _strip_wrappers(name: str) -> str:
    """Return the name without any wrapper in it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def _contains(key: str, name: str) -> bool:
    """Return whether the key contains the parts of the name in their order; others may be in between."""
    parts = iter(key.split("."))
    return all(part in parts for part in name.split("."))


@torch.no_grad()
def draw_parameter(model: Any, name: str, sharding: Sharding) -> None:
    """Draw the initial values of a parameter from torch's seed and its name, equal under every split."""
    parameter = model.get_parameter(name)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{torch.initial_seed()} {name}".encode()))
    values = torch.empty(_get_whole_shape(parameter))
    values.normal_(0.0, getattr(model.config, "initializer_range", 0.02), generator=generator)
    with sharding.gather([parameter]):
        parameter.data.copy_(values)


@torch.no_grad()
def fill_tensor(target: Tensor, values: Tensor | None, sharding: Sharding, job: Job) -> None:
    """Fill a parameter or buffer on all ranks with rank 0's values. Collective.

    Args:
        target: The parameter or buffer. It may have more rows than the values; see fill_rows.
        values: The values on rank 0; `None` on other ranks.
        sharding: The split in which the model was built.
        job: The ranks.
    """
    if isinstance(target, nn.Parameter) and sharding.zero3_config is not None:
        with sharding.gather([target]):  # at its end ZeRO 3 distributes rank 0's values
            if values is not None:
                _copy_values(target.data, values)
        return
    with sharding.gather([target] if isinstance(target, nn.Parameter) else []):
        if not job.is_distributed:
            assert values is not None
            _copy_values(target.data, values)
            return
        host_values = target.data
        if host_values.device.type != "cpu" or not host_values.is_contiguous():
            host_values = torch.empty(target.shape, dtype=target.dtype)
        if values is not None:
            _copy_values(host_values, values)
        if host_values.numel():
            dist.broadcast(host_values.view(-1).view(torch.uint8), 0)  # gloo has no 16-bit integers
        if host_values.data_ptr() != target.data_ptr():
            target.data.copy_(host_values)


def _copy_values(target: Tensor, values: Tensor) -> None:
    """Copy values, and fill rows that the target has in addition with their mean."""
    if target.shape == values.shape:
        target.copy_(values)
    else:
        fill_rows(target, values)
