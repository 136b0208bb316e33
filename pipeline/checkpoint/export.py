"""Exports the weights of a checkpoint as safetensors, one tensor at a time, or a model of transformers.

The weights of a checkpoint are its own, or an adapter's merged with its base. If the run had a transformers
model, the folder also gets the files that transformers needs to open it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from pipeline.checkpoint import adapters
from pipeline.checkpoint.adapters import MergedWeights, dtype_of
from pipeline.checkpoint.find import MODEL_FOLDER, find_checkpoint
from pipeline.checkpoint.initial_weights import open_checkpoint
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.reader import (
    MODEL_KINDS,
    CheckpointWeights,
    check_content,
    ignore_progress,
    inspect_files,
)
from pipeline.checkpoint.shard_file import DTYPE_NAMES, as_bytes, encode_header
from pipeline.checkpoint.shards import WEIGHT
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import CheckpointError, ConfigError, ModelError, summarize_error
from pipeline.files import (
    MAX_CONFIGURATION_BYTES,
    MAX_DESCRIPTION_BYTES,
    format_bytes,
    publish_folder,
    read_regular_file,
)
from pipeline.models.adapters import WEIGHTS_FILE as ADAPTER_FILE
from pipeline.models.transformers_facts import choose_auto_class
from pipeline.models.weights import TensorEntry
from pipeline.redaction import redact_text

if TYPE_CHECKING:
    from pipeline.evaluation.sources import ModelSource

DTYPES_BY_OPTION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODEL_FILE = "model.safetensors"
MAX_FILE_BYTES = 5_000_000_000  # limit at which transformers splits its own files
# Not exported with an adapter, because transformers would take the folder for a whole model.
WHOLE_MODEL_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class ExportResult:
    """Result of an export."""

    files: list[Path]
    """Weight files."""
    num_bytes: int
    """Bytes of the weight files."""
    auto_class: str | None
    """Class of transformers whose `from_pretrained` opens the folder.

    `None` for an adapter and for a model that is not of transformers."""
    is_adapter: bool
    """Whether the folder has an adapter, which peft applies to its base."""
    rounding_error: float | None = None
    """Relative error ||W - W in 4 bits|| / ||W|| of the base's quantized layers.

    `None` unless an adapter was merged into a base in 4 bits."""


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: str | int = "last",
    dtype: str | None = None,
    merge: bool = False,
    advance: Callable[[int], object] = ignore_progress,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> ExportResult:
    """Export a checkpoint as `pipeline.training.api.export` does, with progress and a limit of the file size.

    Files are written to `<out>.exporting` and moved to `out` at the end. Buffers keep their dtype.

    Args:
        run: See `pipeline.training.api.export`, also for the next arguments.
        out: Folder to write.
        step: Checkpoint of the run.
        dtype: Dtype of the weights.
        merge: Whether to merge an adapter into its base.
        advance: Called with the number of saved bytes processed since the last call. Each byte is counted
            twice: once when it is verified, once when it is written.
        max_file_bytes: Maximum number of bytes in a file of a transformers folder; a larger tensor gets a
            separate file.

    Raises:
        CheckpointError: The checkpoint does not exist or is damaged, `out` cannot be written, an argument
            does not suit the checkpoint, or a value does not fit into fp16.
        ModelError: The base of an adapter cannot be opened, or the adapter cannot be merged into it.
    """
    directory, _, manifest = find_checkpoint(Path(run), str(step), "step")
    _check_dtype(dtype)
    if merge and adapters.STATE_KEY not in manifest.state:
        raise CheckpointError(f"{run} has no adapter: its checkpoints contain the whole model; remove merge")
    out = _resolve_output(out)
    _refuse_damaged_weights(manifest, advance)
    is_adapter = adapters.STATE_KEY in manifest.state and not merge
    with _fill_folder(out) as partial:
        source = MergedWeights(manifest, open_checkpoint) if merge else _open_saved_weights(manifest)
        with closing(source):
            dtype = dtype or _choose_dtype(source.dtype)
            config = _copy_description(directory / MODEL_FOLDER, partial, dtype)
            (partial / "README.md").write_text(format_model_card(directory, manifest, dtype), "utf-8")
            if is_adapter:
                adapters.refuse_changed_base_if_found(manifest, open_checkpoint)
                for name in WHOLE_MODEL_FILES:
                    (partial / name).unlink(missing_ok=True)
                adapters.write_peft_config(manifest, partial)
            auto_class = None if config is None or is_adapter else choose_auto_class(config)
            files = write_weights(
                source,
                partial,
                dtype=DTYPES_BY_OPTION[dtype],
                file_name=ADAPTER_FILE if is_adapter else MODEL_FILE,
                # Only transformers reads a model from several files.
                max_file_bytes=sys.maxsize if auto_class is None else max_file_bytes,
                advance=advance,
            )
            rounding_error = source.rounding_error
        num_bytes = sum((partial / file).stat().st_size for file in files)
    return ExportResult([out / file for file in files], num_bytes, auto_class, is_adapter, rounding_error)


def export_source(
    source: ModelSource, out: str | Path, *, dtype: str | None = None, merge: bool = False
) -> ExportResult:
    """Write a language model of a folder or the hub as a folder of transformers, with its tokenizer.

    Args:
        source: Folder or hub name of a model, or an adapter over one.
        out: Folder to write, which must not exist or must be empty.
        dtype: Dtype of the weights: `fp32`, `bf16` or `fp16`; `None` for the source's own.
        merge: Whether to merge an adapter into its base, in fp32.

    Raises:
        ConfigError: `merge` does not suit the source, or the base of an adapter is a run.
        CheckpointError: `out` cannot be written, or a value does not fit into fp16.
        ModelError: The model cannot be loaded, or transformers refuses to save it.
    """
    from pipeline.distributed.accelerator import choose_accelerator
    from pipeline.models.huggingface import load_stored_model

    is_adapter = source.base is not None
    if is_adapter and not merge:
        raise ConfigError(
            f"{source.location} is a folder of an adapter already; --merge merges it into its base and "
            "writes one model"
        )
    if merge and not is_adapter:
        raise ConfigError(f"{source.location} is no adapter (no adapter_config.json); remove --merge")
    if source.whole_model.run is not None:
        raise ConfigError(
            f"{source.location}: its base is a run; export that first, and name the folder: --base OUT"
        )
    _check_dtype(dtype)
    out = _resolve_output(out)
    choose_accelerator()  # transformers imports DeepSpeed to save
    tokenizer = source.load_tokenizer()
    model: Any = load_stored_model(source.whole_model.location, source.trust_remote_code, "SOURCE")
    target = model.dtype if dtype is None else DTYPES_BY_OPTION[dtype]
    if is_adapter:
        from pipeline.models.adapters import apply_peft_folder

        model = apply_peft_folder(model.float(), Path(source.location)).merge_and_unload()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = _convert(name, parameter.data, target)
    with _fill_folder(out) as partial:
        try:
            model.save_pretrained(partial, max_shard_size=MAX_FILE_BYTES)
        except ValueError as error:  # for example its generation config contradicts itself
            raise ModelError(f"the model cannot be saved: {summarize_error(error, 500)}") from None
        tokenizer.save_pretrained(str(partial))
        files = sorted(file.name for file in partial.glob("*.safetensors"))
        num_bytes = sum((partial / file).stat().st_size for file in files)
    return ExportResult([out / file for file in files], num_bytes, "AutoModelForCausalLM", is_adapter=False)


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES_BY_OPTION:
        raise CheckpointError(f"dtype {dtype!r}: expected {', '.join(DTYPES_BY_OPTION)}")


def _resolve_output(out: str | Path) -> Path:
    """Return the absolute path of the folder to write.

    Raises:
        CheckpointError: Something exists there that is no empty folder.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty; choose another folder, or remove it")
    return out


