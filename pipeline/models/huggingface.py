"""Causal language models from transformers: new ones from a config, or with weights from safetensors."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pipeline.config.loading import did_you_mean
from pipeline.config.schema import CausalLMConfig
from pipeline.errors import ModelError
from pipeline.models.request import ModelRequest
from pipeline.models.sharding import Sharding

log = logging.getLogger(__name__)

# The recipe's word -> transformers' word.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "max_sequence_length": "max_position_embeddings",
}


def build_causal_lm(config: CausalLMConfig, request: ModelRequest) -> nn.Module:
    """The model, with its context and vocabulary checked against the data.

    Raises:
        ModelError: unknown architecture or field, weights that are missing or do not fit, a vocabulary
            smaller than the tokenizer's, sequences longer than the model takes.
    """
    if (config.architecture is None) == (config.pretrained is None):
        raise ModelError(
            "model: give exactly one of architecture (new weights) and pretrained (a folder or hub name)"
        )
    if config.pretrained is not None:
        model = _load(config, request)
    else:
        model = _create(config, request)
    model.config.use_cache = False  # keys and values are kept for generation only
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _create(config: CausalLMConfig, request: ModelRequest) -> PreTrainedModel:
    fields = _stated_fields(config)
    fields.setdefault("vocab_size", request.vocab_size)
    if request.sequence_length is not None:
        fields.setdefault("max_position_embeddings", request.sequence_length)
    if fields["vocab_size"] is None:
        raise ModelError("model.vocab_size: the data has no tokenizer; write the number")
    architecture = config.architecture
    if architecture not in CONFIG_MAPPING:
        raise ModelError(f"model.architecture: transformers has no {architecture!r}{_near(architecture)}")
    default = AutoConfig.for_model(architecture)
    for name in [*fields, *config.extra]:
        if not hasattr(default, name):
            raise ModelError(
                f"model: a {architecture} config has no {name}{did_you_mean(name, vars(default))}"
            )
    ends = {"bos_token_id": request.end_of_document_id, "eos_token_id": request.end_of_document_id}
    # Defaults that follow from another field (head_dim, key-value heads) follow from the stated one.
    hf_config = AutoConfig.for_model(architecture, **(ends | fields | config.extra))
    _check_fit(hf_config, config, request)
    try:
        # Weights are drawn below, module by module: the same ones whatever the split.
        with request.sharding.construct(), no_init_weights():
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=torch.float32, attn_implementation=config.attention
            )
    except ValueError as error:
        raise ModelError(f"model: {architecture}: {' '.join(str(error).split())}") from None
    _draw_weights(model, request.sharding)
    return model  # type: ignore[no-any-return]


def _near(architecture: str | None) -> str:
    hint = did_you_mean(architecture or "", CONFIG_MAPPING.keys())
    return hint if "mean" in hint else ""


def _stated_fields(config: CausalLMConfig) -> dict[str, Any]:
    return {
        theirs: getattr(config, ours) for ours, theirs in FIELDS.items() if getattr(config, ours) is not None
    }


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, sharding: Sharding) -> None:
    """transformers' own initialisation, children before parents, each on whole fp32 CPU parameters.

    The random stream is then the same for a whole and for a sharded model, on every rank and device.
    """
    torch.manual_seed(torch.initial_seed())

    def visit(module: nn.Module, initialise: Any) -> None:
        for child in module.children():
            visit(child, child._init_weights if isinstance(child, PreTrainedModel) else initialise)
        own = [p for m in (module, *module.children()) for p in m.parameters(recurse=False)]
        if own:
            with sharding.whole(own):
                initialise(module)
        else:
            initialise(module)

    visit(model, model._init_weights)
    model.tie_weights()


def _load(config: CausalLMConfig, request: ModelRequest) -> PreTrainedModel:
    name = config.pretrained
    trust = config.trust_remote_code
    try:
        hf_config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.pretrained: {name!r}: {_first_sentence(error)}") from None
    stated = _stated_fields(config) | config.extra
    for key, value in stated.items():
        if getattr(hf_config, key, value) != value:
            raise ModelError(
                f"model: {name} has {key} {getattr(hf_config, key)}, the recipe says {value}; "
                "drop it, the weights decide"
            )
    _check_fit(hf_config, config, request)
    keep_alive = None
    if request.sharding.zero3_config is not None:
        from transformers.integrations import HfDeepSpeedConfig

        keep_alive = HfDeepSpeedConfig(request.sharding.zero3_config)  # read while weights are loaded
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            config=hf_config,
            dtype=torch.float32,
            attn_implementation=config.attention,
            use_safetensors=True,
            trust_remote_code=trust,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"model.pretrained: {name!r}: {_first_sentence(error)}") from None
    finally:
        del keep_alive
    problems = {
        key: sorted(map(str, info.get(f"{key}_keys", ()))) for key in ("missing", "unexpected", "mismatched")
    }
    told = [
        f"{key}: {', '.join(names[:5])}{' ...' * (len(names) > 5)}"
        for key, names in problems.items()
        if names
    ]
    if told:
        raise ModelError(f"model.pretrained: the weights in {name!r} do not fit the model; {'; '.join(told)}")
    return model  # type: ignore[no-any-return]


def _check_fit(hf_config: PretrainedConfig, config: CausalLMConfig, request: ModelRequest) -> None:
    rows = hf_config.vocab_size
    if request.vocab_size is not None and rows < request.vocab_size:
        raise ModelError(
            f"model.vocab_size is {rows}, but the tokenizer has {request.vocab_size} entries; "
            "drop model.vocab_size, or use the model's own tokenizer (data.tokenizer.pretrained)"
        )
    longest = getattr(hf_config, "max_position_embeddings", None)
    if longest is not None and request.sequence_length is not None and request.sequence_length > longest:
        raise ModelError(
            f"data.sequence_length is {request.sequence_length}, but the model takes {longest} positions; "
            f"shorten it, or raise model.max_sequence_length of a new model"
        )


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.split(". ")[0][:300]
