"""The choice of a model's attention function, and the test that it keeps packed documents apart.

Both are tried, not looked up: a model of the same class with two layers and few words must give the same
logits under DocumentAttention as under transformers' own attention, for whole rows and for a row's second
document. Otherwise transformers' attention is used, and one line of the log says so.

transformers is imported only in the functions that need it; see transformers_facts.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline.errors import ModelError
from pipeline.models.document_attention import (
    ATTENTION_NAME,
    BOUNDS_KEY,
    BoundsHook,
    DocumentAttention,
    disable_cudnn_attention,
    empty_bounds,
    find_document_bounds,
)
from pipeline.models.transformers_facts import caps_scores, is_transformers_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

TWIN_LAYERS = 2
TWIN_WORDS = 64
TWIN_WINDOW = 3  # smaller than the trial's documents of four tokens, so the window has an effect
TWIN_WIDTH = 64  # of MLPs, so the twin of an 8B model has 0.1 B parameters, not 0.4 B
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim")

CAUSAL_FIELDS = ("is_decoder", "causal")
"""Fields of configs that turn an encoder into a decoder."""

AttentionFunction = Callable[..., tuple[Any, Any]]
"""Function of (module, query, key, value, mask, **rest) that returns the output and weights or `None`.

The output is (B, T, heads, width).
"""


def resolve_attention_name(attention: str, config: PreTrainedConfig) -> str | None:
    """Return transformers' name for the recipe's `model.attention`; `None`: transformers chooses.

    Raises:
        ModelError: The recipe asks for sdpa, which ignores the cap on scores of this model.
    """
    if caps_scores(config):
        if attention == "sdpa":
            raise ModelError(
                f"model.attention: sdpa ignores the cap on attention scores of a {config.model_type}; write "
                "auto or eager"
            )
        return "eager" if attention == "auto" else attention
    return None if attention == "auto" else attention


def get_attention_function(name: str) -> AttentionFunction:
    """Return the function that is registered as `attn_implementation: <name>`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS[name]
    return function


def register_attention(name: str, function: AttentionFunction) -> None:
    """Register `attn_implementation: <name>`. Models that use it get no mask: the function is causal."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)


def choose_attention(model: PreTrainedModel, is_auto: bool, device: torch.device) -> None:
    """Set DocumentAttention as the model's attention if it gives the logits of transformers' attention.

    Args:
        model: The model, changed in place.
        is_auto: Whether the recipe leaves the choice open.
        device: The device that trains.
    """
    given = str(model.config.get_text_config()._attn_implementation)
    if device.type == "cuda":
        disable_cudnn_attention()
    if is_auto:
        reason = find_unsupported_feature(model)
        if reason is None:
            model.set_attn_implementation(ATTENTION_NAME)
            log.debug("attention: by document, without a mask")  # the usual case
        else:
            log.info("attention: transformers' %s, since %s", given, reason)
    else:
        log.info("attention: transformers' %s", given)
    register_bounds_hooks(model, given)


@torch.no_grad()
def find_unsupported_feature(model: PreTrainedModel) -> str | None:
    """Return the feature of a model that DocumentAttention lacks, in words; `None` if it lacks none."""
    register_attention(ATTENTION_NAME, DocumentAttention())
    config: Any = model.config.get_text_config()
    if model.config.is_encoder_decoder or not getattr(config, "is_causal", True):
        return "the model is not decoder-only"
    if not model._supports_attention_backend and not model._can_set_attn_implementation():
        return "the model's code computes attention itself"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"the model has layers of {', '.join(sorted(kinds))}"
    trial = build_small_model(model)
    if trial is None:
        return f"no small {type(model).__name__} could be built to test attention by document with"
    rows = build_trial_rows(torch.device("cpu"))
    ids = rows["input_ids"]
    options = {"use_cache": False}
    try:
        expected = (trial(ids, **options).logits, trial(ids[:, 4:], **options).logits)
        trial.set_attn_implementation(ATTENTION_NAME)
        found = (
            trial(ids, **{BOUNDS_KEY: empty_bounds(ids.device)}, **options).logits,
            trial(**rows).logits[:, 4:],
        )
    except Exception as error:  # a model that calls its attention differently may raise anything
        return f"the test of attention by document failed ({str(error)[:80]})"
    if any((a - b).abs().max() > 1e-4 * b.abs().max() for a, b in zip(found, expected, strict=True)):
        return "attention by document changes the model's logits"
    return None


def build_small_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a model of the same class with two layers and few words, in evaluation; `None` if it fails."""
    config: Any = copy.deepcopy(model.config)
    text = config.get_text_config()
    try:
        text.num_hidden_layers = min(TWIN_LAYERS, text.num_hidden_layers)
        if getattr(text, "layer_types", None):  # begin with one layer of each kind
            kinds = list(dict.fromkeys(text.layer_types)) + text.layer_types
            text.layer_types = kinds[: text.num_hidden_layers]
        if getattr(text, "sliding_window", None):
            text.sliding_window = min(TWIN_WINDOW, text.sliding_window)
        for name in WIDTHS:
            width = getattr(text, name, None)
            if isinstance(width, int):
                setattr(text, name, min(width, TWIN_WIDTH))
        text.vocab_size = TWIN_WORDS
        # Some models count positions from the padding token, so it must be in the small vocabulary.
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(text, name, None) is not None:  # not all configs have each, and some refuse None
                setattr(text, name, 0)
        config._attn_implementation = None
        with torch.random.fork_rng(devices=[]):  # leaves the run's random numbers as they are
            torch.manual_seed(0)
            twin: PreTrainedModel = type(model)(config)
    except Exception:  # the class may not accept the reduced config
        return None
    twin.config._attn_implementation = model.config._attn_implementation
    return twin.eval()


