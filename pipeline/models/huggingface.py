"""Causal language models from transformers: new ones from a config, or with weights from safetensors.

First weights are drawn by transformers' own code, in one order, a few modules at a time: the random stream
is the same for a whole and for a divided model, on every rank and device.

Pretrained weights go into a model of which a rank keeps parts one tensor at a time: transformers'
from_pretrained puts each tensor that it has read, converted and cast in the place of one without values,
and the sharding takes it from there.

A reward model's output layer gives one number, a score, in the place of logits. Its weights have the names
of transformers' sequence classification, which opens what is exported.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import xxhash
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)
from transformers.utils import logging as transformers_logging

from pipeline.config.hub import use_hub_or_cache
from pipeline.config.loading import did_you_mean
from pipeline.config.model_schema import TRANSFORMERS_FIELDS, CausalLMConfig
from pipeline.distributed.progress import Phase, phase
from pipeline.errors import ModelError, summarize_error
from pipeline.models.attention import CAUSAL_FIELDS, resolve_attention_name
from pipeline.models.embeddings import grow_vocabulary
from pipeline.models.sharding import ModelRequest, Sharding
from pipeline.models.transformers_facts import resolve_pretrained
from pipeline.models.weights import draw_parameter, get_quantisation_method


@torch.no_grad()
def initialise_weights(model: PreTrainedModel, sharding: Sharding, draws: bool) -> None:
    """transformers' own initialisation, children before parents, each on whole fp32 CPU parameters.

    Args:
        draws: False: only modules with buffers are initialised, since no checkpoint has all buffers.
    """
    torch.manual_seed(torch.initial_seed())

    def is_due(module: nn.Module) -> bool:
        return draws or next(module.buffers(recurse=False), None) is not None

    def visit(module: nn.Module, how: Any) -> None:
        children = [
            (child, child._init_weights if isinstance(child, PreTrainedModel) else how)
            for child in module.children()
        ]
        # A module may change what its children have drawn. Where these are leaves, all are whole once.
        together = all(next(child.children(), None) is None for child, _ in children)
        if not together:
            for child, its in children:
                visit(child, its)
        due = [(each, its) for each, its in [*(children if together else ()), (module, how)] if is_due(each)]
        own = [p for m in (module, *module.children()) for p in m.parameters(recurse=False)]
        with sharding.gather(own) if own and due else nullcontext():
            for each, its in due:
                its(each)

    visit(model, model._init_weights)
    model.tie_weights()


# transformers reads ahead in threads, as many tensors as they get done.
NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
# What it marks those parameters with that it is not to draw.
READ = "_is_hf_initialized"


@contextmanager
def filled_tensorwise(sharding: Sharding) -> Iterator[None]:
    """Inside it `from_pretrained` may be called once; the model is `made` before its first values come.

    Raises:
        ModelError: see Sharding.divide; the files have two tensors for one that the model ties.
    """
    filling = _Filling(sharding)
    before = os.environ.get(NO_THREADS)
    os.environ[NO_THREADS] = "1"
    hooks = (
        register_module_module_registration_hook(filling.note_parent),
        register_module_parameter_registration_hook(filling.fill),  # type: ignore[arg-type]
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        os.environ.pop(NO_THREADS)
        if before is not None:
            os.environ[NO_THREADS] = before


class _Filling:
    """What torch calls where a module gets a part."""

    def __init__(self, sharding: Sharding):
        self._sharding = sharding
        self._parents: dict[nn.Module, nn.Module] = {}
        self._tied: dict[nn.Parameter, str | None] | None = None
        """Those with several names, and the checksum of what they were filled with; None: nothing was yet."""

    def note_parent(self, module: nn.Module, _: str, child: nn.Module | None) -> None:
        if child is not None:
            self._parents[child] = module

    @torch.no_grad()
    def fill(self, module: nn.Module, name: str, values: nn.Parameter | None) -> nn.Parameter | None:
        """What is registered in the place of `values`; None: they are."""
        if values is None or values.is_meta or not hasattr(values, READ):
            return None
        if module._parameters.get(name) is None:
            return None
        if self._tied is None:
            self._tied = self._make(module)
        parameter = module._parameters[name]  # what it was tied to just now, if it was
        assert parameter is not None
        if parameter is values:
            return None
        if parameter in self._tied:
            self._refuse_two(parameter, name, values)
        with self._sharding.gather([parameter]):
            parameter.data.copy_(values)
        setattr(parameter, READ, True)
        return parameter

    def _make(self, model: nn.Module) -> dict[nn.Parameter, str | None]:
        while model in self._parents:
            model = self._parents[model]
        assert isinstance(model, PreTrainedModel)
        model.tie_weights(recompute_mapping=False)  # transformers does so after it has read them
        self._sharding.divide(model)
        times = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        return {parameter: None for parameter, number in times.items() if number > 1}

    def _refuse_two(self, parameter: nn.Parameter, name: str, values: Tensor) -> None:
        assert self._tied is not None
        found = xxhash.xxh3_64_hexdigest(values.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        if self._tied[parameter] not in (None, found):
            raise ModelError(
                f"model.pretrained: the model has one {name} for input and output, the files have two, which "
                'differ; write "tie_word_embeddings": false into its config.json'
            )
        self._tied[parameter] = found


SCORE = "score.weight"


def is_reward_config(config: PretrainedConfig) -> bool:
    """Whether a folder's configuration is that of a model that scores."""
    names = getattr(config, "architectures", None) or [""]
    return str(names[0]).endswith("ForSequenceClassification") and config.num_labels == 1


