"""Describes an adapter and its base in checkpoints, checks the base, and merges both into one model.

A checkpoint of an adapter's run does not contain the weights of the base model. Its state records the
adapter's settings and the path of its base. A digest of every byte of the base shows whether it has changed.
The size, modification time and inode of each file are recorded, too, so that unchanged files are not read
again.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.reader import CheckpointWeights
from pipeline.checkpoint.shard_file import as_bytes
from pipeline.checkpoint.shards import WEIGHT
from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.model_schema import AdapterConfig
from pipeline.config.optional_packages import require_package
from pipeline.config.schema import RunConfig
from pipeline.data.documents.streams import SETTLED_NANOSECONDS
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import CheckpointError, ModelError, PipelineError, summarize_error
from pipeline.files import format_bytes, is_path
from pipeline.models.adapters import ADAPTER_NAME, find_adapter_layers, to_peft_name
from pipeline.models.transformers_facts import choose_auto_class
from pipeline.models.weights import (
    OpenCheckpoint,
    TensorEntry,
    WeightFile,
    match_names,
    open_hub,
    open_weights,
)
from pipeline.planner.rank import EMBEDDING_NAMES, INPUT_EMBEDDING_NAMES

STATE_KEY = "adapter"  # in the state of a checkpoint
BASE = "base"  # keys inside STATE_KEY
BASE_FILES = "base_files"
SLOW_READ_BYTES = 2e9  # reading more takes some seconds
HASH_CHUNK_BYTES = 1 << 26  # per call; each call holds the GIL
log = logging.getLogger(__name__)


class MissingBaseError(ModelError):
    """The folder of an adapter's base does not exist."""


