"""Checkpoints of an adapter: which base they belong to, and both together as one model's weights.

A checkpoint's state says what the adapter computes and where its base lies; a digest tells whether what lies
there still is that base.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.checkpoint.base_digest import BASE, FILES, digest_of, stamps_of
from pipeline.checkpoint.manifest import Manifest
from pipeline.config.adapter_schema import AdapterConfig
from pipeline.config.schema import RunConfig
from pipeline.distributed.process_group import Job
from pipeline.errors import CheckpointError, ModelError
from pipeline.models.adapter_files import of_peft
from pipeline.models.adapters import NAME, adapted
from pipeline.models.transformers_folder import auto_class_for
from pipeline.models.weight_files import Entry, OpenCheckpoint, WeightFile, open_hub, open_weights
from pipeline.optional_packages import require
from pipeline.planning.cutting import EMBEDDINGS, WORDS
from pipeline.shards import WEIGHT

log = logging.getLogger(__name__)
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
