"""Adapters of peft: the layers that get one, its initial values, and the parameters that are trained.

peft's layers are put into the model. peft's wrapper around a model is not used, so the model keeps its class
of transformers, which attention, blocks, stages and losses rely on. `modules_to_save` are trained in place,
without peft's second copy. The base is frozen and marked (`is_base`), and no checkpoint has it. Initial
values depend on the seed and a parameter's name alone: under pipeline stages, no rank has all parameters.

The folder of an adapter is as peft writes it: adapter_config.json, and safetensors under peft's names. Rank 0
reads it for all ranks, and a pickle (adapter_model.bin) is refused.
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.model_schema import DEFAULT_ADAPTER_ALPHA, DEFAULT_ADAPTER_RANK, AdapterConfig
from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError, ModelError, format_names, summarize_error
from pipeline.files import MAX_CONFIGURATION_BYTES, find_unsafe_files, read_regular_file
from pipeline.models.embeddings import find_vocabulary_parameters
from pipeline.models.frozen_base import (
    FrozenBasePlacement,
    HalfBasePlacement,
    accept_fp32_inputs,
    find_adapter_targets,
    find_fully_trained,
    find_linear_layers,
    is_transposed,
)
from pipeline.models.sharding import Sharding, count_elements
from pipeline.models.weights import SafetensorsFiles, fill_tensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
PEFT_PREFIX = "base_model.model."
ADAPTER_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")  # submodules of peft's layer with parameters
ADAPTER_NAME = "default"  # peft's name for the only adapter of a model
# Keys of adapter_config.json that change the computation and are not supported here. The value of each is
# the only one that is accepted, besides an empty one.
UNSUPPORTED_KEYS = {
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

log = logging.getLogger(__name__)

# peft imports bitsandbytes if it is installed. On some CPUs that warns of a missing kernel for inference.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def to_peft_name(name: str, adapter: str = ADAPTER_NAME) -> str:
    """Return the name that a model's parameter has in a file of peft, which omits the adapter's name."""
    parts = name.split(".")
    peft_parts = [part for part in parts if part != adapter]
    if len(peft_parts) < len(parts) and "lora_magnitude_vector" in peft_parts:
        peft_parts = peft_parts[:-1]  # peft's file omits `.weight` here
    return PEFT_PREFIX + ".".join(peft_parts)


@dataclass
class PeftFolder:
    """The content of an adapter's folder."""

    path: Path
    config: dict[str, Any]
    """Content of adapter_config.json. It has a rank `r` and a `lora_alpha`; see _check_rank_and_alpha."""
    tensors: dict[str, Tensor]
    """Tensors by peft's names, on the CPU."""

    @staticmethod
    def read_on_main(given: str, job: Job) -> PeftFolder:
        """Return the folder's content on every rank, read by rank 0. Collective.

        Args:
            given: The recipe's `adapter.weights`.
            job: The ranks.

        Raises:
            ModelError: The folder cannot be read, its config lacks rank or alpha, or its adapter has a
                feature that is not supported here.
        """
        return job.run_on_main_rank(lambda: _read_folder(Path(os.path.expanduser(given))))

    def complete_config(self, config: AdapterConfig) -> AdapterConfig:
        """Return the recipe's adapter section, completed from the folder.

        Raises:
            ConfigError: Kind, rank or alpha differ between the recipe and the folder.
        """
        folder_config = self.config
        kind = "lora"
        if folder_config.get("use_rslora"):
            kind = "rslora"
        if folder_config.get("use_dora"):
            kind = "dora"
        from_folder = {
            "kind": kind,
            "rank": folder_config["r"],
            "alpha": float(folder_config["lora_alpha"]),
        }
        for key, folder_value in from_folder.items():
            recipe_value = getattr(config, key)
            if recipe_value is not None and recipe_value != folder_value:
                raise ConfigError(
                    f"adapter.{key} is {recipe_value}, but adapter.weights ({self.path}) has {folder_value}; "
                    f"set adapter.{key}={folder_value}"
                )
        targets = [
            name.removesuffix(".lora_A.weight") for name in self._iterate_names() if ".lora_A." in name
        ]
        if config.targets is None:
            from_folder["targets"] = targets
        if config.modules_to_save is None:
            modules = sorted({name.rpartition(".")[0] for name in self.get_fully_trained()})
            from_folder["modules_to_save"] = modules or None
        return config.model_copy(update=from_folder)

    def get_values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the values for the parameter of the adapter that has this name in the model.

        Raises:
            ModelError: The folder has no such values, or they have another shape.
        """
        values = self.tensors.get(to_peft_name(name))
        if values is None:
            raise ModelError(
                f"adapter.weights: {self.path} lacks {to_peft_name(name)}, which adapter.targets asks for; "
                "match only layers that the adapter has, or leave adapter.targets out"
            )
        if tuple(values.shape) != shape:
            raise ModelError(
                f"adapter.weights: {self.path} is an adapter of another model: {to_peft_name(name)} has "
                f"shape {list(values.shape)}, expected {list(shape)}; give an adapter of this model"
            )
        return values

    def get_fully_trained(self) -> dict[str, Tensor]:
        """Return the tensors of modules that were trained whole, not adapted, by their names in the model."""
        return {
            name: self.tensors[PEFT_PREFIX + name]
            for name in self._iterate_names()
            if not any(f".{part}" in f".{name}" for part in ADAPTER_PARTS)
        }

    def refuse_missing_layers(self, layers: Iterable[str]) -> None:
        """Raise a ModelError if the folder has no tensors for a layer that its config lists by name.

        Args:
            layers: Names of the model's linear layers.
        """
        names = self.config.get("target_modules")
        has_exceptions = self.config.get("layers_to_transform") or self.config.get("exclude_modules")
        if not isinstance(names, list) or has_exceptions:
            return  # only peft can tell which layers a pattern, or names with exceptions, choose
        ends = tuple(f".{name}" for name in names)
        listed = [layer for layer in layers if f".{layer}".endswith(ends)]
        if missing := [name for name in listed if f"{PEFT_PREFIX}{name}.lora_A.weight" not in self.tensors]:
            raise ModelError(
                f"adapter.weights: {self.path / WEIGHTS_FILE} lacks {format_names(missing)}, which "
                f"target_modules in {CONFIG_FILE} lists; save or fetch the adapter again"
            )

    def refuse_unused_adapters(self, used_names: set[str]) -> None:
        """Raise a ModelError if the folder has adapters of layers that get none in this model.

        Args:
            used_names: Names in the model of the adapter's parameters that got values from the folder.
        """
        adapter_names = self.tensors.keys() - {PEFT_PREFIX + name for name in self.get_fully_trained()}
        if unused := sorted(adapter_names - {to_peft_name(name) for name in used_names}):
            raise ModelError(
                f"adapter.weights: {self.path} has {format_names(unused)}, but no layer of this model gets "
                "them; give an adapter of this model, or match their layers in adapter.targets"
            )

    def _iterate_names(self) -> Iterator[str]:
        return (name.removeprefix(PEFT_PREFIX) for name in self.tensors)


def _read_folder(path: Path) -> PeftFolder:
    """Return the content of an adapter's folder. Nothing in it is executed.

    Raises:
        ModelError: The folder cannot be read, its config lacks rank or alpha, or its adapter has a feature
            that is not supported here.
    """
    start = f"adapter.weights: {path}"
    if not path.is_dir():
        raise ModelError(f"{start}: there is no such folder; give a folder that peft's save_pretrained wrote")
    config = check_peft_folder(path, start)
    kind = config["peft_type"]
    if kind != "LORA":
        raise ModelError(f"{start}: {CONFIG_FILE} has peft_type {kind}, expected LORA; give a LoRA adapter")
    for key, neutral in UNSUPPORTED_KEYS.items():
        if (value := config.get(key)) and value != neutral:
            raise ModelError(
                f"{start}: {CONFIG_FILE} has {key} {value!r}, which is not supported; give an adapter that "
                f"was trained with {neutral!r}"
            )
    _check_rank_and_alpha(config, start)
    file = SafetensorsFiles({path / WEIGHTS_FILE: None}, "adapter.weights")
    try:
        tensors = {name: file.read(name) for name in file.entries}
    finally:
        file.close()
    for name, values in tensors.items():
        if not values.isfinite().all():
            raise ModelError(
                f"{start}/{WEIGHTS_FILE}: {name} has values that are not finite (NaN or infinite); "
                "give an adapter from before the loss diverged"
            )
    return PeftFolder(path, config, tensors)


def apply_peft_folder(model: Any, folder: Path) -> Any:
    """Put the adapter of a folder on a model as peft does, and return peft's wrapper of the model.

    Adapters that peft puts into layers are supported, such as LoRA with `rank_pattern` or a bias. The layers
    are added to `model` itself.

    Args:
        model: Base of the adapter, of transformers. Its embeddings get as many rows as the adapter's have.
        folder: Folder with CONFIG_FILE and WEIGHTS_FILE; see check_peft_folder.

    Raises:
        ModelError: The adapter cannot be read, does not belong to this model, or changes the model's inputs.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    with closing(SafetensorsFiles({folder / WEIGHTS_FILE: None}, str(folder))) as file:
        entries = file.entries
    advice = "give the base that the adapter was trained on: --base FOLDER_OR_HUB_NAME"
    embedding = model.get_input_embeddings()
    (name,) = (name for name, module in model.named_modules() if module is embedding)
    entry = entries.get(f"{PEFT_PREFIX}{name}.weight")
    if entry is not None and entry.shape[0] > len(embedding.weight):
        model.resize_token_embeddings(entry.shape[0], mean_resizing=False)
    device = next(model.parameters()).device
    try:
        config = PeftConfig.from_pretrained(str(folder))
        if config.is_prompt_learning or config.peft_type == "XLORA":  # X-LoRA reads further folders
            raise ModelError(
                f"{folder}: {CONFIG_FILE} has peft_type {config.peft_type.value}, which is no adapter of "
                "layers alone; give one of layers, such as LORA"
            )
        if getattr(config, "megatron_config", None):
            raise ModelError(
                f"{folder}: {CONFIG_FILE} has a megatron_config, for which peft imports a module that the "
                "file names; write null there"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of missing tensors, which are an error below
            wrapped = PeftModel.from_pretrained(model, str(folder), config=config, torch_device=str(device))
        expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    except (OSError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{folder} does not fit its base: {summarize_error(error, 300)}; {advice}") from None
    for problem, tensors in (
        ("lacks", expected.keys() - entries.keys()),
        ("has tensors that no layer takes:", entries.keys() - expected.keys() - wrapped.state_dict().keys()),
    ):
        if tensors:
            raise ModelError(
                f"{folder} does not fit its base: {WEIGHTS_FILE} {problem} {format_names(sorted(tensors))}; "
                f"{advice}"
            )
    return wrapped


def check_peft_folder(path: Path, start: str) -> dict[str, Any]:
    """Return the content of CONFIG_FILE of an adapter's folder whose weights are safetensors.

    Args:
        path: The folder.
        start: The start of the message.

    Raises:
        ModelError: The folder or its config cannot be read, or its weights are no safetensors.
    """
    if problem := next(find_unsafe_files(path), None):
        raise ModelError(f"{start}: {problem}; remove or replace it")
    try:
        config: dict[str, Any] = json.loads(read_regular_file(path / CONFIG_FILE, MAX_CONFIGURATION_BYTES))
        _ = str(config["peft_type"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ModelError(
            f"{start} has no {CONFIG_FILE} that can be read; give a folder that peft's save_pretrained wrote"
        ) from None
    if not (path / WEIGHTS_FILE).is_file():
        if (path / PICKLE_FILE).exists():
            raise ModelError(
                f"{start} has {PICKLE_FILE}, a pickle, which could run code and is not opened; save the "
                f"adapter as {WEIGHTS_FILE} (peft's save_pretrained does)"
            )
        raise ModelError(f"{start} lacks {WEIGHTS_FILE}; save or fetch the adapter again")
    return config


def _check_rank_and_alpha(config: dict[str, Any], start: str) -> None:
    """Refuse a folder whose config does not say rank and alpha, since only the training that wrote it knows.

    Args:
        config: The content of adapter_config.json.
        start: The start of the message.

    Raises:
        ModelError: `r` is no whole number above 0, or `lora_alpha` is no number above 0.
    """
    keys = (("r", int, "the rank, a whole number"), ("lora_alpha", (int, float), "a number"))
    for key, types, expected in keys:
        value: Any = config.get(key)
        is_number = isinstance(value, types) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            given = f"has {key} {value!r}" if key in config else f"has no {key}"
            raise ModelError(
                f"{start}: {CONFIG_FILE} {given}, expected {expected} above 0; save or fetch the adapter "
                "again, or write the value that it was trained with"
            )


def is_base(parameter: Tensor) -> bool:
    """Return whether a parameter belongs to the base under an adapter: frozen, and in no checkpoint."""
    # On a CPU, peft's DoRA replaces a weight in 4 bits with a copy without the mark in each forward.
    return getattr(parameter, "is_base", False) or hasattr(parameter, "quant_state")


def suggest_learning_rate(model: nn.Module) -> float:
    """Return a good learning rate for an adapter, by Thinking Machines' fit on 27 models.

    The fit (tinker-cookbook, 2025) depends on the width of the model and on whether it is a Qwen, not on the
    adapter's rank. A model without a known width gets the rate of width 2000.
    """
    config = getattr(model, "config", None)
    width = getattr(config, "hidden_size", None) or 2000
    is_qwen = str(getattr(config, "model_type", "")).startswith("qwen")
    power = 0.0775 if is_qwen else 0.781
    return float(5e-5 * 10 * (2000 / width) ** power)


def add_adapter(
    model: nn.Module,
    config: AdapterConfig,
    seed: int,
    sharding: Sharding,
    job: Job,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add the recipe's adapter to the model, and freeze the model's own parameters. Collective.

    Trained besides the adapter are `modules_to_save`, a reward model's score layer, and embeddings that got
    new rows.

    Args:
        model: The model, changed in place.
        config: The recipe's adapter section.
        seed: The seed of the initial values.
        sharding: The placement in which the model was built: a QuantizedBasePlacement if `config.quantize` is
            set. In any FrozenBasePlacement, the adapter's parameters are fp32; otherwise they have the dtype
            of their layer's weight.
        job: The ranks, of which rank 0 reads `config.weights`.
        dtype: The dtype that layers with weights in 4 bits compute in.

    Raises:
        ConfigError: A name in the recipe matches nothing.
        ModelError: `config.weights` cannot be read, or belongs to another model.
    """
    folder = PeftFolder.read_on_main(config.weights, job) if config.weights is not None else None
    config = config if folder is None else folder.complete_config(config)
    layers = find_linear_layers(model)
    if folder is not None:
        folder.refuse_missing_layers(layers)
    targets = find_adapter_targets(config, model, layers)
    fully_trained = find_fully_trained(config, model)
    grown_embeddings = [p for p in find_vocabulary_parameters(model) if getattr(p, "has_new_rows", False)]
    if config.quantize is not None:
        from pipeline.models.quantized import quantize_base

        quantize_base(model, fully_trained, sharding, dtype)
    elif isinstance(sharding, HalfBasePlacement):
        accept_fp32_inputs(model, fully_trained, sharding)
    _inject_layers(model, build_peft_config(config, targets), is_4_bit=config.quantize is not None)
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue  # a parameter of the adapter; peft has frozen all others
        if any(parameter is each for each in (*fully_trained, *grown_embeddings)):
            parameter.requires_grad_(True)
        else:
            parameter.is_base = True  # type: ignore[attr-defined]
    if config.kind == "dora":
        _add_magnitudes(model, sharding)
    adapter_dtype = torch.float32 if isinstance(sharding, FrozenBasePlacement) else None
    _set_initial_values(model, config, seed, folder, adapter_dtype)
    if folder is not None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, values in folder.get_fully_trained().items():
            own_values = values if job.ranks.is_main_process else None
            fill_tensor(parameters[name], own_values, sharding, job)
    trained_elements = sum(count_elements(p) for p in model.parameters() if p.requires_grad)
    rank = config.rank or DEFAULT_ADAPTER_RANK
    alpha = config.alpha or DEFAULT_ADAPTER_ALPHA
    description = f"{config.kind} of rank {rank}, alpha {alpha:g}, on {len(targets)} linear layers"
    if fully_trained or grown_embeddings:
        description += f"; {len(fully_trained) + len(grown_embeddings)} tensors are trained whole"
    log.info("adapter: %s: %s parameters are trained", description, f"{trained_elements:,}")


def build_peft_config(config: AdapterConfig, targets: Iterable[str] = ()) -> Any:
    """Return peft's LoraConfig for the recipe's adapter section.

    Args:
        config: The recipe's adapter section.
        targets: Full names of the layers that get an adapter.
    """
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank or DEFAULT_ADAPTER_RANK,
        lora_alpha=config.alpha or DEFAULT_ADAPTER_ALPHA,  # type: ignore[arg-type] # any number is taken
        lora_dropout=config.dropout,
        target_modules=list(targets),
        use_rslora=config.kind == "rslora",
        use_dora=config.kind == "dora",
    )


def find_adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield peft's layers in the model under the names of the layers that they wrap."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def has_adapter(model: nn.Module) -> bool:
    """Return whether the model has an adapter."""
    return any(True for _ in find_adapter_layers(model))


def measure_reduced_base(model: nn.Module) -> tuple[int, int]:
    """Return the number of values, and their bytes, in weights of the base that are stored in less than fp32.

    These weights have another dtype than the trained parameters: 4 bits, or the dtype in which autocast
    multiplies. Both numbers are 0 without such weights.
    """
    trained_dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    weights = [p for p in model.parameters() if is_base(p) and p.dtype not in trained_dtypes]
    return sum(map(count_elements, weights)), sum(map(_count_bytes, weights))


def _count_bytes(weight: Tensor) -> int:
    if not hasattr(weight, "quant_state"):
        return weight.numel() * weight.element_size()
    from pipeline.models.quantized import count_nf4_bytes

    return count_nf4_bytes(weight)


def _inject_layers(model: nn.Module, config: Any, is_4_bit: bool) -> None:
    """Let peft add its layers without values, since its draws would depend on the layers of this rank.

    Args:
        model: The model, changed in place.
        config: peft's LoraConfig, changed in place.
        is_4_bit: Whether the base is quantized.
    """
    from peft import inject_adapter_in_model

    config.use_dora = False  # peft would read whole weights, of which this rank may have only a shard
    config.fan_in_fan_out = all(is_transposed(model.get_submodule(name)) for name in config.target_modules)
    if is_4_bit:
        model.is_loaded_in_4bit = True  # type: ignore[assignment] # makes peft accept bitsandbytes' layers
    inject_adapter_in_model(config, model, ADAPTER_NAME, low_cpu_mem_usage=True)
    if is_4_bit:
        del model.is_loaded_in_4bit  # with it, transformers would count parameters in another way


def _add_magnitudes(model: nn.Module, sharding: Sharding) -> None:
    """Add DoRA's magnitudes: the norm of each output's row of weights. Collective."""
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.tuners.lora.variants import DoraLinearVariant

    for _, layer in find_adapter_layers(model):
        base = layer.get_base_layer()
        with sharding.gather([base.weight]), torch.no_grad():
            weight = _dequantize(base.weight)
            norms = torch.linalg.norm(weight.T if layer.fan_in_fan_out else weight, dim=1).float()
        layer.use_dora[ADAPTER_NAME] = True
        layer.lora_variant[ADAPTER_NAME] = DoraLinearVariant()
        layer.lora_magnitude_vector[ADAPTER_NAME] = magnitude = DoraLinearLayer(
            fan_in_fan_out=layer.fan_in_fan_out
        )
        magnitude.weight = nn.Parameter(norms)


def _dequantize(weight: Tensor) -> Tensor:
    """Return a weight's values: as they are, or in fp32 if the weight is in 4 bits."""
    if not hasattr(weight, "quant_state"):
        return weight.detach()
    from pipeline.models.quantized import unpack_nf4

    return unpack_nf4(weight)  # type: ignore[arg-type]


@torch.no_grad()
def _set_initial_values(
    model: nn.Module, config: AdapterConfig, seed: int, folder: PeftFolder | None, dtype: torch.dtype | None
) -> None:
    """Set the initial values of the adapter's parameters, on the devices of the layers' weights.

    Args:
        model: The model with peft's layers.
        config: The completed adapter section.
        seed: The seed of the initial values.
        folder: The folder of `adapter.weights`, or `None`.
        dtype: The dtype of the parameters; `None`: the dtype of the layer's own weight.
    """
    used_names: set[str] = set()
    for name, layer in find_adapter_layers(model):
        weight = layer.get_base_layer().weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        for part, parameter in list(layer.named_parameters()):
            if part.startswith("base_layer."):
                continue
            if folder is not None:
                values = folder.get_values(f"{name}.{part}", tuple(parameter.shape))
                used_names.add(f"{name}.{part}")
            elif parameter.is_meta:
                values = draw_adapter_values(f"{name}.{part}", parameter.shape, config, seed)
            else:  # DoRA's magnitudes, which _add_magnitudes has set
                values = parameter.detach()
            owner = layer.get_submodule(part.rpartition(".")[0])
            owner.weight = nn.Parameter(values.to(device, dtype or weight.dtype))
    if folder is not None:
        folder.refuse_unused_adapters(used_names)


def draw_adapter_values(name: str, shape: torch.Size, config: AdapterConfig, seed: int) -> Tensor:
    """Return initial values as peft draws them: A uniform within 1 / sqrt(inputs) or normal, and B zero."""
    if ".lora_B." in f".{name}":
        return torch.zeros(shape)
    # A checksum of 32 bits, since torch uses no more bits of a seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.empty(shape)
    if config.init == "gaussian":
        return values.normal_(0.0, 1 / shape[0], generator=generator)
    limit = 1 / math.sqrt(shape[1])
    return values.uniform_(-limit, limit, generator=generator)