def read_file_stamps(files: Sequence[Path]) -> list[list[Any]]:
    """Return path, size, modification time and inode of each file; an empty list if one changed just now."""
    stats = [(str(path.absolute()), path.stat()) for path in files]
    if any(time.time_ns() - stat.st_mtime_ns < SETTLED_NANOSECONDS for _, stat in stats):
        return []  # it may change again within the same tick of the clock
    return [[path, stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, stat in stats]


@tag_errors(Phase.WEIGHTS)
def digest_weights(file: WeightFile, known: Mapping[str, Any]) -> str:
    """Return the digest of names, shapes, dtypes and values.

    Args:
        file: Weights to digest. They are not read if their files are unchanged since `known`.
        known: Description of the adapter in an earlier checkpoint; may be empty.
    """
    before = str(known.get(BASE, {}).get("digest") or "")
    if before and known.get(BASE_FILES) and known[BASE_FILES] == read_file_stamps(file.files):
        return before
    size = sum(path.stat().st_size for path in file.files)
    if size > SLOW_READ_BYTES:
        log.info("reading all weights of the adapter's base to detect changes: %s", format_bytes(size))
    digest = xxhash.xxh3_128()
    for name in sorted(file.entries):
        entry = file.entries[name]
        digest.update(f"{name} {list(entry.shape)} {entry.dtype}".encode())
        for piece in as_bytes(file.read(name)).split(HASH_CHUNK_BYTES):
            digest.update(piece.numpy().data)
    return digest.hexdigest()


def describe_adapter(
    config: RunConfig,
    model: nn.Module,
    job: Job,
    open_checkpoint: OpenCheckpoint,
    checkpoint: Manifest | None = None,
) -> dict[str, Any]:
    """Return the description of a run's adapter for its checkpoints; empty without an adapter. Collective.

    Args:
        config: Recipe of the run.
        model: Model with the adapter's layers, or this rank's part of it.
        job: Ranks of the job.
        open_checkpoint: Opens the base if it is a checkpoint of another run.
        checkpoint: Checkpoint that the run resumes from; `None` for a new run.

    Raises:
        ModelError: The base cannot be read.
    """
    if config.adapter is None:
        return {}
    own_settings = next((_read_layer_settings(layer) for _, layer in find_adapter_layers(model)), None)
    # A pipeline stage may have no adapted layer.
    settings = next(each for each in job.gather_object(own_settings) if each is not None)
    known = {} if checkpoint is None else checkpoint.state.get(STATE_KEY, {})
    base = job.run_on_main_rank(lambda: _describe_base(config, open_checkpoint, known))
    return {STATE_KEY: settings | base | _describe_quantization(config.adapter, model)}


def drop_file_stamps(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter's description without the stamps of the base's files.

    The stamps change when a file is touched.

    Args:
        description: Result of `describe_adapter`.
    """
    return {
        key: {name: value for name, value in values.items() if name != BASE_FILES}
        for key, values in description.items()
    }


def _describe_quantization(config: AdapterConfig, model: nn.Module) -> dict[str, Any]:
    """Return the base's quantization and the names of its quantized layers; empty if it has none."""
    if config.quantize is None:
        return {}
    from pipeline.models.quantized import find_quantized_layers

    return {"quantize": config.quantize, "quantized": [name for name, _ in find_quantized_layers(model)]}


def _read_layer_settings(layer: Any) -> dict[str, Any]:
    """Return the settings that all of peft's layers in a model share."""
    return {
        "alpha": layer.lora_alpha[ADAPTER_NAME],
        "dora": bool(layer.use_dora[ADAPTER_NAME]),
        "rslora": bool(layer.use_rslora[ADAPTER_NAME]),
        "transposed": bool(layer.fan_in_fan_out or getattr(layer.get_base_layer(), "is_transposed", False)),
    }


def refuse_other_base(saved: Mapping[str, Any], current: Mapping[str, Any], directory: Path) -> None:
    """Refuse to resume a run whose adapter was trained on top of another base.

    Args:
        saved: State in the checkpoint.
        current: Description of the adapter by `describe_adapter`.
        directory: Run directory.

    Raises:
        CheckpointError: The two bases have different digests.
    """
    before, after = (each.get(STATE_KEY, {}).get(BASE, {}) for each in (saved, current))
    if before.get("digest") != after.get("digest"):
        raise CheckpointError(
            f"{directory}: its adapter was trained on top of other weights than {format_base(after)} has "
            f"now; restore the weights of {format_base(before)}, or start a new run"
        )


def format_base(base: Mapping[str, Any]) -> str:
    """Return the path or the name of a base, for messages."""
    return str(base.get("weights") or base.get("pretrained") or "random weights from the run's seed")


def refuse_changed_base(manifest: Manifest, file: WeightFile) -> None:
    """Refuse weights that differ from those that an adapter's base had in training.

    Args:
        manifest: Manifest of the adapter's checkpoint.
        file: Weights of the base as they are now.

    Raises:
        CheckpointError: The digests differ.
    """
    about = manifest.state[STATE_KEY]
    if digest_weights(file, about) != about[BASE]["digest"]:
        raise CheckpointError(
            f"{manifest.folder} is an adapter, and its base, {format_base(about[BASE])}, has other weights "
            "than those on top of which the adapter was trained; restore them"
        )


def refuse_changed_base_if_found(manifest: Manifest, open_checkpoint: OpenCheckpoint) -> None:
    """Refuse a changed base. If the base is not at its recorded path, log this and skip the check.

    A base drawn from a seed is not checked.

    Raises:
        CheckpointError: The weights of the base have changed since the adapter was trained.
    """
    base = manifest.state[STATE_KEY][BASE]
    if not (base["weights"] or base["pretrained"]):
        return
    try:
        file = open_base(base, open_checkpoint)
    except ModelError as error:
        log.info("the base of the adapter cannot be opened and is not checked for changes: %s", error)
        return
    with closing(file):
        refuse_changed_base(manifest, file)


def _describe_base(
    config: RunConfig, open_checkpoint: OpenCheckpoint, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return path and digest of the base, and the stamps of its files."""
    model = config.model
    pretrained = model.pretrained_from
    base: dict[str, Any] = {"weights": None, "pretrained": pretrained, "seed": config.seed}
    if model.weights is not None:
        base["weights"] = str(Path(model.weights).expanduser().absolute())
    elif pretrained is None:
        return {BASE: base | {"digest": f"drawn from seed {config.seed}"}}
    elif (folder := Path(pretrained).expanduser()).is_dir():
        base["pretrained"] = str(folder.absolute())
    with closing(open_base(base, open_checkpoint)) as file:
        files = read_file_stamps(file.files)
        return {BASE: base | {"digest": digest_weights(file, known)}, BASE_FILES: files}


def open_base(base: Mapping[str, Any], open_checkpoint: OpenCheckpoint) -> WeightFile:
    """Open the weights of an adapter's base.

    Args:
        base: Description of the base by `describe_adapter`, under the key BASE.
        open_checkpoint: Opens the base if it is a checkpoint of another run.

    Raises:
        ModelError: The weights are not at their path, or were never in a file.
        MissingBaseError: The folder of `model.pretrained` does not exist.
    """
    if base["weights"] is not None:
        return open_weights(Path(base["weights"]), open_checkpoint)
    if base["pretrained"] is None:
        raise ModelError(
            f"the base has random weights, drawn from seed {base['seed']}, which no file contains; train an "
            "adapter on top of model.pretrained or model.weights"
        )
    pretrained = str(base["pretrained"])
    if Path(pretrained).is_dir():
        return open_weights(Path(pretrained), open_checkpoint)
    if is_path(pretrained):
        raise MissingBaseError(f"the folder {pretrained} is missing, which was the base of this adapter")
    return open_hub(pretrained)


def list_adapted_layer_names(names: Iterable[str]) -> list[str]:
    """Return the layers that have an adapter, among the names in a checkpoint."""
    end = f".lora_A.{ADAPTER_NAME}.weight"
    return [name.removesuffix(end) for name in names if name.endswith(end)]


def map_peft_names(manifest: Manifest) -> dict[str, str]:
    """Return the name in the checkpoint for each name in peft's file.

    An embedding that is also the output layer has two names in the file.
    """
    names = [name for name, kind in manifest.table.shapes if kind == WEIGHT]
    found = {to_peft_name(name): name for name in names}
    if _read_model_config(manifest).get("tie_word_embeddings"):
        embedding = next((name for name in names if name.endswith(INPUT_EMBEDDING_NAMES)), None)
        if embedding is not None:
            found[to_peft_name("lm_head.weight")] = embedding
    return found


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return the dtype of a base's tensor.

    Raises:
        ModelError: The dtype does not exist in torch.
    """
    if not isinstance(entry.dtype, torch.dtype):
        raise ModelError(
            f"the base has tensors of dtype {entry.dtype}, which torch does not support, so the adapter "
            "cannot be merged"
        )
    return entry.dtype


def write_peft_config(manifest: Manifest, folder: Path) -> None:
    """Write peft's adapter_config.json from a checkpoint.

    Raises:
        CheckpointError: The checkpoint holds no adapter.
        ConfigError: peft is not installed.
    """
    require_package("peft", "exporting an adapter", "merge it into its base with --merge")
    from peft import LoraConfig

    about = manifest.state[STATE_KEY]
    shapes = manifest.table.shapes
    names = [name for name, kind in shapes if kind == WEIGHT]
    layers = list_adapted_layer_names(names)
    if not layers:
        raise CheckpointError(f"{manifest.folder} holds no adapter")
    full_modules = sorted({name.rpartition(".")[0] for name in names if ".lora_" not in name})
    described = _read_model_config(manifest)
    # peft warns if it has to tie weights that the adapter does not train.
    trains_embedding = any(f"{name}.weight".endswith(EMBEDDING_NAMES) for name in full_modules)
    (rank, _) = shapes[f"{layers[0]}.lora_A.{ADAPTER_NAME}.weight", WEIGHT]
    LoraConfig(
        r=rank,
        lora_alpha=about["alpha"],
        target_modules=layers,
        modules_to_save=full_modules or None,
        use_rslora=about["rslora"],
        use_dora=about["dora"],
        fan_in_fan_out=about["transposed"],
        base_model_name_or_path=about[BASE].get("weights") or about[BASE].get("pretrained"),
        task_type="CAUSAL_LM" if choose_auto_class(described) == "AutoModelForCausalLM" else "SEQ_CLS",
        inference_mode=True,
        ensure_weight_tying=trains_embedding and bool(described.get("tie_word_embeddings")),
    ).save_pretrained(str(folder))


def _read_model_config(manifest: Manifest) -> dict[str, Any]:
    """Return the model's config.json; empty if there is none."""
    run_directory = manifest.folder.parent.parent  # the checkpoint is RUN/checkpoints/STEP
    config = run_directory / "model" / "config.json"
    try:
        found = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class MergedWeights:
    """Merged weights of an adapter and its base, tensor by tensor; see WeightFile.

    They are computed in fp32 and returned in the base's precision. A base in 4 bits is quantized again from
    the original weights, so no checkpoint has a copy of it.
    """

    files: Sequence[Path] = ()
    buffers: Collection[str] = ()

    def __init__(self, manifest: Manifest, open_checkpoint: OpenCheckpoint):
        """Open the adapter and its base.

        Raises:
            ModelError: The base cannot be opened, or lacks a layer.
            CheckpointError: The weights of the base have changed since the adapter was trained.
        """
        self._about = manifest.state[STATE_KEY]
        base = self._about[BASE]
        self._adapter = CheckpointWeights(manifest)
        self._layers = set(list_adapted_layer_names(self._adapter.entries))
        self._rounding = QuantizationRounding(self._about) if self._about.get("quantize") else None
        self._full_tensors = {
            name: entry
            for name, entry in self._adapter.entries.items()
            if ".lora_" not in to_peft_name(name) and name not in self._adapter.buffers
        }
        try:
            self._base = open_base(base, open_checkpoint)
        except PipelineError as error:
            advice = ""
            if isinstance(error, MissingBaseError):
                to_peft = format_pipeline_command("export", manifest.folder, "ADAPTER")
                to_model = format_pipeline_command("export", "ADAPTER", "OUT", "--merge", "--base", "FOLDER")
                advice = f"; if it was moved to FOLDER, merge both there: {to_peft}, then {to_model}"
            reason = summarize_error(error, 600)
            raise ModelError(
                f"{manifest.folder} is an adapter whose base cannot be opened: {reason}{advice}"
            ) from None
        refuse_changed_base(manifest, self._base)
        keys = list(self._base.entries)
        wanted = {f"{layer}.weight" for layer in self._layers.union(self._about.get("quantized", ()))}
        self._adapted_keys = match_names(keys, wanted | set(self._full_tensors))
        if missing := sorted(wanted - set(self._adapted_keys)):
            raise ModelError(
                f"{manifest.folder} is an adapter, and its base, {format_base(base)}, has no {missing[0]}"
            )
        name_of_key = {key: name for name, key in self._adapted_keys.items()}
        # If all adapted tensors share a prefix such as `module.`, it is removed from the other names, too.
        prefixes = {key.removesuffix(name) for name, key in self._adapted_keys.items()}
        prefix = prefixes.pop() if len(prefixes) == 1 else ""
        self._base_keys = {name_of_key.get(key, key.removeprefix(prefix)): key for key in keys}
        self.entries: Mapping[str, TensorEntry] = {
            **{name: self._base.entries[key] for name, key in self._base_keys.items()},
            **self._full_tensors,
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor of the merged model."""
        if name in self._full_tensors:
            return self._adapter.read(name)
        values = self._base.read(self._base_keys[name])
        if not name.endswith(".weight"):
            return values
        layer = name.removesuffix(".weight")
        dtype = values.dtype
        if self._rounding is not None:
            values = self._rounding.round_as_trained(layer, values)
        if layer not in self._layers:
            return values.to(dtype)
        lora_a, lora_b = (
            self._adapter.read(f"{layer}.lora_{side}.{ADAPTER_NAME}.weight").float() for side in "AB"
        )
        about = self._about
        scale = about["alpha"] / (math.sqrt(len(lora_a)) if about["rslora"] else len(lora_a))
        merged = values.float().T if about["transposed"] else values.float()
        merged = merged + scale * (lora_b @ lora_a)
        if about["dora"]:
            lengths = self._adapter.read(f"{layer}.lora_magnitude_vector.{ADAPTER_NAME}.weight").float()
            merged = merged * (lengths / torch.linalg.norm(merged, dim=1))[:, None]
        return (merged.T if about["transposed"] else merged).contiguous().to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first adapted layer in the base, taken to be the dtype of all."""
        return dtype_of(self._base.entries[self._adapted_keys[f"{min(self._layers)}.weight"]])

    @property
    def rounding_error(self) -> float | None:
        """Relative error ||W - W in 4 bits|| / ||W|| of the layers read; `None` if none is quantized."""
        return None if self._rounding is None else self._rounding.error

    def close(self) -> None:
        """Close the files of adapter and base."""
        self._adapter.close()
        self._base.close()


class QuantizationRounding:
    """Rounds a base's weights as QLoRA did in training: quantizes and dequantizes them.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """

    def __init__(self, about: Mapping[str, Any]):
        require_package("bitsandbytes", "merging an adapter whose base is in nf4")
        from pipeline.models.quantized import pack_nf4, unpack_nf4

        self._round = lambda weight: unpack_nf4(pack_nf4(weight))
        self._layers = frozenset(about["quantized"])
        self._is_transposed = about["transposed"]
        self._error_square = 0.0
        self._total_square = 0.0

    def round_as_trained(self, layer: str, values: Tensor) -> Tensor:
        """Return a layer's weight as it was in training, in fp32; unchanged if it was not quantized."""
        if layer not in self._layers:
            return values
        exact = values.float()
        rounded: Tensor = self._round(exact.T).T if self._is_transposed else self._round(exact)
        self._error_square += float((rounded - exact).double().square().sum())
        self._total_square += float(exact.double().square().sum())
        return rounded

    @property
    def error(self) -> float:
        """Relative error of all that was rounded."""
        return math.sqrt(self._error_square / self._total_square) if self._total_square else 0.0
