"""Checkpoints of an adapter: which base they belong to, and both together as one model's weights.

A checkpoint's state says what the adapter computes and where its base lies. A digest of every byte of the
base tells whether what lies there still is that base. The checkpoint also records size, time of last change
and inode of each file, so that unchanged files are not read again.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.shards import WEIGHT, Region
from pipeline.config.model_schema import AdapterConfig, CausalLMConfig
from pipeline.config.optional_packages import require
from pipeline.config.schema import RunConfig
from pipeline.data.documents.streams import SETTLED_NANOSECONDS
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, phase
from pipeline.errors import CheckpointError, ModelError, PipelineError, one_line
from pipeline.files import format_bytes
from pipeline.models.adapters import NAME, adapted, of_peft
from pipeline.models.transformers_facts import auto_class_for
from pipeline.models.weights import Entry, OpenCheckpoint, WeightFile, matched, open_hub, open_weights
from pipeline.planner.rank import EMBEDDINGS, WORDS

BASE, FILES = "base", "base_files"  # of what a checkpoint says of its adapter
_PIECE = 1 << 26  # bytes hashed in one call, which holds Python's lock
_QUIET_SECONDS = 3.0
log = logging.getLogger(__name__)


def stamps_of(files: Sequence[Path]) -> list[list[Any]]:
    """Return path, size, time of last change and inode of each file; nothing if one changed just now."""
    stats = [(str(path.absolute()), path.stat()) for path in files]
    if any(time.time_ns() - stat.st_mtime_ns < SETTLED_NANOSECONDS for _, stat in stats):
        return []  # it may change again within the same tick of the clock
    return [[path, stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, stat in stats]


@phase(Phase.WEIGHTS)
def digest_of(file: WeightFile, known: Mapping[str, Any]) -> str:
    """Return the digest of names, shapes, dtypes and values.

    Args:
        file: Weights to digest. They are not read if their files are those that `known` lists.
        known: What a checkpoint states about its adapter.
    """
    before = str(known.get(BASE, {}).get("digest") or "")
    if before and known.get(FILES) and known[FILES] == stamps_of(file.files):
        return before
    digest, begin, done, is_told = xxhash.xxh3_128(), time.monotonic(), 0, False
    for name in sorted(file.entries):
        entry = file.entries[name]
        digest.update(f"{name} {list(entry.shape)} {entry.dtype}".encode())
        values = file.read(name).flatten().contiguous()
        for piece in values.view(torch.uint8).split(_PIECE):
            digest.update(piece.numpy().data)
            done += len(piece)
            if not is_told and time.monotonic() - begin > _QUIET_SECONDS:
                is_told = True
                size = sum(
                    math.prod(each.shape) * each.dtype.itemsize
                    for each in file.entries.values()
                    if isinstance(each.dtype, torch.dtype)
                )
                log.info(
                    "reading all weights of the adapter's base to detect changes: %s of %s",
                    format_bytes(done),
                    format_bytes(size),
                )
    return digest.hexdigest()


KEY = "adapter"  # in the state of a checkpoint


def described(
    config: RunConfig,
    model: nn.Module,
    job: Job,
    open_checkpoint: OpenCheckpoint,
    checkpoint: Manifest | None = None,
) -> dict[str, Any]:
    """What a run's checkpoints say of its adapter; nothing of a run without one. Collective.

    Args:
        checkpoint: The run resumes from it.

    Raises:
        ModelError: the base cannot be read.
    """
    if config.adapter is None:
        return {}
    own = next((_computed(layer) for _, layer in adapted(model)), None)
    computed = next(each for each in job.gather_object(own) if each is not None)  # a stage may have none
    known = {} if checkpoint is None else checkpoint.state.get(KEY, {})
    base = job.on_main(lambda: _base(config, open_checkpoint, known))
    return {KEY: computed | base | _quantised(config.adapter, model)}


def lasting(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `described` says, without what changes if the same base is copied or touched."""
    return {
        key: {name: value for name, value in said.items() if name != FILES} for key, said in about.items()
    }


