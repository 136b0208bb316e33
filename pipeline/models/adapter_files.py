"""An adapter's folder as peft has it: adapter_config.json, and safetensors under peft's names.

Read by rank 0 for all. A pickle (adapter_model.bin) is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.config.adapter_schema import AdapterConfig
from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError, ModelError, listed
from pipeline.files import CONFIGURATION_LIMIT, read_plain, unsafe_files
from pipeline.models.weight_files import Safetensors

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")
# What changes what an adapter computes, and is not built here: the value under which it does nothing.
UNBUILT = {
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_bias": False,
    "target_parameters": None,
    "trainable_token_indices": None,
    "layer_replication": None,
    "use_qalora": False,
    "alora_invocation_tokens": None,
}


def of_peft(name: str, adapter: str = "default") -> str:
    """A parameter's name in the model -> in a file of peft's."""
    parts = name.split(".")
    kept = [part for part in parts if part != adapter]
    if len(kept) < len(parts) and "lora_magnitude_vector" in kept:
        kept = kept[:-1]  # it has no `.weight` there
    return PREFIX + ".".join(kept)


@dataclass
class PeftFolder:
    """What is in it."""

    path: Path
    described: dict[str, Any]
    """adapter_config.json."""
    tensors: dict[str, Tensor]
    """By peft's names."""

    @staticmethod
    def shared(given: str, job: Job) -> PeftFolder:
        """Rank 0's reading, on every rank. Collective.

        Raises:
            ModelError: it cannot be read, or holds what is not built here.
        """
        return job.on_main(lambda: _read(Path(os.path.expanduser(given))))

    def completed(self, config: AdapterConfig) -> AdapterConfig:
        """The recipe's section, with what only the folder says.

        Raises:
            ConfigError: both say it, and not the same.
        """
        own = self.described
        kind = "dora" if own.get("use_dora") else "rslora" if own.get("use_rslora") else "lora"
        said = {"kind": kind, "rank": own.get("r"), "alpha": float(own.get("lora_alpha") or 0)}
        for key, theirs in said.items():
            ours = getattr(config, key)
            if ours is not None and ours != theirs:
                raise ConfigError(
                    f"adapter.{key} is {ours}, and that of adapter.weights {theirs} ({self.path}); write "
                    f"adapter.{key}={theirs}"
                )
        targets = [name.removesuffix(".lora_A.weight") for name in self._names() if ".lora_A." in name]
        if config.targets is None:
            said["targets"] = targets
        if config.modules_to_save is None:
            said["modules_to_save"] = sorted({name.rpartition(".")[0] for name in self.whole()}) or None
        return config.model_copy(update=said)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The values of the model's parameter of this name.

        Raises:
            ModelError: there are none, or of another shape.
        """
        values = self.tensors.get(of_peft(name))
        if values is None:
            raise ModelError(
                f"adapter.weights: {self.path} lacks {of_peft(name)}, which adapter.targets asks for"
            )
        if tuple(values.shape) != shape:
            raise ModelError(
                f"adapter.weights: {self.path} is an adapter of another model: {of_peft(name)} is "
                f"{list(values.shape)} there, and {list(shape)} for this one"
            )
        return values

    def whole(self) -> dict[str, Tensor]:
        """Of modules that were trained whole, by the model's names."""
        return {
            name: self.tensors[PREFIX + name]
            for name in self._names()
            if not any(f".{part}" in f".{name}" for part in PARTS)
        }

    def refuse_missing(self, layers: Iterable[str]) -> None:
        """Refuse a file that lacks layers of the model that its config lists.

        Raises:
            ModelError: it does.
        """
        own = self.described
        names = own.get("target_modules")
        if not isinstance(names, list) or own.get("layers_to_transform") or own.get("exclude_modules"):
            return  # a pattern, or one with exceptions
        ends = tuple(f".{name}" for name in names)
        asked = [layer for layer in layers if f".{layer}".endswith(ends)]
        if missing := [name for name in asked if f"{PREFIX}{name}.lora_A.weight" not in self.tensors]:
            raise ModelError(
                f"adapter.weights: {self.path / WEIGHTS} lacks {listed(missing)}, which target_modules of "
                f"{CONFIG} asks for; save or fetch the adapter again"
            )

    def refuse_others(self, taken: set[str]) -> None:
        """Raises a ModelError where the folder has adapters of layers that the model gives none."""
        there = self.tensors.keys() - {PREFIX + name for name in self.whole()}
        if others := sorted(there - {of_peft(name) for name in taken}):
            raise ModelError(
                f"adapter.weights: {self.path} has {listed(others)}, of which this model has no layer; it is "
                "an adapter of another model, or adapter.targets leaves them out"
            )

    def _names(self) -> Iterator[str]:
        return (name.removeprefix(PREFIX) for name in self.tensors)


def _read(path: Path) -> PeftFolder:
    start = f"adapter.weights: {path}"
    if not path.is_dir():
        raise ModelError(f"{start}: there is no such folder")
    if problem := next(unsafe_files(path), None):
        raise ModelError(f"{start}: {problem}; remove or replace it")
    try:
        described = json.loads(read_plain(path / CONFIG, CONFIGURATION_LIMIT))
        kind = str(described["peft_type"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ModelError(f"{start} is no adapter of peft's: it has no {CONFIG} that can be read") from None
    if not (path / WEIGHTS).is_file():
        pickled = (path / PICKLE).exists()
        raise ModelError(
            f"{start} has {PICKLE}, a pickle, which is not opened; save it anew as {WEIGHTS} "
            "(save_pretrained of peft does)"
            if pickled
            else f"{start} lacks {WEIGHTS}"
        )
    if kind != "LORA":
        raise ModelError(f"{start} is a {kind}; what can be taken: LORA")
    for key, nothing in UNBUILT.items():
        if (value := described.get(key)) and value != nothing:
            raise ModelError(f"{start}: {CONFIG} has {key} {value!r}, which is not built here")
    file = Safetensors({path / WEIGHTS: None}, "adapter.weights")
    try:
        tensors = {name: file.read(name) for name in file.entries}
    finally:
        file.close()
    for name, values in tensors.items():
        if not values.isfinite().all():
            raise ModelError(
                f"{start}/{WEIGHTS}: {name} holds values that are not finite (NaN or infinite); "
                "give an adapter from before the loss diverged"
            )
    return PeftFolder(path, described, tensors)