def build_trial_rows(device: torch.device) -> dict[str, Any]:
    """Return two rows of two documents that differ in the first document."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(1, TWIN_WORDS, (1, 8), generator=generator).repeat(2, 1)
    ids_BT[1, :4] = (ids_BT[1, :4] + 1) % TWIN_WORDS
    positions_BT = torch.arange(4).repeat(2, 2)
    rows = {"input_ids": ids_BT, "position_ids": positions_BT, BOUNDS_KEY: find_document_bounds(positions_BT)}
    return {**{key: value.to(device) for key, value in rows.items()}, "use_cache": False}


def register_bounds_hooks(model: PreTrainedModel, given: str) -> None:
    """Let the model's forward pass the bounds of documents on to its attention; see BoundsHook."""
    hook = BoundsHook(given)
    model.register_forward_pre_hook(hook.before, with_kwargs=True)
    model.register_forward_hook(hook.after, always_call=True)


@torch.no_grad()
def refuse_lookahead(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a language model whose logits at a token change with later tokens, as an encoder's do.

    This is tried on a small model of the class with the model's attention, on the device that trains. With
    DocumentAttention it need not be tried, since that never attends to later tokens.

    Args:
        model: The model.
        device: The device that trains.
        dtype: The dtype that the model computes in.

    Raises:
        ModelError: The logits change; the message names the config field that prevents it, if there is one.
    """
    config: Any = model.config
    attention = config.get_text_config()._attn_implementation
    trial = None if attention == ATTENTION_NAME else build_small_model(model)
    if trial is None:
        return
    dtype = dtype if "flash" in str(attention) else torch.float32  # small effects show in fp32
    ids_BT = build_trial_rows(device)["input_ids"].flip(1)  # the two rows differ in their second half
    try:
        one_TV, other_TV = trial.to(device, dtype)(input_ids=ids_BT, use_cache=False).logits[:, :4].float()
    except Exception:  # a model that needs more than ids may raise anything
        log.debug("no trial with later tokens", exc_info=True)
        return
    if _differ(one_TV, other_TV, dtype):
        fields = [field for field in CAUSAL_FIELDS if getattr(config, field, None) is False]
        cure = f"write model.extra: {{{fields[0]}: true}}, or " if fields else ""
        raise ModelError(
            f"model: {type(model).__name__} ({config.model_type}) sees the tokens that it predicts: its "
            f"logits change with later tokens, as an encoder's do; {cure}use a decoder"
        )


@torch.no_grad()
def refuse_document_leaks(
    model: nn.Module, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Refuse a model in which `position_ids` that start again do not keep documents of a row apart.

    This is tried with the model's attention, on the device and in the precision that train.

    Args:
        model: The model.
        device: The device that trains; `None`: the CPU.
        dtype: The dtype that the model computes in.

    Raises:
        ModelError: Documents of a row see each other, or this cannot be tried.
    """
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise _build_leak_error(name, "takes no position_ids")
    if not is_transformers_model(model):
        return
    mixers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if model._is_stateful or any("attention" not in mixer or "linear" in mixer for mixer in mixers):
        raise _build_leak_error(name, "passes a state on from token to token")
    trial = build_small_model(model)
    device = device or torch.device("cpu")
    if trial is None:
        raise _build_leak_error(name, "cannot be tested on a small copy")
    register_bounds_hooks(trial.to(device, dtype), str(trial.config._attn_implementation))
    one_TV, other_TV = trial(**build_trial_rows(device)).logits[:, 4:].float()
    if _differ(one_TV, other_TV, dtype):
        raise _build_leak_error(name, "attends to other documents whatever the position_ids")


def _differ(one_TV: Tensor, other_TV: Tensor, dtype: torch.dtype) -> bool:
    """Return whether logits differ by more than rounding, which changes with the group an expert computes."""
    allowed = 1e-4 if dtype == torch.float32 else 2e-2
    return bool((one_TV - other_TV).abs().max() > allowed * one_TV.abs().max())


def _build_leak_error(name: str, why: str) -> ModelError:
    return ModelError(
        f"model: a {name} {why}, so documents in one row would see each other; set "
        "data.separate_documents=false to accept that"
    )
