"""The folder in which transformers keeps a model, written by pipeline stages: a file of weights each.

`model.pretrained: <folder>` starts from it, in stages or whole.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pipeline.models.staging import Layer, LayeredModel


@dataclass(frozen=True)
class FolderPart:
    """One stage's part of the folder in which transformers keeps the whole model."""

    layers: list[Layer]
    files: dict[str, str]
    """Each weight of the whole model, and the file it lies in."""
    elements: int
    config: Any
    generation_config: Any

    def write_weights(self, folder: Path) -> None:
        """This stage's file.

        Raises:
            OSError: it cannot be written.
        """
        weights = {name: weight for layer in self.layers for name, weight in layer.weights().items()}
        file = self.files[next(iter(weights))]
        # Under DeepSpeed parameters are views into one buffer, which a file cannot express.
        whole = {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}
        try:
            save_file(whole, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from None

    def write_description(self, folder: Path, dtype: torch.dtype) -> None:
        """What there is once: config.json, and which weight lies in which file."""
        config = copy.deepcopy(self.config)
        config.use_cache, config.dtype = True, dtype
        config.save_pretrained(folder)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)
        index = {"metadata": {"total_size": self.elements * dtype.itemsize}, "weight_map": self.files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def folder_part(model: LayeredModel, bounds: list[int], stage: int) -> FolderPart:
    """What a stage writes of the whole model; stage s holds layers bounds[s] up to bounds[s + 1]."""
    last = len(model.layers) - model.is_tied  # transformers writes a tied weight once
    files: dict[str, str] = {}
    elements = 0
    for index, start in enumerate(bounds[:-1]):
        file = f"model-{index + 1:05d}-of-{len(bounds) - 1:05d}.safetensors"
        for layer in model.layers[start : min(bounds[index + 1], last)]:
            weights = layer.weights()
            files |= dict.fromkeys(weights, file)
            elements += sum(weight.numel() for weight in weights.values())
    held = model.layers[bounds[stage] : min(bounds[stage + 1], last)]
    return FolderPart(held, files, elements, model.config, model.generation_config)
