"""The choice of a model's attention function, and the test that it keeps packed documents apart.

DocumentAttention is chosen by a test, not from a list of architectures. The test runs a trial model: a model
of the same class with two layers and a small vocabulary. It must give the same logits under DocumentAttention
as under transformers' own attention, for whole rows and for a row's second document. Otherwise transformers'
attention is used, and one line of the log says why. A second test with a trial model refuses models that mix
the documents of a row; see refuse_document_leaks.

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
    build_empty_bounds,
    disable_cudnn_attention,
    find_document_bounds,
)
from pipeline.models.transformers_facts import caps_scores, is_transformers_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

TRIAL_LAYERS = 2
TRIAL_VOCABULARY = 64
TRIAL_DOCUMENT_TOKENS = 4
TRIAL_WINDOW = 3  # tokens, fewer than a document has, so the window has an effect
TRIAL_MLP_WIDTH = 64  # with it, the trial model of an 8B model has 0.1 B parameters, not 0.4 B
# Largest difference of logits, relative to the largest logit, that counts as rounding.
TOLERANCE_FP32 = 1e-4
TOLERANCE_HALF = 2e-2
MLP_WIDTH_FIELDS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_dim",
)

CAUSAL_FIELDS = ("is_decoder", "causal")
"""Fields of configs that turn an encoder into a decoder."""

AttentionFunction = Callable[..., tuple[Any, Any]]
"""Function of (module, query, key, value, mask, **rest) that returns (output, weights).

The output is (B, T, heads, width). The weights are `None` if the function does not compute them.
"""


def resolve_attention_name(attention: str, config: PreTrainedConfig) -> str | None:
    """Return transformers' name for the recipe's `model.attention`; `None`: transformers chooses.

    With `auto`, a model that caps its scores gets `eager`.

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

    On CUDA, torch's choice of attention kernels then excludes cuDNN in this process.

    Args:
        model: The model, changed in place. Hooks are registered on it.
        is_auto: Whether the recipe leaves the choice open (`model.attention: auto`).
        device: The device that trains.
    """
    native_attention = str(model.config.get_text_config()._attn_implementation)
    if device.type == "cuda":
        disable_cudnn_attention()
    if is_auto:
        reason = find_document_attention_obstacle(model)
        if reason is None:
            model.set_attn_implementation(ATTENTION_NAME)
            log.debug("attention: by document, without a mask")  # the usual case
        else:
            log.info("attention: transformers' %s, since %s", native_attention, reason)
    else:
        log.info("attention: transformers' %s", native_attention)
    register_bounds_hooks(model, native_attention)


@torch.no_grad()
def find_document_attention_obstacle(model: PreTrainedModel) -> str | None:
    """Return why a model cannot use DocumentAttention, in words; `None` if it can.

    DocumentAttention is registered with transformers in either case.
    """
    register_attention(ATTENTION_NAME, DocumentAttention())
    config: Any = model.config.get_text_config()
    if model.config.is_encoder_decoder or not getattr(config, "is_causal", True):
        return "the model is not decoder-only"
    if not model._supports_attention_backend and not model._can_set_attn_implementation():
        return "the model's code computes attention itself"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"the model has layers of {', '.join(sorted(kinds))}"
    trial = build_trial_model(model)
    if trial is None:
        return f"no small {type(model).__name__} could be built to test attention by document with"
    rows = build_trial_rows(torch.device("cpu"))
    ids_BT = rows["input_ids"]
    options = {"use_cache": False}
    second = slice(TRIAL_DOCUMENT_TOKENS, None)  # the second document of a row
    try:
        expected_row = trial(ids_BT, **options).logits
        expected_second = trial(ids_BT[:, second], **options).logits
        trial.set_attn_implementation(ATTENTION_NAME)
        bounds = {BOUNDS_KEY: build_empty_bounds(ids_BT.device)}
        actual_row = trial(ids_BT, **bounds, **options).logits
        actual_second = trial(**rows).logits[:, second]
    except Exception as error:  # a model that calls its attention differently may raise anything
        return f"the test of attention by document failed ({str(error)[:80]})"
    if _differ(expected_row, actual_row) or _differ(expected_second, actual_second):
        return "attention by document changes the model's logits"
    return None


def build_trial_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a model of the same class with two layers and a small vocabulary, in evaluation mode.

    Returns:
        The model; `None` if the class cannot be built so small.
    """
    config: Any = copy.deepcopy(model.config)
    text = config.get_text_config()
    try:
        text.num_hidden_layers = min(TRIAL_LAYERS, text.num_hidden_layers)
        if getattr(text, "layer_types", None):  # begin with one layer of each kind
            kinds = list(dict.fromkeys(text.layer_types)) + text.layer_types
            text.layer_types = kinds[: text.num_hidden_layers]
        if getattr(text, "sliding_window", None):
            text.sliding_window = min(TRIAL_WINDOW, text.sliding_window)
        for name in MLP_WIDTH_FIELDS:
            width = getattr(text, name, None)
            if isinstance(width, int):
                setattr(text, name, min(width, TRIAL_MLP_WIDTH))
        text.vocab_size = TRIAL_VOCABULARY
        # Some models count positions from the padding token, so it must be in the small vocabulary.
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(text, name, None) is not None:  # not all configs have each, and some refuse None
                setattr(text, name, 0)
        config._attn_implementation = None
        with torch.random.fork_rng(devices=[]):  # leaves the run's random numbers as they are
            torch.manual_seed(0)
            trial: PreTrainedModel = type(model)(config)
    except Exception:  # the class may not accept the reduced config
        return None
    trial.config._attn_implementation = model.config._attn_implementation
    return trial.eval()


