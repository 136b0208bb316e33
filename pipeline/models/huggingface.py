"""Causal language models of transformers: new ones from a config, or with weights from safetensors.

Initial weights depend on the seed alone. transformers' own code draws them in one order, a few modules at a
time, so the random stream is the same for a whole and for a divided model, on every rank and device.

Into a divided model, pretrained weights are loaded one tensor at a time. transformers' from_pretrained
registers each parameter that it has read, converted and cast in the place of one without values; hooks of
torch on that registration pass the values to the sharding.

The output layer of a reward model gives one number, a score, in the place of logits. Its weights have the
names of transformers' sequence classification, which opens an export.
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
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import ModelError, summarize_error
from pipeline.models.attention import CAUSAL_FIELDS, resolve_attention_name
from pipeline.models.embeddings import grow_vocabulary
from pipeline.models.sharding import ModelRequest, Sharding
from pipeline.models.transformers_facts import resolve_pretrained
from pipeline.models.weights import draw_parameter, get_quantization_method


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, sharding: Sharding, draws: bool) -> None:
    """Run transformers' own initialisation, children before parents, each on whole fp32 CPU parameters.

    Args:
        model: The model, divided and without weights.
        sharding: The split in which the model was built.
        draws: Whether weights are drawn. If not, only modules with buffers are initialised, since no
            checkpoint has all buffers.
    """
    torch.manual_seed(torch.initial_seed())

    def is_due(module: nn.Module) -> bool:
        return draws or next(module.buffers(recurse=False), None) is not None

    def visit(module: nn.Module, initialise: Any) -> None:
        children = [
            (child, child._init_weights if isinstance(child, PreTrainedModel) else initialise)
            for child in module.children()
        ]
        # A module may change what its children have drawn. If these are leaves, all are gathered at once.
        together = all(next(child.children(), None) is None for child, _ in children)
        if not together:
            for child, child_initialise in children:
                visit(child, child_initialise)
        candidates = [*(children if together else ()), (module, initialise)]
        due = [(each, function) for each, function in candidates if is_due(each)]
        own = [p for m in (module, *module.children()) for p in m.parameters(recurse=False)]
        with sharding.gather(own) if own and due else nullcontext():
            for each, function in due:
                function(each)

    visit(model, model._init_weights)
    model.tie_weights()


# Environment variable against transformers' threads, which read ahead as many tensors as they can.
ASYNC_LOAD_VARIABLE = "HF_DEACTIVATE_ASYNC_LOAD"
# Attribute of parameters that transformers must not draw since they have been read.
READ_MARK = "_is_hf_initialized"


@contextmanager
def load_by_tensor(sharding: Sharding) -> Iterator[None]:
    """Let one call of `from_pretrained` inside the context load its weights one tensor at a time.

    The model is divided before its first values are loaded.

    Raises:
        ModelError: The files have two different tensors for one that the model ties, or see Sharding.divide.
    """
    loader = _TensorLoader(sharding)
    before = os.environ.get(ASYNC_LOAD_VARIABLE)
    os.environ[ASYNC_LOAD_VARIABLE] = "1"
    hooks = (
        register_module_module_registration_hook(loader.note_parent),
        register_module_parameter_registration_hook(loader.fill),  # type: ignore[arg-type]
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        os.environ.pop(ASYNC_LOAD_VARIABLE)
        if before is not None:
            os.environ[ASYNC_LOAD_VARIABLE] = before


class _TensorLoader:
    """Hooks of torch on the registration of modules and parameters, which divide a model and fill it."""

    def __init__(self, sharding: Sharding):
        self._sharding = sharding
        self._parents: dict[nn.Module, nn.Module] = {}
        self._tied: dict[nn.Parameter, str | None] | None = None
        """Checksums of the values of tied parameters, `None` before they have any; `None` before division."""

    def note_parent(self, module: nn.Module, _: str, child: nn.Module | None) -> None:
        if child is not None:
            self._parents[child] = module

    @torch.no_grad()
    def fill(self, module: nn.Module, name: str, values: nn.Parameter | None) -> nn.Parameter | None:
        """Return the parameter to register in the place of `values`; `None`: the values themselves."""
        if values is None or values.is_meta or not hasattr(values, READ_MARK):
            return None
        if module._parameters.get(name) is None:
            return None
        if self._tied is None:
            self._tied = self._divide(module)
        parameter = module._parameters[name]  # read again: dividing the model may have tied it
        assert parameter is not None
        if parameter is values:
            return None
        if parameter in self._tied:
            self._refuse_different_values(parameter, name, values)
        with self._sharding.gather([parameter]):
            parameter.data.copy_(values)
        setattr(parameter, READ_MARK, True)
        return parameter

    def _divide(self, model: nn.Module) -> dict[nn.Parameter, str | None]:
        while model in self._parents:
            model = self._parents[model]
        assert isinstance(model, PreTrainedModel)
        model.tie_weights(recompute_mapping=False)  # transformers ties only after all weights are read
        self._sharding.divide(model)
        times = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        return {parameter: None for parameter, number in times.items() if number > 1}

    def _refuse_different_values(self, parameter: nn.Parameter, name: str, values: Tensor) -> None:
        assert self._tied is not None
        checksum = xxhash.xxh3_64_hexdigest(
            values.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        )
        if self._tied[parameter] not in (None, checksum):
            raise ModelError(
                f"model.pretrained: the model ties {name} of input and output, but its files have two "
                'different tensors for it; write "tie_word_embeddings": false into its config.json'
            )
        self._tied[parameter] = checksum


SCORE_WEIGHT = "score.weight"


def is_reward_config(config: PretrainedConfig) -> bool:
    """Return whether a config describes a reward model."""
    names = getattr(config, "architectures", None) or [""]
    return str(names[0]).endswith("ForSequenceClassification") and config.num_labels == 1


def get_model_class(config: PretrainedConfig) -> Any:
    """Return the class for a config, a reward model's or AutoModelForCausalLM.

    It has `from_config` and `from_pretrained`.
    """
    return get_reward_model_class(config) if is_reward_config(config) else AutoModelForCausalLM


def get_reward_model_class(config: PretrainedConfig) -> Any:
    """Return the reward model class for a config, which is changed to that of a reward model.

    The class has `from_config` and `from_pretrained`, as the auto classes do.

    Raises:
        ModelError: transformers has no sequence classification for this type of model.
    """
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if causal is None or named is None:
        raise ModelError(
            f"objective.kind: reward: transformers has no sequence classification for the model type "
            f"{config.model_type}, as which a reward model is exported; use another model"
        )
    config.num_labels = 1
    config.tie_word_embeddings = False
    return _build_scoring_class(causal, named.__name__)


@cache
def _build_scoring_class(causal: Any, name: str) -> Any:
    ignored = list(getattr(causal, "_keys_to_ignore_on_load_unexpected", None) or ())

    class Scoring(causal):
        # The score layer is neither tied nor divided by tensor parallelism.
        _tied_weights_keys: ClassVar[dict[str, str]] = {}
        _tp_plan: ClassVar[dict[str, str]] = {}
        _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*ignored, r"^(lm_head|embed_out)\."]
        drawn_beside_weights = (SCORE_WEIGHT,)

        def __init__(self, config: Any, *given: Any, **named: Any):
            super().__init__(config, *given, **named)
            head = self.get_output_embeddings()
            self._head_name = next(name for name, child in self.named_children() if child is head)
            del self._modules[self._head_name]
            self.score = nn.Linear(head.in_features, 1, bias=False)

        @property
        def generate(self) -> Any:
            raise AttributeError("a reward model generates no text")

        @classmethod
        def from_config(cls, config: Any, *, trust_remote_code: bool = False, **how: Any) -> Any:
            """Return a model as AutoModelForCausalLM does; the class exists, so no code is fetched."""
            return cls._from_config(config, **how)

        def __getattr__(self, name: str) -> Any:
            is_head = name == self.__dict__.get("_head_name")
            return super().__getattr__("score" if is_head else name)

    Scoring.__name__ = Scoring.__qualname__ = name
    return Scoring


log = logging.getLogger(__name__)

# Exceptions that transformers raises for invalid values in a config.
CONFIG_ERRORS = (StrictDataclassError, ImportError, KeyError, RecursionError, TypeError, ValueError)

# Other names of a field in older architectures.
FIELD_ALIASES = {"intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size")}


def build_causal_lm(config: CausalLMConfig, request: ModelRequest) -> nn.Module:
    """Return the model, with its context and vocabulary checked against the data.

    Raises:
        ModelError: The architecture or a field is unknown, weights are missing or do not fit, the vocabulary
            is smaller than the tokenizer's, or sequences are longer than the model takes.
    """
    if (config.architecture is None) == (config.pretrained is None):
        raise ModelError(
            "model: give exactly one of architecture (new weights) and pretrained (a folder or hub name)"
        )
    if config.pretrained is not None and config.weights is not None:
        raise ModelError(
            "model: give pretrained or weights, not both; a pretrained model has its own weights"
        )
    model = _load(config, request) if config.pretrained is not None else _create(config, request)
    model.config.use_cache = False  # keys and values are cached for generation only
    model.config.architectures = [type(model).__name__]  # a new config has none, and other tools read it
    return model


def _create(config: CausalLMConfig, request: ModelRequest) -> PreTrainedModel:
    hf_config = _build_config(config, request)
    _check_fit(hf_config, config, request)
    # Import the architecture's module before the context below. zero.Init wraps the __init__ of classes that
    # are defined inside of it, and would lose what decorators (of experts) add to that.
    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    try:
        # Weights are drawn below, module by module, so they are the same under every split.
        attention = resolve_attention_name(config.attention, hf_config)
        with request.sharding.construct_empty(), no_init_weights():
            model = _choose_class(hf_config, request.gives_scores).from_config(
                hf_config, dtype=torch.float32, attn_implementation=attention
            )
    except (ArithmeticError, AssertionError, ImportError, KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and "negative dimension" not in str(error):
            raise
        extra = f" (model.extra has {', '.join(config.extra)})" if config.extra else ""
        raise ModelError(f"model: {config.architecture}: {_get_reason(error)}{extra}") from None
    model.tie_weights()  # a model built without values is not tied yet
    request.sharding.divide(model)
    initialize_weights(model, request.sharding, request.draws)
    return model


def _build_config(config: CausalLMConfig, request: ModelRequest) -> PretrainedConfig:
    architecture = config.architecture
    if architecture not in CONFIG_MAPPING:
        raise ModelError(
            f"model.architecture: transformers has no {architecture!r}{_suggest_architecture(architecture)}"
        )
    default = AutoConfig.for_model(architecture)
    fields = _collect_fields(config, default)
    fields.setdefault("vocab_size", request.vocab_size)
    if fields["vocab_size"] is None:
        raise ModelError("model.vocab_size is not given, and the data has no tokenizer; write the number")
    if request.sequence_length is not None and hasattr(default, "max_position_embeddings"):
        fields.setdefault("max_position_embeddings", request.sequence_length)
    heads = fields.get("num_attention_heads")
    groups = getattr(default, "num_key_value_heads", None)
    if heads is not None and groups and heads % groups:
        # The architecture's default number of groups fits only its default number of heads.
        fields.setdefault("num_key_value_heads", heads)
    ends = {"bos_token_id": request.end_of_document_id, "eos_token_id": request.end_of_document_id}
    try:
        # Built from all fields at once, so defaults such as head_dim follow from the recipe's fields.
        return AutoConfig.for_model(architecture, **(ends | fields))
    except CONFIG_ERRORS as error:
        raise ModelError(f"model: {architecture}: {_get_reason(error)}") from None


def _suggest_architecture(architecture: str | None) -> str:
    hint = did_you_mean(architecture or "", CONFIG_MAPPING.keys())
    return hint if "mean" in hint else ""


def _collect_fields(config: CausalLMConfig, known: PretrainedConfig) -> dict[str, Any]:
    """Return the recipe's fields under transformers' names, each of which is a field of `known`."""
    fields = dict(config.extra)
    for recipe_name, field in TRANSFORMERS_FIELDS.items():
        if field in fields:
            raise ModelError(
                f"model.extra.{field}: the recipe has a key for it; write model.{recipe_name} instead"
            )
        names = (field, *FIELD_ALIASES.get(field, ()))
        if (value := getattr(config, recipe_name)) is not None:
            fields[next((name for name in names if hasattr(known, name)), field)] = value
    for name in fields:
        if not hasattr(known, name):
            hint = did_you_mean(name, (word for word in vars(known) if not word.startswith("_")))
            raise ModelError(f"model: the config of a {known.model_type} has no {name}{hint}")
    for name, value in config.extra.items():
        if name.endswith(("dropout", "drop")) and isinstance(value, (int, float)) and not 0 <= value <= 1:
            raise ModelError(f"model.extra.{name} is {value}; expected 0 to 1")
    return fields


def _load(config: CausalLMConfig, request: ModelRequest) -> PreTrainedModel:
    name, hf_config = read_model_config(config)
    for key, value in _collect_fields(config, hf_config).items():
        if key in CAUSAL_FIELDS:  # no weight depends on these
            setattr(hf_config, key, value)
        may_differ = key == "vocab_size" and config.grow_vocabulary and value > hf_config.vocab_size
        if getattr(hf_config, key) != value and not may_differ:
            raise ModelError(
                f"model: {name} has {key} {getattr(hf_config, key)}, but the recipe has {value}; "
                "remove it from the recipe, since the weights decide"
            )
    _check_fit(hf_config, config, request)
    rows = max(request.vocab_size or 0, config.vocab_size or 0)
    grows = config.grow_vocabulary and rows > hf_config.get_text_config().vocab_size
    sharding = request.sharding
    tensorwise = sharding.loads_by_tensor and not grows  # new rows are the mean of all others
    with load_by_tensor(sharding) if tensorwise else nullcontext():
        model = _read_pretrained(name, hf_config, config, request)
    if grows:
        grow_vocabulary(model, rows, sharding)
    return model


def read_model_config(config: CausalLMConfig) -> tuple[str, PretrainedConfig]:
    """Return the folder or hub name of `config.pretrained`, and the config of its model.

    Raises:
        ModelError: There is no such model, or its weights are quantized.
    """
    given = f"model.pretrained: {config.pretrained!r}"
    name = resolve_pretrained(config.pretrained or "")
    trust = config.trust_remote_code
    try:
        with use_hub_or_cache("model.pretrained", name, ModelError):
            hf_config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
    except (OSError, *CONFIG_ERRORS) as error:
        hint = "" if Path(name).is_dir() else "; nor is there a folder of that name"
        if "custom code" in str(error):
            hint += "; set model.trust_remote_code=true to run it"
        raise ModelError(f"{given}: {_get_reason(error)}{hint}") from None
    if quantization := getattr(hf_config, "quantization_config", None):
        raise ModelError(
            f"{given}: its weights are already quantized ({get_quantization_method(quantization)}); use the "
            "original model, which adapter.quantize=nf4 stores in 4 bits"
        )
    return name, hf_config


def _choose_class(hf_config: PretrainedConfig, gives_scores: bool) -> Any:
    return get_reward_model_class(hf_config) if gives_scores else AutoModelForCausalLM


def _read_pretrained(
    name: str, hf_config: PretrainedConfig, config: CausalLMConfig, request: ModelRequest
) -> PreTrainedModel:
    given = f"model.pretrained: {config.pretrained!r}"
    keep_alive = None
    zero3_config = request.sharding.zero3_config
    if zero3_config is not None:
        from transformers.integrations import HfDeepSpeedConfig

        keep_alive = HfDeepSpeedConfig(zero3_config)  # transformers reads it while it loads weights
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report says that misfitting weights can be ignored
    try:
        with tag_errors(Phase.WEIGHTS), use_hub_or_cache("model.pretrained", name, ModelError):
            model, info = _choose_class(hf_config, request.gives_scores).from_pretrained(
                name,
                config=hf_config,
                dtype=torch.float32,
                attn_implementation=resolve_attention_name(config.attention, hf_config),
                use_safetensors=True,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `info` returns them by name
            )
    except SafetensorError as error:
        raise ModelError(
            f"{given}: its weights cannot be read as safetensors: {_get_reason(error)}; fetch them again"
        ) from None
    except (OSError, RuntimeError, *CONFIG_ERRORS) as error:
        raise ModelError(f"{given}: {_get_reason(error)}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
        del keep_alive
    drawn = set(info["missing_keys"]) & set(getattr(model, "drawn_beside_weights", ()))
    info["missing_keys"] = set(info["missing_keys"]) - drawn
    _refuse_misfits(info, given)
    for key in drawn:
        draw_parameter(model, key, request.sharding)
    loaded: PreTrainedModel = model
    return loaded


def build_from_description(folder: Path, config: CausalLMConfig) -> PreTrainedModel:
    """Return the model that a run's folder describes (see write_model_description), without its weights.

    Raises:
        ModelError: The folder does not describe a model.
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
    except (OSError, *CONFIG_ERRORS) as error:
        raise ModelError(
            f"{folder} does not describe a model: {_get_reason(error)}; restore the folder"
        ) from None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.config.use_cache = False  # with a cache, transformers lets the documents of a row see each other
    model.tie_weights()
    return model


