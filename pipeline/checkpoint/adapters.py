"""Checkpoints of an adapter: which base they belong to, and both together as one model's weights.

A checkpoint's state says what the adapter computes and where its base lies; a digest tells whether what lies
there still is that base.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.config.model_schema import CausalLMConfig
from pipeline.config.schema import RunConfig
from pipeline.distributed.process_group import Job
from pipeline.errors import CheckpointError, ModelError, PipelineError, one_line
from pipeline.models.adapter_files import of_peft
from pipeline.models.adapters import NAME, adapted
from pipeline.models.weight_files import Entry, OpenCheckpoint, WeightFile, open_hub, open_weights
from pipeline.models.weights import matched
from pipeline.shards import WEIGHT, Region

KEY = "adapter"  # in the state of a checkpoint
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")  # by transformers' names
_FIRST = 1 << 20  # bytes of a tensor that go into the digest


def described(
    config: RunConfig, model: nn.Module, job: Job, open_checkpoint: OpenCheckpoint
) -> dict[str, Any]:
    """What a run's checkpoints say of its adapter; nothing of a run without one. Collective.

    Raises:
        ModelError: the base cannot be read.
    """
    if config.adapter is None:
        return {}
    own = next((_computed(layer) for _, layer in adapted(model)), None)
    computed = next(each for each in job.gather_object(own) if each is not None)  # a stage may have none
    return {KEY: computed | {"base": job.on_main(lambda: _base(config, open_checkpoint))}}


def _computed(layer: Any) -> dict[str, Any]:
    """What all layers of peft's in a model have in common."""
    return {
        "alpha": layer.lora_alpha[NAME],
        "dora": bool(layer.use_dora[NAME]),
        "rslora": bool(layer.use_rslora[NAME]),
        "transposed": bool(layer.fan_in_fan_out),
    }


def refuse_other_base(then: Mapping[str, Any], now: Mapping[str, Any], run: Path) -> None:
    """Of a run that goes on.

    Raises:
        CheckpointError: its adapter was trained over other weights.
    """
    before, after = (each.get(KEY, {}).get("base", {}) for each in (then, now))
    if before.get("digest") != after.get("digest"):
        raise CheckpointError(
            f"{run}: its adapter was trained over other weights than {_where(after)} holds now; bring "
            f"back those of {_where(before)}, or start a new run"
        )


def _where(base: Mapping[str, Any]) -> str:
    return str(base.get("weights") or base.get("pretrained") or "the seed")


