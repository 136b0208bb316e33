"""Adapters by peft: which linear layers get one, its first values, and what of the model is trained.

The model itself, the base, is frozen, and no checkpoint holds it. First values depend on the seed and a
parameter's name alone, so that they are the same under every split.
"""

from __future__ import annotations

import difflib
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.adapter_schema import AdapterConfig
from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError, ModelError
from pipeline.models.adapter_files import PeftFolder
from pipeline.models.sharding import Sharding
from pipeline.models.vocabulary import vocabulary_parameters
from pipeline.models.weights import fill

log = logging.getLogger(__name__)

NAME = "default"  # peft's, of the only adapter of a model
RANK, ALPHA = 32, 32.0
_NEAREST = 3


def is_base(parameter: Tensor) -> bool:
    """Whether it is the base's under an adapter: frozen, and in no checkpoint."""
    return getattr(parameter, "is_base", False)


def learning_rate_for(model: nn.Module) -> float:
    """Thinking Machines' fit of the best rate for adapters on 27 models (tinker-cookbook, 2025): it depends
    on the width of the model and its family, and not on the rank.
    """
    config = getattr(model, "config", None)
    width = getattr(config, "hidden_size", None) or 2000
    power = 0.0775 if str(getattr(config, "model_type", "")).startswith("qwen") else 0.781
    return float(5e-5 * 10 * (2000 / width) ** power)


def add_adapter(model: nn.Module, config: AdapterConfig, seed: int, sharding: Sharding, job: Job) -> None:
    """Gives the model its adapters, and freezes all else of it but `modules_to_save`. Collective.

    Args:
        job: Rank 0 reads `config.weights`.

    Raises:
        ConfigError: a name matches nothing; the rank is too large.
        ModelError: `config.weights` cannot be read, or is of another model.
    """
    given = PeftFolder.shared(config.weights, job) if config.weights is not None else None
    config = config if given is None else given.completed(config)
    linears = _linears(model)
    targets = _targets(config, model, linears)
    rank = config.rank or RANK
    for name in targets:
        smaller = min(linears[name])
        if rank > smaller:
            raise ConfigError(
                f"adapter.rank is {rank}, and {name} is a matrix of {linears[name][0]} x {linears[name][1]}: "
                f"expected {smaller} at the most, or leave the layer out of adapter.targets"
            )
    whole = _trained_whole(config, model) + [
        model.get_parameter(name) for name in getattr(model, "drawn_beside_weights", ())
    ]
    embeddings = [p for p in vocabulary_parameters(model) if getattr(p, "has_new_rows", False)]
    _inject(model, peft_config(config, targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        if any(parameter is each for each in (*whole, *embeddings)):
            parameter.requires_grad_(True)
        else:
            parameter.is_base = True  # type: ignore[attr-defined]
    if config.kind == "dora":
        _add_magnitudes(model, sharding)
    _fill(model, config, seed, given)
    if given is not None:
        names = dict(model.named_parameters(remove_duplicate=False))
        for name, values in given.whole().items():
            fill(names[name], values if job.ranks.is_main_process else None, sharding, job)
    trained = sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters() if p.requires_grad)
    log.info(
        "adapter: %s of rank %d, alpha %g, on %d linear layers%s: %s parameters are trained",
        *(config.kind, rank, config.alpha or ALPHA, len(targets)),
        f"; {len(whole) + len(embeddings)} tensors are trained whole" if whole or embeddings else "",
        f"{trained:,}",
    )


def peft_config(config: AdapterConfig, targets: Iterable[str] = ()) -> Any:
    """peft's LoraConfig.

    Args:
        targets: Full names of the layers.
    """
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank or RANK,
        lora_alpha=config.alpha or ALPHA,  # type: ignore[arg-type] # any number is taken
        lora_dropout=config.dropout,
        target_modules=list(targets),
        use_rslora=config.kind == "rslora",
        use_dora=config.kind == "dora",
    )


def adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """peft's layers in the model, by the names that the model's own have."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def has_adapter(model: nn.Module) -> bool:
    """Whether one was added."""
    return any(True for _ in adapted(model))


def _linears(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The linear layers, and of each (outputs, inputs)."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of transformers' GPT-2
            found[name] = (module.nf, module.nx)
    return found


def _output_layer(model: nn.Module) -> nn.Module | None:
    layer: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return layer


def _targets(config: AdapterConfig, model: nn.Module, linears: Mapping[str, Any]) -> list[str]:
    head = _output_layer(model)
    names = [name for name in linears if head is None or model.get_submodule(name) is not head]
    if not names:
        raise ModelError("adapter: the model has no linear layer that could get one")
    if config.targets is None:
        return names
    found: dict[str, None] = {}
    for pattern in config.targets:
        its = _matching(pattern, linears, "adapter.targets", "linear layer")
        if kept := sorted(set(its) - set(names)):
            raise ConfigError(
                f"adapter.targets: {pattern!r} matches {kept[0]}, the output layer, which gets no adapter; "
                "adapter.modules_to_save trains it whole"
            )
        found.update(dict.fromkeys(its))
    return [name for name in names if name in found]


def _trained_whole(config: AdapterConfig, model: nn.Module) -> list[nn.Parameter]:
    names = [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    ]
    found = []
    for pattern in config.modules_to_save or ():
        for name in _matching(pattern, names, "adapter.modules_to_save", "module"):
            found += list(model.get_submodule(name).parameters())
    return found


def _matching(pattern: str, names: Iterable[str], key: str, what: str) -> list[str]:
    """A pattern of whole names, or a name's last parts, as peft has it."""
    names = list(names)
    found = [n for n in names if fnmatchcase(n, pattern) or n.endswith(f".{pattern}")]
    if found:
        return found
    last = {name.rpartition(".")[2] for name in names}
    near = difflib.get_close_matches(pattern, [*last, *names], _NEAREST, cutoff=0.0)
    raise ConfigError(f"{key}: {pattern!r} matches no {what} of the model; nearest: {', '.join(near)}")


def _inject(model: nn.Module, config: Any) -> None:
    """Has peft put its layers in, without values: what it would draw depends on what this rank holds."""
    from peft import inject_adapter_in_model

    config.use_dora = False  # peft would read whole weights, which this rank may not have
    inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)


def _add_magnitudes(model: nn.Module, sharding: Sharding) -> None:
    """DoRA's: of each output the length of its row of weights. Collective."""
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.tuners.lora.variants import DoraLinearVariant

    for _, layer in adapted(model):
        base = layer.get_base_layer()
        with sharding.whole([base.weight]), torch.no_grad():
            weight = base.weight.detach()
            lengths = torch.linalg.norm(weight.T if layer.fan_in_fan_out else weight, dim=1).float()
        layer.use_dora[NAME] = True
        layer.lora_variant[NAME] = DoraLinearVariant()
        layer.lora_magnitude_vector[NAME] = magnitude = DoraLinearLayer(fan_in_fan_out=layer.fan_in_fan_out)
        magnitude.weight = nn.Parameter(lengths)


@torch.no_grad()
def _fill(model: nn.Module, config: AdapterConfig, seed: int, given: PeftFolder | None) -> None:
    """First values of what is trained beside the model: where the layers' own weights are, and in their
    precision, but never nowhere.
    """
    taken: set[str] = set()
    for name, layer in adapted(model):
        weight = layer.get_base_layer().weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        for part, parameter in list(layer.named_parameters()):
            if part.startswith("base_layer."):
                continue
            if given is not None:
                values = given.take(f"{name}.{part}", tuple(parameter.shape))
                taken.add(f"{name}.{part}")
            elif parameter.is_meta:
                values = first_values(f"{name}.{part}", parameter.shape, config, seed)
            else:
                values = parameter.detach()
            owner = layer.get_submodule(part.rpartition(".")[0])
            owner.weight = nn.Parameter(values.to(device, weight.dtype))
    if given is not None:
        given.refuse_others(taken)


def first_values(name: str, shape: torch.Size, config: AdapterConfig, seed: int) -> Tensor:
    """Of a parameter, as peft has them: of A uniform within 1 / sqrt(inputs), or normal; of B 0."""
    if ".lora_B." in f".{name}":
        return torch.zeros(shape)
    # Of a seed torch takes 32 bits.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.empty(shape)
    if config.init == "gaussian":
        return values.normal_(0.0, 1 / shape[0], generator=generator)
    limit = 1 / math.sqrt(shape[1])
    return values.uniform_(-limit, limit, generator=generator)


# An adapter stores about two bits a parameter, text has about one bit a token (LoRA Without Regret, 2025).
BITS_A_PARAMETER, BITS_A_TOKEN = 2.0, 1.0


def more_than_it_holds(model: nn.Module, parts: int, num_tokens: int) -> str | None:
    """What to say of training data with more in it than an adapter can take up.

    Args:
        parts: Into which the model is cut; `model` is one of them.
        num_tokens: Different ones that are trained on, context and padding too.
    """
    own = (int(getattr(p, "ds_numel", p.numel())) for p in model.parameters() if p.requires_grad)
    trained = parts * sum(own)
    room = int(trained * BITS_A_PARAMETER / BITS_A_TOKEN)
    if num_tokens <= room:
        return None
    return (
        f"the training data has up to {num_tokens:,} tokens, and {trained:,} trained parameters hold what is "
        f"in about {room:,}: if the loss stays behind that of training all weights, raise adapter.rank"
    )