def _refuse_misfits(info: dict[str, Any], given: str) -> None:
    problems = []
    for kind in ("missing", "unexpected", "mismatched"):
        # A mismatched key is (name, shape in the file, shape in the model).
        keys = sorted(key if isinstance(key, str) else key[0] for key in info.get(f"{kind}_keys", ()))
        if keys:
            problems.append(f"{kind}: {', '.join(keys[:5])}{' ...' * (len(keys) > 5)}")
    if problems:
        raise ModelError(
            f"{given}: the weights do not fit the model; {'; '.join(problems)}; give weights and config.json "
            "of the same model"
        )


def _check_fit(hf_config: PretrainedConfig, config: CausalLMConfig, request: ModelRequest) -> None:
    text_config = hf_config.get_text_config()
    rows = getattr(text_config, "vocab_size", None)
    if rows is None:
        raise ModelError(
            f"model: {hf_config.model_type} is not a language model, since its config has no vocab_size; use "
            "a causal language model"
        )
    is_new = config.pretrained is None
    may_grow = config.grow_vocabulary and not is_new
    if request.vocab_size is not None and rows < request.vocab_size and not may_grow:
        given = "model.vocab_size is" if is_new else f"model.pretrained: {config.pretrained!r} has vocab_size"
        cure = "leave model.vocab_size out" if is_new else "set model.grow_vocabulary=true to add rows"
        raise ModelError(
            f"{given} {rows}, but the tokenizer has {request.vocab_size} entries; "
            f"{cure}, or use the model's own tokenizer (data.tokenizer.pretrained)"
        )
    heads = getattr(text_config, "num_attention_heads", None)
    groups = getattr(text_config, "num_key_value_heads", None)
    if heads and groups and heads % groups:
        raise ModelError(
            f"model.num_heads is {heads}, expected a multiple of num_key_value_heads ({groups}); change one"
        )
    cure = ", or raise model.max_sequence_length" if is_new else ""
    check_positions(hf_config, request.sequence_length, request.longest, cure)


def check_positions(
    hf_config: PretrainedConfig, sequence_length: int | None, longest: int | None, cure: str = ""
) -> None:
    """Raise a ModelError if the model has too few positions for the data.

    Args:
        hf_config: The model's config.
        sequence_length: Tokens of a sequence; `None`: the data are no text.
        longest: See DataBundle.longest_segment.
        cure: Further advice for the message.

    Raises:
        ModelError: A text of the data has more tokens than the model has positions.
    """
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    needed = sequence_length if longest is None else longest
    if positions is None or needed is None or needed <= positions:
        return
    if longest is None:
        given = f"data.sequence_length is {needed}"
        advice = "lower it"
    else:
        given = f"data: the longest answer has {needed} tokens with its prompt"
        advice = f"set data.answer_length={positions} to leave such examples out and count them"
    raise ModelError(f"{given}, but the model has {positions} positions; {advice}{cure}")


def _get_reason(error: Exception) -> str:
    """Return the first sentence of an error of transformers, without its text around the cause."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    if isinstance(error, KeyError):
        return f"transformers has no {error}"
    return summarize_error(error, 10_000).split(". ")[0][:300]