def _base(config: RunConfig, open_checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Where it lies, and its digest: of names, shapes and the first MiB of each tensor."""
    model = config.model
    pretrained = getattr(model, "pretrained", None)
    base: dict[str, Any] = {"weights": None, "pretrained": pretrained, "seed": config.seed}
    if model.weights is not None:
        base["weights"] = str(Path(model.weights).expanduser().absolute())
    elif pretrained is None:
        return base | {"digest": f"drawn from seed {config.seed}"}
    elif (folder := Path(pretrained).expanduser()).is_dir():
        base["pretrained"] = str(folder.absolute())
    file = _open_base(base, open_checkpoint)
    try:
        digest = xxhash.xxh3_128()
        for name in sorted(file.entries):
            entry = file.entries[name]
            digest.update(f"{name} {list(entry.shape)} {entry.dtype}".encode())
            values = file.read(name).flatten()
            first = values[: _FIRST // values.element_size()].contiguous().view(torch.uint8)
            digest.update(bytes(first.numpy().data))
        return base | {"digest": digest.hexdigest()}
    finally:
        file.close()


def _open_base(base: Mapping[str, Any], open_checkpoint: OpenCheckpoint) -> WeightFile:
    if base["weights"] is not None:
        return open_weights(Path(base["weights"]), open_checkpoint)
    pretrained = str(base["pretrained"])
    if Path(pretrained).is_dir():
        return open_weights(Path(pretrained), open_checkpoint)
    return open_hub(pretrained)


class _Drawn:
    """See WeightFile: the first weights of a model of transformers, drawn anew from the run's seed."""

    def __init__(self, run: Path, base: Mapping[str, Any]):
        from pipeline.models.huggingface import build_described
        from pipeline.models.initialising import draw_weights
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

    def __init__(self, manifest: Manifest, open_checkpoint: OpenCheckpoint):
        """Opens both.

        Raises:
            ModelError: the base is not there any more, or is another one.
        """
        self._about = manifest.state[KEY]
        run, base = manifest.folder.parent.parent, self._about["base"]
        self._reader = CheckpointReader(manifest)
        shapes = {name: shape for (name, kind), shape in self._reader.names().items() if kind == WEIGHT}
        self._layers = set(_layers(shapes))
        self._whole = {name: shape for name, shape in shapes.items() if of_peft(name).count(".lora_") == 0}
        try:
            if base["weights"] or base["pretrained"]:
                self._base = _open_base(base, open_checkpoint)
            else:
                self._base = _Drawn(run, base)
        except PipelineError as error:
            raise ModelError(f"{manifest.folder} is an adapter, and its base: {one_line(error)}") from None
        keys = list(self._base.entries)
        wanted = {f"{layer}.weight" for layer in self._layers}
        self._keys = matched(keys, wanted | set(self._whole))
        if missing := sorted(wanted - set(self._keys)):
            raise ModelError(
                f"{manifest.folder} is an adapter, and {_where(base)}, its base, has no {missing[0]}"
            )
        given = {key: name for name, key in self._keys.items()}
        self._names = {given.get(key, key): key for key in keys}
        self.entries: Mapping[str, Entry] = {
            **{name: self._base.entries[key] for name, key in self._names.items()},
            **{name: Entry(shape, torch.float32) for name, shape in self._whole.items()},
        }

    def read(self, name: str) -> Tensor:
        if name in self._whole:
            return self._trained(name)
        values = self._base.read(self._names[name])
        layer = name.removesuffix(".weight")
        if layer not in self._layers or layer == name:
            return values
        low, high = (self._trained(f"{layer}.lora_{side}.{NAME}.weight") for side in "AB")
        about = self._about
        scale = about["alpha"] / (math.sqrt(len(low)) if about["rslora"] else len(low))
        whole = values.float().T if about["transposed"] else values.float()
        whole = whole + scale * (high @ low)
        if about["dora"]:
            lengths = self._trained(f"{layer}.lora_magnitude_vector.{NAME}.weight")
            whole = whole * (lengths / torch.linalg.norm(whole, dim=1))[:, None]
        return (whole.T if about["transposed"] else whole).contiguous().to(values.dtype)

    def _trained(self, name: str) -> Tensor:
        shape = self._reader.names()[name, WEIGHT]
        values = torch.empty(math.prod(shape))
        self._reader.read(name, WEIGHT, Region(shape, None, 0, len(values)), values)
        return values.view(shape)

    def close(self) -> None:
        self._reader.close()
        self._base.close()


def _layers(names: Iterable[str]) -> list[str]:
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
        embedding = next((name for name in names if name.endswith(EMBEDDINGS)), None)
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
    """
    from peft import LoraConfig

    about, shapes = manifest.state[KEY], manifest.table.shapes
    names = [name for name, kind in shapes if kind == WEIGHT]
    layers = _layers(names)
    if not layers:
        raise CheckpointError(f"{manifest.folder} holds no adapter")
    whole = sorted({name.rpartition(".")[0] for name in names if ".lora_" not in name})
    described = _described(manifest)
    is_reward = str(described.get("architectures")).endswith("ForSequenceClassification']")
    (rank, _) = shapes[f"{layers[0]}.lora_A.{NAME}.weight", WEIGHT]
    LoraConfig(
        r=rank,
        lora_alpha=about["alpha"],
        target_modules=layers,
        modules_to_save=whole or None,
        use_rslora=about["rslora"],
        use_dora=about["dora"],
        fan_in_fan_out=about["transposed"],
        base_model_name_or_path=_where(about["base"]),
        task_type="SEQ_CLS" if is_reward else "CAUSAL_LM",
        inference_mode=True,
        ensure_weight_tying=bool(described.get("tie_word_embeddings")),
    ).save_pretrained(str(folder))


def _described(manifest: Manifest) -> dict[str, Any]:
    """The model's config.json; empty where there is none."""
    config = manifest.folder.parent.parent / "model" / "config.json"
    try:
        found = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