def get_model_class(config: PretrainedConfig) -> Any:
    """Of a configuration that says what the model is: has `from_config` and `from_pretrained`."""
    return get_reward_model_class(config) if is_reward_config(config) else AutoModelForCausalLM


def get_reward_model_class(config: PretrainedConfig) -> Any:
    """The class for this configuration, which is made one of a model that scores; it has the auto classes'
    `from_config` and `from_pretrained`.

    Raises:
        ModelError: transformers has none.
    """
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if causal is None or named is None:
        raise ModelError(
            f"objective.kind: reward: transformers has no model of type {config.model_type} for sequence "
            "classification, as which it is exported; use another model"
        )
    config.num_labels = 1
    config.tie_word_embeddings = False
    return _scoring(causal, named.__name__)


@cache
def _scoring(causal: Any, name: str) -> Any:
    ignored = list(getattr(causal, "_keys_to_ignore_on_load_unexpected", None) or ())

    class Scoring(causal):
        # The output layer is neither tied nor cut.
        _tied_weights_keys: ClassVar[dict[str, str]] = {}
        _tp_plan: ClassVar[dict[str, str]] = {}
        _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*ignored, r"^(lm_head|embed_out)\."]
        drawn_beside_weights = (SCORE,)

        def __init__(self, config: Any, *given: Any, **named: Any):
            super().__init__(config, *given, **named)
            head = self.get_output_embeddings()
            self._head_name = next(name for name, child in self.named_children() if child is head)
            del self._modules[self._head_name]
            self.score = nn.Linear(head.in_features, 1, bias=False)

        @property
        def generate(self) -> Any:
            raise AttributeError("it writes no text")

        @classmethod
        def from_config(cls, config: Any, *, trust_remote_code: bool = False, **how: Any) -> Any:
            """As AutoModelForCausalLM has it. The class is there, so no code is fetched."""
            return cls._from_config(config, **how)

        def __getattr__(self, name: str) -> Any:
            is_head = name == self.__dict__.get("_head_name")
            return super().__getattr__("score" if is_head else name)

    Scoring.__name__ = Scoring.__qualname__ = name
    return Scoring


log = logging.getLogger(__name__)

# What transformers raises for values of a config that cannot be.
IMPOSSIBLE = (StrictDataclassError, ImportError, KeyError, RecursionError, TypeError, ValueError)