@contextmanager
def _fill_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder beside `out`, which becomes `out` when the context ends without an exception.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    partial = out.with_name(f"{out.name}.exporting")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        publish_folder(partial, out, partial.iterdir())
    except OSError as error:
        raise CheckpointError(
            f"{out} cannot be written: {error.strerror or error}; choose another folder"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_damaged_weights(manifest: Manifest, advance: Callable[[int], object]) -> None:
    """Compare all weights and buffers with their checksums. Optimizer state is not read.

    Raises:
        CheckpointError: A file with weights or buffers is damaged or missing.
    """
    _, absent = inspect_files(manifest)
    for file in manifest.files:
        if file.name in absent and any(shard.kind in MODEL_KINDS for shard in manifest.shards_of(file)):
            raise CheckpointError(
                f"{manifest.folder / file.name} is missing: rank {file.rank} wrote it on {file.host}; copy it"
                " here"
            )
    for damage in check_content(manifest, kinds=MODEL_KINDS, advance=advance):
        raise CheckpointError(
            f"{manifest.folder}/{damage}; nothing is exported; choose another step with --step"
        )


def _open_saved_weights(manifest: Manifest) -> CheckpointWeights:
    """Open the weights as they were saved. An adapter's weights get their names in peft."""
    if adapters.STATE_KEY in manifest.state:
        return CheckpointWeights(manifest, adapters.map_peft_names(manifest))
    return CheckpointWeights(manifest)


def _choose_dtype(saved: torch.dtype) -> str:
    """Return the key of DTYPES_BY_OPTION for a dtype; `fp32` if there is none."""
    for key, dtype in DTYPES_BY_OPTION.items():
        if dtype == saved:
            return key
    return "fp32"


@tag_errors(Phase.WEIGHTS)
def write_weights(
    source: CheckpointWeights | MergedWeights,
    folder: Path,
    dtype: torch.dtype,
    file_name: str,
    max_file_bytes: int,
    advance: Callable[[int], object],
) -> list[str]:
    """Write one file, or several and their index, and return the names of the weight files.

    Args:
        source: Weights to write.
        folder: Folder to write to.
        dtype: Dtype of the written weights; buffers keep theirs.
        file_name: Name of the file if there is only one, as transformers and peft expect it. Several files
            get a number before its suffix.
        max_file_bytes: Maximum number of bytes in a file; a larger tensor gets a separate file.
        advance: Called with the number of bytes written since the last call, counted in the dtype in which
            they were saved.

    Raises:
        OSError: The disk has too little space, or a file cannot be written.
        CheckpointError: A value does not fit into fp16.
    """
    entries = dict[str, TensorEntry]()
    for name, entry in source.entries.items():
        entries[name] = TensorEntry(entry.shape, dtype_of(entry) if name in source.buffers else dtype)
    needed_bytes = sum(map(_count_bytes, entries.values()))
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        needed = format_bytes(needed_bytes)
        raise OSError(errno.ENOSPC, f"{needed} are needed and {format_bytes(free_bytes)} are free")
    split = split_state_dict_into_shards_factory(
        entries,
        get_storage_size=_count_bytes,
        filename_pattern=file_name.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_file_bytes,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{file_name}.index.json").write_text(json.dumps(index, indent=2), "utf-8")
    for file, names in split.filename_to_tensors.items():
        _write_file(source, folder / file, {name: entries[name] for name in names}, advance)
    return list(split.filename_to_tensors)


def _count_bytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * dtype_of(entry).itemsize


def _write_file(
    source: CheckpointWeights | MergedWeights,
    path: Path,
    entries: Mapping[str, TensorEntry],
    advance: Callable[[int], object],
) -> None:
    """Write a safetensors file with tensors of a source, in the shapes and dtypes of the entries."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin = end
        end = begin + _count_bytes(entry)
        header[name] = {
            "dtype": DTYPE_NAMES[dtype_of(entry)],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    with path.open("wb") as file:
        file.write(encode_header(header))
        for name, entry in entries.items():
            advance(_write_tensor(file, name, source.read(name), dtype_of(entry)))


def _write_tensor(file: BinaryIO, name: str, saved: Tensor, dtype: torch.dtype) -> int:
    """Append a tensor to a file, converted to `dtype`, and return its number of bytes in the saved dtype.

    Raises:
        CheckpointError: See _convert.
    """
    file.write(as_bytes(_convert(name, saved, dtype)).numpy().data)
    return saved.nbytes


def _convert(name: str, saved: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype.

    Raises:
        CheckpointError: A value does not fit into fp16.
    """
    values = saved.to(dtype)
    if dtype == torch.float16 and not values.isfinite().all():
        raise CheckpointError(f"{name} has values outside of the range of fp16; export bf16 or fp32")
    return values


def _copy_description(source: Path, folder: Path, dtype: str) -> dict[str, Any] | None:
    """Copy config.json, generation config and tokenizer, and set the dtype in config.json.

    Links are not copied.

    Returns:
        Content of config.json; `None` if the run had no transformers model.

    Raises:
        CheckpointError: config.json is not valid JSON.
    """
    if not (source / "config.json").is_file():
        return None
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.is_symlink():
            shutil.copyfile(file, folder / file.name)
    try:
        config: dict[str, Any] = json.loads(read_regular_file(folder / "config.json", MAX_DESCRIPTION_BYTES))
        config["dtype"] = str(DTYPES_BY_OPTION[dtype]).removeprefix("torch.")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{source / 'config.json'} is not valid JSON ({error}); restore it from a copy"
        ) from None
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return config


def format_model_card(run: Path, manifest: Manifest, dtype: str) -> str:
    """Return the text of README.md: the run's numbers and its recipe, with secrets redacted."""
    state = manifest.state
    loss = manifest.eval_loss
    values = sum(math.prod(shape) for (_, kind), shape in manifest.table.shapes.items() if kind == WEIGHT)
    ranks = f"{manifest.world_size} rank{'s' * (manifest.world_size > 1)}"
    rows = [
        ("parameters", f"{values:,}"),
        ("steps", f"{manifest.global_step:,}"),
        ("tokens or samples seen", f"{int(state.get('tokens_seen') or state.get('samples_seen') or 0):,}"),
        ("evaluation loss", "not measured" if loss is None else f"{loss:.4f}"),
        ("trained as", f"{manifest.split}, {ranks}"),
        ("weights", dtype),
    ]
    table = "\n".join(f"| {label} | {value} |" for label, value in rows)
    try:  # links are not followed, since one may lead out of the run directory
        content = read_regular_file(run / "recipe.yaml", MAX_CONFIGURATION_BYTES, follow_links=False)
        recipe = redact_text(content.decode(errors="replace"))
    except OSError:
        recipe = ""
    return f"# {run.name}\n\n| | |\n|---|---|\n{table}\n\nThe recipe:\n\n```yaml\n{recipe}```\n"