def build_trial_rows(device: torch.device) -> dict[str, Any]:
    """Return a forward's arguments for two rows of two documents each, which differ in the first document."""
    length = TRIAL_DOCUMENT_TOKENS
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(1, TRIAL_VOCABULARY, (1, 2 * length), generator=generator).repeat(2, 1)
    ids_BT[1, :length] = (ids_BT[1, :length] + 1) % TRIAL_VOCABULARY
    positions_BT = torch.arange(length).repeat(2, 2)
    rows = {"input_ids": ids_BT, "position_ids": positions_BT, BOUNDS_KEY: find_document_bounds(positions_BT)}
    return {**{key: value.to(device) for key, value in rows.items()}, "use_cache": False}


def register_bounds_hooks(model: PreTrainedModel, fallback: str) -> None:
    """Let the model's forward pass the bounds of documents on to its attention; see BoundsHook."""
    hook = BoundsHook(fallback)
    model.register_forward_pre_hook(hook.before, with_kwargs=True)
    model.register_forward_hook(hook.after, always_call=True)


@torch.no_grad()
def refuse_lookahead(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a language model whose logits at a token change with later tokens, as an encoder's do.

    The test runs a trial model with the model's attention, on the device that trains. Nothing is tested if no
    trial model can be built or run, or with DocumentAttention, which never attends to later tokens.

    Args:
        model: The model.
        device: The device that trains.
        dtype: The dtype that the model computes in. Only flash attention is tested in it, others in fp32.

    Raises:
        ModelError: The logits change; the message names the config field that prevents it, if there is one.
    """
    config: Any = model.config
    attention = config.get_text_config()._attn_implementation
    trial = None if attention == ATTENTION_NAME else build_trial_model(model)
    if trial is None:
        return
    if "flash" not in str(attention):
        dtype = torch.float32  # in which small effects show
    ids_BT = build_trial_rows(device)["input_ids"].flip(1)  # the two rows differ in their second half
    try:
        logits_BTV = trial.to(device, dtype)(input_ids=ids_BT, use_cache=False).logits
        one_TV, other_TV = logits_BTV[:, :TRIAL_DOCUMENT_TOKENS].float()
    except Exception:  # a model that needs more than ids may raise anything, or return no logits
        log.debug("the test with later tokens failed", exc_info=True)
        return
    if _differ(one_TV, other_TV, dtype):
        fields = [field for field in CAUSAL_FIELDS if getattr(config, field, None) is False]
        advice = f"write model.extra: {{{fields[0]}: true}}, or " if fields else ""
        raise ModelError(
            f"model: {type(model).__name__} ({config.model_type}) sees the tokens that it predicts: its "
            f"logits change with later tokens, as an encoder's do; {advice}use a decoder"
        )


@torch.no_grad()
def refuse_document_leaks(
    model: nn.Module, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Refuse a model that does not keep the documents of a row apart where `position_ids` restart at 0.

    The test runs a trial model of a transformers class with the model's attention, on the device and in the
    precision of training. Any other model only has to take `position_ids`.

    Args:
        model: The model.
        device: The device that trains; `None`: the CPU.
        dtype: The dtype that the model computes in.

    Raises:
        ModelError: Documents of a row see each other, or this cannot be tested.
    """
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise _build_leak_error(name, "takes no position_ids")
    if not is_transformers_model(model):
        return
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if model._is_stateful or any("attention" not in kind or "linear" in kind for kind in kinds):
        raise _build_leak_error(name, "passes a state on from token to token")
    trial = build_trial_model(model)
    device = device or torch.device("cpu")
    if trial is None:
        raise _build_leak_error(name, "cannot be tested on a small copy")
    register_bounds_hooks(trial.to(device, dtype), str(trial.config._attn_implementation))
    one_TV, other_TV = trial(**build_trial_rows(device)).logits[:, TRIAL_DOCUMENT_TOKENS:].float()
    if _differ(one_TV, other_TV, dtype):
        raise _build_leak_error(name, "attends to other documents whatever the position_ids")


def _differ(expected: Tensor, actual: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether logits differ by more than rounding.

    Rounding alone makes a difference where an expert computes another group of tokens.

    Args:
        expected: Logits.
        actual: Logits of the same shape.
        dtype: The dtype in which they were computed.
    """
    tolerance = TOLERANCE_FP32 if dtype == torch.float32 else TOLERANCE_HALF
    return bool((expected - actual).abs().max() > tolerance * expected.abs().max())


def _build_leak_error(name: str, reason: str) -> ModelError:
    return ModelError(
        f"model: a {name} {reason}, so documents in one row would see each other; set "
        "data.separate_documents=false to accept that"
    )