def _quantised(config: AdapterConfig, model: nn.Module) -> dict[str, Any]:
    """How the base is held, and which of its layers so."""
    if config.quantize is None:
        return {}
    from pipeline.models.quantised import quantised_layers

    return {"quantize": config.quantize, "quantized": [name for name, _ in quantised_layers(model)]}


def _computed(layer: Any) -> dict[str, Any]:
    """What all layers of peft's in a model have in common."""
    return {
        "alpha": layer.lora_alpha[NAME],
        "dora": bool(layer.use_dora[NAME]),
        "rslora": bool(layer.use_rslora[NAME]),
        "transposed": bool(layer.fan_in_fan_out or getattr(layer.get_base_layer(), "is_transposed", False)),
    }


def refuse_other_base(then: Mapping[str, Any], now: Mapping[str, Any], run: Path) -> None:
    """Of a run that goes on.

    Raises:
        CheckpointError: its adapter was trained over other weights.
    """
    before, after = (each.get(KEY, {}).get("base", {}) for each in (then, now))
    if before.get("digest") != after.get("digest"):
        raise CheckpointError(
            f"{run}: its adapter was trained over other weights than {where(after)} holds now; bring "
            f"back those of {where(before)}, or start a new run"
        )


def where(base: Mapping[str, Any]) -> str:
    return str(base.get("weights") or base.get("pretrained") or "the seed")


def refuse_changed_base(manifest: Manifest, file: WeightFile) -> None:
    """Refuse weights that are not those an adapter was trained over.

    Raises:
        CheckpointError: they are others.
    """
    about = manifest.state[KEY]
    if digest_of(file, about) != about[BASE]["digest"]:
        raise CheckpointError(
            f"{manifest.folder} is an adapter, and {where(about[BASE])}, its base, holds other weights than "
            "those it was trained over; bring those back"
        )


def refuse_changed_base_if_here(manifest: Manifest, open_checkpoint: OpenCheckpoint) -> None:
    """Refuse a changed base where the run had its own. An adapter is exported where there is none, too.

    Raises:
        CheckpointError: it holds other weights.
    """
    base = manifest.state[KEY][BASE]
    if not (base["weights"] or base["pretrained"]):
        return
    try:
        file = open_base(base, open_checkpoint)
    except ModelError as error:
        log.info("the adapter's base is not compared with the one it was trained over: %s", error)
        return
    with closing(file):
        refuse_changed_base(manifest, file)