# Older architectures have words of their own for the width of the MLP.
OWN_WORDS = {"intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size")}


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
    if config.pretrained is not None and config.weights is not None:
        raise ModelError("model: give pretrained or weights, not both; a pretrained model brings its weights")
    model = _load(config, request) if config.pretrained is not None else _create(config, request)
    model.config.use_cache = False  # keys and values are kept for generation only
    model.config.architectures = [type(model).__name__]  # a new config has none, and other tools look for it
    return model


def _create(config: CausalLMConfig, request: ModelRequest) -> PreTrainedModel:
    hf_config = _new_config(config, request)
    _check_fit(hf_config, config, request)
    # The architecture's module comes in here: zero.Init would take the __init__ of classes that are made
    # inside it for their own, and lose what decorators (of experts) add to it.
    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    try:
        # Weights are drawn below, module by module: the same ones whatever the split.
        attention = resolve_attention_name(config.attention, hf_config)
        with request.sharding.construct_empty(), no_init_weights():
            model = _class_of(hf_config, request.gives_scores).from_config(
                hf_config, dtype=torch.float32, attn_implementation=attention
            )
    except (ArithmeticError, AssertionError, ImportError, KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and "negative dimension" not in str(error):
            raise
        extra = f" (model.extra has {', '.join(config.extra)})" if config.extra else ""
        raise ModelError(f"model: {config.architecture}: {_reason(error)}{extra}") from None
    model.tie_weights()  # what is made without values is not tied yet
    request.sharding.divide(model)
    initialise_weights(model, request.sharding, request.draws)
    return model


def _new_config(config: CausalLMConfig, request: ModelRequest) -> PretrainedConfig:
    architecture = config.architecture
    if architecture not in CONFIG_MAPPING:
        raise ModelError(f"model.architecture: transformers has no {architecture!r}{_near(architecture)}")
    default = AutoConfig.for_model(architecture)
    fields = _stated_fields(config, default)
    fields.setdefault("vocab_size", request.vocab_size)
    if fields["vocab_size"] is None:
        raise ModelError("model.vocab_size: the data has no tokenizer; write the number")
    if request.sequence_length is not None and hasattr(default, "max_position_embeddings"):
        fields.setdefault("max_position_embeddings", request.sequence_length)
    heads, groups = fields.get("num_attention_heads"), getattr(default, "num_key_value_heads", None)
    if heads is not None and groups and heads % groups:
        # The architecture's own number is for its own number of heads.
        fields.setdefault("num_key_value_heads", heads)
    ends = {"bos_token_id": request.end_of_document_id, "eos_token_id": request.end_of_document_id}
    try:
        # Defaults that follow from another field (head_dim, key-value heads) follow from the stated one.
        return AutoConfig.for_model(architecture, **(ends | fields))
    except IMPOSSIBLE as error:
        raise ModelError(f"model: {architecture}: {_reason(error)}") from None


def _near(architecture: str | None) -> str:
    hint = did_you_mean(architecture or "", CONFIG_MAPPING.keys())
    return hint if "mean" in hint else ""


def _stated_fields(config: CausalLMConfig, known: PretrainedConfig) -> dict[str, Any]:
    """What the recipe says, in transformers' words; every one of them a field of `known`."""
    fields = dict(config.extra)
    for ours, theirs in TRANSFORMERS_FIELDS.items():
        if theirs in fields:
            raise ModelError(f"model.extra.{theirs}: the recipe calls this model.{ours}; write it there")
        words = (theirs, *OWN_WORDS.get(theirs, ()))
        if (value := getattr(config, ours)) is not None:
            fields[next((word for word in words if hasattr(known, word)), theirs)] = value
    for name in fields:
        if not hasattr(known, name):
            near = did_you_mean(name, (word for word in vars(known) if not word.startswith("_")))
            raise ModelError(f"model: a {known.model_type} config has no {name}{near}")
    for name, value in config.extra.items():
        if name.endswith(("dropout", "drop")) and isinstance(value, (int, float)) and not 0 <= value <= 1:
            raise ModelError(f"model.extra.{name} is {value}; expected 0 to 1")
    return fields


def _load(config: CausalLMConfig, request: ModelRequest) -> PreTrainedModel:
    name, hf_config = read_model_config(config)
    for key, value in _stated_fields(config, hf_config).items():
        if key in CAUSAL_FIELDS:  # which no weight depends on
            setattr(hf_config, key, value)
        may_differ = key == "vocab_size" and config.grow_vocabulary and value > hf_config.vocab_size
        if getattr(hf_config, key) != value and not may_differ:
            raise ModelError(
                f"model: {name} has {key} {getattr(hf_config, key)}, the recipe says {value}; "
                "drop it, the weights decide"
            )
    _check_fit(hf_config, config, request)
    rows = max(request.vocab_size or 0, config.vocab_size or 0)
    grows = config.grow_vocabulary and rows > hf_config.get_text_config().vocab_size
    sharding = request.sharding
    tensorwise = sharding.loads_by_tensor and not grows  # whose new rows are the mean of all others
    with filled_tensorwise(sharding) if tensorwise else nullcontext():
        model = _read_pretrained(name, hf_config, config, request)
    if grows:
        grow_vocabulary(model, rows, sharding)
    return model


def read_model_config(config: CausalLMConfig) -> tuple[str, PretrainedConfig]:
    """Folder or hub name of `config.pretrained`, and what it says of its model.

    Raises:
        ModelError: there is none, or its weights are quantised.
    """
    given, name = f"model.pretrained: {config.pretrained!r}", resolve_pretrained(config.pretrained or "")
    trust = config.trust_remote_code
    try:
        with use_hub_or_cache("model.pretrained", name, ModelError):
            hf_config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
    except (OSError, *IMPOSSIBLE) as error:
        nor = "" if Path(name).is_dir() else "; nor is there a folder of that name"
        nor += "; model.trust_remote_code=true runs it" if "custom code" in str(error) else ""
        raise ModelError(f"{given}: {_reason(error)}{nor}") from None
    if quantisation := getattr(hf_config, "quantization_config", None):
        raise ModelError(
            f"{given}: its weights are quantised already ({get_quantisation_method(quantisation)}); take the "
            "original ones, which adapter.quantize=nf4 holds in 4 bits"
        )
    return name, hf_config


def _class_of(hf_config: PretrainedConfig, gives_scores: bool) -> Any:
    return get_reward_model_class(hf_config) if gives_scores else AutoModelForCausalLM


def _read_pretrained(
    name: str, hf_config: PretrainedConfig, config: CausalLMConfig, request: ModelRequest
) -> PreTrainedModel:
    given, keep_alive = f"model.pretrained: {config.pretrained!r}", None
    zero3_config = request.sharding.zero3_config
    if zero3_config is not None:
        from transformers.integrations import HfDeepSpeedConfig

        keep_alive = HfDeepSpeedConfig(zero3_config)  # read while weights are loaded
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report says that weights which do not fit can be ignored
    try:
        with phase(Phase.WEIGHTS), use_hub_or_cache("model.pretrained", name, ModelError):
            model, info = _class_of(hf_config, request.gives_scores).from_pretrained(
                name,
                config=hf_config,
                dtype=torch.float32,
                attn_implementation=resolve_attention_name(config.attention, hf_config),
                use_safetensors=True,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they come back in `info`, by name
            )
    except SafetensorError as error:
        raise ModelError(f"{given}: its weights are no safetensors: {_reason(error)}") from None
    except (OSError, RuntimeError, *IMPOSSIBLE) as error:
        raise ModelError(f"{given}: {_reason(error)}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
        del keep_alive
    drawn = set(info["missing_keys"]) & set(getattr(model, "drawn_beside_weights", ()))
    info["missing_keys"] = set(info["missing_keys"]) - drawn
    _refuse_what_does_not_fit(info, given)
    for key in drawn:
        draw_parameter(model, key, request.sharding)
    loaded: PreTrainedModel = model
    return loaded


def build_from_description(folder: Path, config: CausalLMConfig) -> PreTrainedModel:
    """The model that a run's folder describes (see write_model_description); its weights are still to come.

    Raises:
        ModelError: the folder does not say what the model is.
    """
    trust = config.trust_remote_code
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        with no_init_weights():
            model: PreTrainedModel = get_model_class(hf_config).from_config(
                hf_config,
                dtype=torch.float32,
                attn_implementation=resolve_attention_name(config.attention, hf_config),
                trust_remote_code=trust,
            )
    except (OSError, *IMPOSSIBLE) as error:
        raise ModelError(
            f"{folder} does not say what the model is: {_reason(error)}; bring it back"
        ) from None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.use_cache = False  # with a cache transformers lets the documents of a row see each other
    model.tie_weights()
    return model


def _refuse_what_does_not_fit(info: dict[str, Any], given: str) -> None:
    told = []
    for kind in ("missing", "unexpected", "mismatched"):
        # A mismatched one comes as (name, shape in the file, shape in the model).
        keys = sorted(key if isinstance(key, str) else key[0] for key in info.get(f"{kind}_keys", ()))
        if keys:
            told.append(f"{kind}: {', '.join(keys[:5])}{' ...' * (len(keys) > 5)}")
    if told:
        raise ModelError(f"{given}: the weights do not fit the model; {'; '.join(told)}")


def _check_fit(hf_config: PretrainedConfig, config: CausalLMConfig, request: ModelRequest) -> None:
    text_config = hf_config.get_text_config()
    rows = getattr(text_config, "vocab_size", None)
    if rows is None:
        raise ModelError(f"model: {hf_config.model_type} is no language model: its config has no vocab_size")
    is_new = config.pretrained is None
    may_grow = config.grow_vocabulary and not is_new
    if request.vocab_size is not None and rows < request.vocab_size and not may_grow:
        cure = "drop model.vocab_size" if is_new else "model.grow_vocabulary=true adds the rows"
        raise ModelError(
            f"model.vocab_size is {rows}, but the tokenizer has {request.vocab_size} entries; "
            f"{cure}, or use the model's own tokenizer (data.tokenizer.pretrained)"
        )
    heads = getattr(text_config, "num_attention_heads", None)
    groups = getattr(text_config, "num_key_value_heads", None)
    if heads and groups and heads % groups:
        raise ModelError(f"model.num_heads {heads} is not a multiple of num_key_value_heads {groups}")
    cure = ", or raise model.max_sequence_length" if is_new else ""
    check_positions(hf_config, request.sequence_length, request.longest, cure)


def check_positions(
    hf_config: PretrainedConfig, sequence_length: int | None, longest: int | None, cure: str = ""
) -> None:
    """Refuse data that the model has too few positions for.

    Args:
        hf_config: What the model says of itself.
        sequence_length: Tokens of a sequence. `None`: the data are no text.
        longest: See DataBundle.
        cure: What helps besides shorter data.

    Raises:
        ModelError: a text of the data is longer.
    """
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    needed = sequence_length if longest is None else longest
    if positions is None or needed is None or needed <= positions:
        return
    if longest is None:
        given, advice = f"data.sequence_length is {needed}", "shorten it"
    else:
        given = f"data: the longest answer has {needed} tokens with its prompt"
        advice = f"data.answer_length={positions} leaves such examples out and counts them"
    raise ModelError(f"{given}, but the model takes {positions} positions; {advice}{cure}")


def _reason(error: Exception) -> str:
    """The first sentence of what transformers says, without its frame around the cause."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    if isinstance(error, KeyError):
        return f"transformers knows no {error}"
    return summarize_error(error, 10_000).split(". ")[0][:300]
