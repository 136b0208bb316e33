"""An adapter and its base as one model's weights, tensor by tensor: the base as the adapter knew it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.adapters import KEY, dtype_of, layers_in, open_base, refuse_changed_base, where
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.config.model_schema import CausalLMConfig
from pipeline.errors import ModelError, PipelineError, one_line
from pipeline.models.adapter_files import of_peft
from pipeline.models.adapters import NAME
from pipeline.models.weight_files import Entry, OpenCheckpoint, WeightFile
from pipeline.models.weights import matched
from pipeline.optional_packages import require
from pipeline.shards import WEIGHT, Region


class _Drawn:
    """See WeightFile: the first weights of a model of transformers, drawn anew from the run's seed."""

    files: Sequence[Path] = ()

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