def _base(config: RunConfig, open_checkpoint: OpenCheckpoint, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return where it lies, its digest, and the files that this was found in."""
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
        files = stamps_of(file.files)
        return {BASE: base | {"digest": digest_of(file, known)}, FILES: files}


def open_base(base: Mapping[str, Any], open_checkpoint: OpenCheckpoint) -> WeightFile:
    if base["weights"] is not None:
        return open_weights(Path(base["weights"]), open_checkpoint)
    pretrained = str(base["pretrained"])
    if Path(pretrained).is_dir():
        return open_weights(Path(pretrained), open_checkpoint)
    return open_hub(pretrained)


def layers_in(names: Iterable[str]) -> list[str]:
    """Those that have an adapter, of a checkpoint's names."""
    end = f".lora_A.{NAME}.weight"
    return [name.removesuffix(end) for name in names if name.endswith(end)]


def peft_names(manifest: Manifest) -> dict[str, str]:
    """Name in a file of peft's -> name in the checkpoint. An embedding that is the output layer too has both
    names there.
    """
    names = [name for name, kind in manifest.table.shapes if kind == WEIGHT]
    found = {of_peft(name): name for name in names}
    if _described(manifest).get("tie_word_embeddings"):
        embedding = next((name for name in names if name.endswith(WORDS)), None)
        if embedding is not None:
            found[of_peft("lm_head.weight")] = embedding
    return found


def dtype_of(entry: Entry) -> torch.dtype:
    """Of what can be trained over.

    Raises:
        ModelError: it is none of a model's weights.
    """
    if not isinstance(entry.dtype, torch.dtype):
        raise ModelError(f"the base holds {entry.dtype}, into which no adapter can be merged")
    return entry.dtype


def write_peft_config(manifest: Manifest, folder: Path) -> None:
    """adapter_config.json, from what the checkpoint says.

    Raises:
        CheckpointError: it does not say enough.
        ConfigError: peft is not installed.
    """
    require("peft", "exporting an adapter", "merge it into its base with --merge")
    from peft import LoraConfig

    about, shapes = manifest.state[KEY], manifest.table.shapes
    names = [name for name, kind in shapes if kind == WEIGHT]
    layers = layers_in(names)
    if not layers:
        raise CheckpointError(f"{manifest.folder} holds no adapter")
    whole = sorted({name.rpartition(".")[0] for name in names if ".lora_" not in name})
    described = _described(manifest)
    # peft warns where it is asked to keep together what the adapter leaves alone.
    trains_words = any(f"{name}.weight".endswith(EMBEDDINGS) for name in whole)
    (rank, _) = shapes[f"{layers[0]}.lora_A.{NAME}.weight", WEIGHT]
    LoraConfig(
        r=rank,
        lora_alpha=about["alpha"],
        target_modules=layers,
        modules_to_save=whole or None,
        use_rslora=about["rslora"],
        use_dora=about["dora"],
        fan_in_fan_out=about["transposed"],
        base_model_name_or_path=where(about["base"]),
        task_type="CAUSAL_LM" if auto_class_for(described) == "AutoModelForCausalLM" else "SEQ_CLS",
        inference_mode=True,
        ensure_weight_tying=trains_words and bool(described.get("tie_word_embeddings")),
    ).save_pretrained(str(folder))


def _described(manifest: Manifest) -> dict[str, Any]:
    """The model's config.json; empty where there is none."""
    config = manifest.folder.parent.parent / "model" / "config.json"
    try:
        found = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _Drawn:
    """See WeightFile: the first weights of a model of transformers, drawn anew from the run's seed."""

    files: Sequence[Path] = ()

    def __init__(self, run: Path, base: Mapping[str, Any]):
        from pipeline.models.huggingface import build_described, draw_weights
        from pipeline.models.sharding import Whole

        model = build_described(run / "model", CausalLMConfig(architecture="described"))
        torch.manual_seed(base["seed"])
        draw_weights(model, Whole(), draws=True)
        self._tensors = {name: p.detach() for name, p in model.named_parameters()}
        self.entries: Mapping[str, Entry] = {
            n: Entry(tuple(t.shape), t.dtype) for n, t in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors.clear()


class MergedWeights:
    """See WeightFile: what the adapter of a checkpoint and its base come to together, tensor by tensor, in
    the base's precision, worked out in fp32.
    """

    files: Sequence[Path] = ()

    def __init__(self, manifest: Manifest, open_checkpoint: OpenCheckpoint):
        """Opens both.

        Raises:
            ModelError: the base is not there any more, or lacks a layer.
            CheckpointError: the base holds other weights than the adapter was trained over.
        """
        self._about = manifest.state[KEY]
        run, base = manifest.folder.parent.parent, self._about["base"]
        self._reader = CheckpointReader(manifest)
        shapes = {name: shape for (name, kind), shape in self._reader.names().items() if kind == WEIGHT}
        self._layers = set(layers_in(shapes))
        self._rounding = Rounding(self._about) if self._about.get("quantize") else None
        self._whole = {name: shape for name, shape in shapes.items() if of_peft(name).count(".lora_") == 0}
        try:
            if base["weights"] or base["pretrained"]:
                self._base: WeightFile = open_base(base, open_checkpoint)
            else:
                self._base = _Drawn(run, base)
        except PipelineError as error:
            raise ModelError(f"{manifest.folder} is an adapter, and its base: {one_line(error)}") from None
        if not isinstance(self._base, _Drawn):
            refuse_changed_base(manifest, self._base)
        keys = list(self._base.entries)
        wanted = {f"{layer}.weight" for layer in self._layers.union(self._about.get("quantized", ()))}
        self._keys = matched(keys, wanted | set(self._whole))
        if missing := sorted(wanted - set(self._keys)):
            raise ModelError(
                f"{manifest.folder} is an adapter, and {where(base)}, its base, has no {missing[0]}"
            )
        given = {key: name for name, key in self._keys.items()}
        # What has no adapter is named by what stands before all that has (`module.`).
        fronts = {key.removesuffix(name) for name, key in self._keys.items()}
        front = fronts.pop() if len(fronts) == 1 else ""
        self._names = {given.get(key, key.removeprefix(front)): key for key in keys}
        self.entries: Mapping[str, Entry] = {
            **{name: self._base.entries[key] for name, key in self._names.items()},
            **{name: Entry(shape, torch.float32) for name, shape in self._whole.items()},
        }

    def read(self, name: str) -> Tensor:
        if name in self._whole:
            return self._trained(name)
        values = self._base.read(self._names[name])
        layer, dtype = name.removesuffix(".weight"), values.dtype
        if layer == name:
            return values
        if self._rounding is not None:
            values = self._rounding.of(layer, values)
        if layer not in self._layers:
            return values.to(dtype)
        low, high = (self._trained(f"{layer}.lora_{side}.{NAME}.weight") for side in "AB")
        about = self._about
        scale = about["alpha"] / (math.sqrt(len(low)) if about["rslora"] else len(low))
        whole = values.float().T if about["transposed"] else values.float()
        whole = whole + scale * (high @ low)
        if about["dora"]:
            lengths = self._trained(f"{layer}.lora_magnitude_vector.{NAME}.weight")
            whole = whole * (lengths / torch.linalg.norm(whole, dim=1))[:, None]
        return (whole.T if about["transposed"] else whole).contiguous().to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the base's layers that have an adapter."""
        return dtype_of(self._base.entries[self._keys[f"{min(self._layers)}.weight"]])

    @property
    def rounding_error(self) -> float | None:
        """||W - W in 4 bits|| / ||W|| over the quantised layers that were read; None: none is quantised."""
        return None if self._rounding is None else self._rounding.error

    def _trained(self, name: str) -> Tensor:
        shape = self._reader.names()[name, WEIGHT]
        values = torch.empty(math.prod(shape))
        self._reader.read(name, WEIGHT, Region(shape, None, 0, len(values)), values)
        return values.view(shape)

    def close(self) -> None:
        self._reader.close()
        self._base.close()


class Rounding:
    """The base that a QLoRA run trained over: its weights are quantised again, and taken back to numbers."""

    def __init__(self, about: Mapping[str, Any]):
        """
        Raises:
            ConfigError: bitsandbytes is not installed.
        """
        require("bitsandbytes", "merging an adapter whose base is in nf4")
        from pipeline.models.quantised import packed, unpacked

        self._round = lambda weight: unpacked(packed(weight))
        self._layers = frozenset(about["quantized"])
        self._is_transposed = about["transposed"]
        self._off = self._whole = 0.0

    def of(self, layer: str, values: Tensor) -> Tensor:
        """A layer's weight as the run had it, in fp32; as it is, where the layer was not quantised."""
        if layer not in self._layers:
            return values
        exact = values.float()
        rounded: Tensor = self._round(exact.T).T if self._is_transposed else self._round(exact)
        self._off += float((rounded - exact).double().square().sum())
        self._whole += float(exact.double().square().sum())
        return rounded

    @property
    def error(self) -> float:
        """Relative, of all that was rounded."""
        return math.sqrt(self._off / self._whole) if self._whole else 0.0
