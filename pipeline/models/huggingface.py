"""Causal language models of transformers: new ones from a config, or with weights from safetensors.

Initial weights depend on the seed alone. transformers' own code draws them in one order, a few modules at a
time, so the random stream is the same for a whole and for a divided model, on every rank and device.

Pretrained weights are loaded into a divided model one tensor at a time. transformers' from_pretrained reads,
converts and casts a parameter, and then registers it in the place of one without values. Hooks of torch on
that registration pass the values to the sharding.

The output layer of a reward model gives one number, a score, instead of logits. Its weight is named as in
transformers' sequence classification, so that transformers can open an export.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
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
from pipeline.models.transformers_facts import choose_auto_class, resolve_pretrained
from pipeline.models.weights import draw_parameter, get_quantization_method

ASYNC_LOAD_VARIABLE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that switches off transformers' threads, which read tensors ahead without limit."""
READ_MARK = "_is_hf_initialized"
"""Attribute of parameters that have been read, which transformers must not draw."""
SCORE_WEIGHT = "score.weight"
"""Name of a reward model's output weight."""
# Exceptions that transformers raises for invalid values in a config.
CONFIG_ERRORS = (StrictDataclassError, ImportError, KeyError, RecursionError, TypeError, ValueError)
# Other names of a field in older architectures.
FIELD_ALIASES = {"intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size")}


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, sharding: Sharding, draws: bool) -> None:
    """Run transformers' own initialization, children before parents, each on whole fp32 CPU parameters.

    torch's global random numbers are reset to their seed. Collective under ZeRO 3.

    Args:
        model: The model, divided and without weights.
        sharding: The split in which the model was built.
        draws: Whether weights are drawn. If not, only modules with buffers are initialized, since no
            checkpoint has all buffers.
    """
    torch.manual_seed(torch.initial_seed())

    def needs_initialization(module: nn.Module) -> bool:
        return draws or next(module.buffers(recurse=False), None) is not None

    def visit(module: nn.Module, initialize: Any) -> None:
        children = [
            (child, child._init_weights if isinstance(child, PreTrainedModel) else initialize)
            for child in module.children()
        ]
        candidates = [(module, initialize)]
        # A module may change values of its children. If all children are leaves, one gather serves them too.
        if all(next(child.children(), None) is None for child, _ in children):
            candidates = [*children, *candidates]
        else:
            for child, child_initialize in children:
                visit(child, child_initialize)
        due = [(each, function) for each, function in candidates if needs_initialization(each)]
        parameters = [p for each in (module, *module.children()) for p in each.parameters(recurse=False)]
        with sharding.gather(parameters) if parameters and due else nullcontext():
            for each, function in due:
                function(each)

    visit(model, model._init_weights)
    model.tie_weights()


@contextmanager
def load_by_tensor(sharding: Sharding) -> Iterator[None]:
    """Let one call of `from_pretrained` inside the context load its weights one tensor at a time.

    The model is divided before its first values are loaded. Hooks of torch, which act on all modules of the
    process, and an environment variable are set until the context ends.

    Raises:
        ModelError: The files have two different tensors for one that the model ties, or the model cannot be
            divided.
    """
    loader = _TensorLoader(sharding)
    previous = os.environ.get(ASYNC_LOAD_VARIABLE)
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
        if previous is not None:
            os.environ[ASYNC_LOAD_VARIABLE] = previous


class _TensorLoader:
    """Divides a model and fills it, by hooks of torch on the registration of modules and parameters."""

    def __init__(self, sharding: Sharding):
        self._sharding = sharding
        self._parents: dict[nn.Module, nn.Module] = {}
        self._tied: dict[nn.Parameter, str | None] | None = None
        """Tied parameters, each with a checksum of its values, `None` until they are read.

        The attribute itself is `None` until the model is divided.
        """

    def note_parent(self, module: nn.Module, _: str, child: nn.Module | None) -> None:
        """Remember the parent of a module, to find the whole model later."""
        if child is not None:
            self._parents[child] = module

    @torch.no_grad()
    def fill(self, module: nn.Module, name: str, values: nn.Parameter | None) -> nn.Parameter | None:
        """Fill a parameter of the divided model with values that transformers registers in its place.

        Args:
            module: The module.
            name: The parameter's name in the module.
            values: The values that transformers has read.

        Returns:
            The filled parameter, which torch registers instead of `values`; `None`: torch registers `values`.
        """
        is_read = values is not None and not values.is_meta and hasattr(values, READ_MARK)
        if values is None or not is_read:
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

    def _divide(self, module: nn.Module) -> dict[nn.Parameter, str | None]:
        """Divide the model that a module belongs to, and return its tied parameters; see `_tied`."""
        model = module
        while model in self._parents:
            model = self._parents[model]
        assert isinstance(model, PreTrainedModel)
        model.tie_weights(recompute_mapping=False)  # transformers ties only after all weights are read
        self._sharding.divide(model)
        uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        return {parameter: None for parameter, number in uses.items() if number > 1}

    def _refuse_different_values(self, parameter: nn.Parameter, name: str, values: Tensor) -> None:
        """Refuse values of a tied parameter that differ from the values read before under another name."""
        assert self._tied is not None
        checksum = xxhash.xxh3_64_hexdigest(
            values.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        )
        if self._tied[parameter] not in (None, checksum):
            raise ModelError(
                f"model.pretrained: the model ties the {name} of its input and output layers, but its "
                'files have two different tensors for it; write "tie_word_embeddings": false into its '
                "config.json"
            )
        self._tied[parameter] = checksum


def is_reward_config(config: PretrainedConfig) -> bool:
    """Return whether a config describes a reward model."""
    names = getattr(config, "architectures", None) or [""]
    return str(names[0]).endswith("ForSequenceClassification") and config.num_labels == 1


def get_model_class(config: PretrainedConfig) -> Any:
    """Return the class that builds a config's model: a reward model's class, or AutoModelForCausalLM.

    The class has `from_config` and `from_pretrained`. The config of a reward model is changed; see
    get_reward_model_class.
    """
    return get_reward_model_class(config) if is_reward_config(config) else AutoModelForCausalLM


def get_reward_model_class(config: PretrainedConfig) -> Any:
    """Return the class of a reward model that is built from a language model's config.

    The class has `from_config` and `from_pretrained`, as the auto classes do.

    Args:
        config: The config, changed to a reward model's: one label, and no tied embeddings.

    Raises:
        ModelError: transformers has no sequence classification for this type of model.
    """
    causal_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    classifier_class = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if causal_class is None or classifier_class is None:
        raise ModelError(
            f"objective.kind: reward: transformers has no sequence classification for the model type "
            f"{config.model_type}, as which a reward model is exported; use another model"
        )
    config.num_labels = 1
    config.tie_word_embeddings = False
    return _build_scoring_class(causal_class, classifier_class.__name__)


@cache
def _build_scoring_class(causal_class: Any, name: str) -> Any:
    """Return a subclass of a language model's class that has a score layer instead of its output layer.

    Args:
        causal_class: The class of the language model.
        name: The name of the new class. An export's config.json has it, so it is the name of transformers'
            class for sequence classification.
    """
    ignored = list(getattr(causal_class, "_keys_to_ignore_on_load_unexpected", None) or ())

    class Scoring(causal_class):
        # The score layer is neither tied nor divided by tensor parallelism.
        _tied_weights_keys: ClassVar[dict[str, str]] = {}
        _tp_plan: ClassVar[dict[str, str]] = {}
        _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*ignored, r"^(lm_head|embed_out)\."]
        # Parameters to draw if the files with the weights lack them.
        drawn_beside_weights = (SCORE_WEIGHT,)

        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            head = self.get_output_embeddings()
            self._head_name = next(name for name, child in self.named_children() if child is head)
            del self._modules[self._head_name]
            self.score = nn.Linear(head.in_features, 1, bias=False)

        @property
        def generate(self) -> Any:
            raise AttributeError("a reward model generates no text")

        @classmethod
        def from_config(cls, config: Any, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
            """Return a model as AutoModelForCausalLM does; the class exists, so no code is fetched."""
            return cls._from_config(config, **kwargs)

        def __getattr__(self, name: str) -> Any:
            # transformers' forward calls the output layer by its name.
            is_head = name == self.__dict__.get("_head_name")
            return super().__getattr__("score" if is_head else name)

    Scoring.__name__ = Scoring.__qualname__ = name
    return Scoring


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
    """Return a new model of `config.architecture`, with drawn weights if `request.draws`."""
    hf_config = _build_config(config, request)
    _check_fit(hf_config, config, request)
    # Import the architecture's module before the context below. zero.Init wraps the __init__ of classes that
    # are defined inside of that context, and would lose what decorators (of experts) add to an __init__.
    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    try:
        # Weights are drawn below, module by module, so they are the same under every split.
        attention = resolve_attention_name(config.attention, hf_config)
        with request.sharding.construct_empty(), no_init_weights():
            model = _choose_class(hf_config, request.gives_scores).from_config(
                hf_config, dtype=torch.float32, attn_implementation=attention
            )
    except (ArithmeticError, AssertionError, ImportError, KeyError, RuntimeError, ValueError) as error:
        is_from_config = not isinstance(error, RuntimeError) or "negative dimension" in str(error)
        if not is_from_config:
            raise
        extra = f" (model.extra has {', '.join(config.extra)})" if config.extra else ""
        raise ModelError(f"model: {config.architecture}: {_get_reason(error)}{extra}") from None
    model.tie_weights()  # a model built without values is not tied yet
    request.sharding.divide(model)
    initialize_weights(model, request.sharding, request.draws)
    return model


def _build_config(config: CausalLMConfig, request: ModelRequest) -> PretrainedConfig:
    """Return the config of a new model, from the recipe's fields, the data and the architecture's defaults.

    Raises:
        ModelError: The architecture or a field is unknown or invalid, or the vocabulary has no size.
    """
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
    default_key_heads = getattr(default, "num_key_value_heads", None)
    if heads is not None and default_key_heads and heads % default_key_heads:
        # The architecture's default number of key heads fits only its default number of heads.
        fields.setdefault("num_key_value_heads", heads)
    end_ids = {"bos_token_id": request.end_of_document_id, "eos_token_id": request.end_of_document_id}
    try:
        # Built from all fields at once, so defaults such as head_dim follow from the recipe's fields.
        return AutoConfig.for_model(architecture, **(end_ids | fields))
    except CONFIG_ERRORS as error:
        raise ModelError(f"model: {architecture}: {_get_reason(error)}") from None


def _suggest_architecture(architecture: str | None) -> str:
    """Return a hint at a similar name; empty without one, since a list of all names would be too long."""
    hint = did_you_mean(architecture or "", CONFIG_MAPPING.keys())
    return hint if "mean" in hint else ""


def _collect_fields(config: CausalLMConfig, hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the recipe's fields under transformers' names.

    Raises:
        ModelError: `hf_config` has no such field, `model.extra` has a field that the recipe has a key for, or
            a probability of dropout is not one.
    """
    fields = dict(config.extra)
    for recipe_name, field in TRANSFORMERS_FIELDS.items():
        if field in fields:
            raise ModelError(
                f"model.extra.{field}: the recipe has a key for it; write model.{recipe_name} instead"
            )
        value = getattr(config, recipe_name)
        if value is not None:
            names = (field, *FIELD_ALIASES.get(field, ()))
            present_name = next((name for name in names if hasattr(hf_config, name)), field)
            fields[present_name] = value
    for name in fields:
        if not hasattr(hf_config, name):
            hint = did_you_mean(name, (word for word in vars(hf_config) if not word.startswith("_")))
            raise ModelError(f"model: the config of a {hf_config.model_type} has no {name}{hint}")
    for name, value in config.extra.items():
        is_probability = name.endswith(("dropout", "drop")) and isinstance(value, (int, float))
        if is_probability and not 0 <= value <= 1:
            raise ModelError(f"model.extra.{name} is {value}; expected 0 to 1")
    return fields


def _load(config: CausalLMConfig, request: ModelRequest) -> PreTrainedModel:
    """Return the model of `config.pretrained` with its weights, and new rows for a larger vocabulary."""
    assert config.pretrained is not None
    name, hf_config = read_model_config(config.pretrained, config.trust_remote_code)
    for key, value in _collect_fields(config, hf_config).items():
        if key in CAUSAL_FIELDS:  # no weight depends on these
            setattr(hf_config, key, value)
        grows_to_value = key == "vocab_size" and config.grow_vocabulary and value > hf_config.vocab_size
        if getattr(hf_config, key) != value and not grows_to_value:
            raise ModelError(
                f"model: {name} has {key} {getattr(hf_config, key)}, but the recipe has {value}; "
                "remove it from the recipe, since the weights decide"
            )
    _check_fit(hf_config, config, request)
    vocab_size = max(request.vocab_size or 0, config.vocab_size or 0)
    grows = config.grow_vocabulary and vocab_size > hf_config.get_text_config().vocab_size
    sharding = request.sharding
    # New rows are the mean of all others, so a model that grows must be loaded whole.
    loads_by_tensor = sharding.loads_by_tensor and not grows
    with load_by_tensor(sharding) if loads_by_tensor else nullcontext():
        model, drawn = _read_pretrained(
            name,
            hf_config,
            _choose_class(hf_config, request.gives_scores),
            key="model.pretrained",
            given=config.pretrained,
            zero3_config=request.sharding.zero3_config,
            dtype=torch.float32,
            attn_implementation=resolve_attention_name(config.attention, hf_config),
            trust_remote_code=config.trust_remote_code,
        )
    for key in drawn:
        draw_parameter(model, key, sharding)
    if grows:
        grow_vocabulary(model, vocab_size, sharding)
    return model


def read_model_config(
    given: str, trust_remote_code: bool, key: str = "model.pretrained"
) -> tuple[str, PretrainedConfig]:
    """Return the folder or hub name that transformers loads, and the config of its model.

    Args:
        given: Folder or hub name.
        trust_remote_code: Whether Python code of the model may run.
        key: Key of the recipe, or option, that has the name, for messages.

    Raises:
        ModelError: There is no such model, or its weights are quantized.
    """
    name = resolve_pretrained(given, key)
    hf_config = _read_config(name, trust_remote_code, key)
    if quantization := getattr(hf_config, "quantization_config", None):
        raise ModelError(
            f"{key}: {given!r}: its weights are already quantized ({get_quantization_method(quantization)}); "
            "use the original model, which adapter.quantize=nf4 stores in 4 bits"
        )
    return name, hf_config


def _read_config(name: str, trust_remote_code: bool, key: str) -> PretrainedConfig:
    """Return the config of a model; see read_model_config."""
    try:
        with use_hub_or_cache(key, name, ModelError):
            hf_config: PretrainedConfig = AutoConfig.from_pretrained(
                name, trust_remote_code=trust_remote_code
            )
            return hf_config
    except (OSError, *CONFIG_ERRORS) as error:
        hint = "" if Path(name).is_dir() else "; nor is there a folder of that name"
        if "custom code" in str(error):
            hint += "; set model.trust_remote_code=true to run it"
        raise ModelError(f"{key}: {name!r}: {_get_reason(error)}{hint}") from None


def _choose_class(hf_config: PretrainedConfig, gives_scores: bool) -> Any:
    return get_reward_model_class(hf_config) if gives_scores else AutoModelForCausalLM


def load_stored_model(given: str, trust_remote_code: bool, key: str) -> PreTrainedModel:
    """Return a language model of a folder or of the hub with its weights, in their dtype, on the CPU.

    Args:
        given: Folder or hub name.
        trust_remote_code: Whether Python code of the model may run.
        key: Option that has the name, for messages.

    Raises:
        ModelError: There is no such model, it is no language model, or its weights cannot be read, do not fit
            or are quantized.
    """
    transformers_logging.disable_progress_bar()
    name, hf_config = read_model_config(given, trust_remote_code, key)
    if choose_auto_class(hf_config.to_dict()) != "AutoModelForCausalLM":
        raise ModelError(
            f"{key}: {given!r} is a reward model, which gives scores, not text; give a language model"
        )
    model, _ = _read_pretrained(
        name,
        hf_config,
        AutoModelForCausalLM,
        key=key,
        given=given,
        dtype="auto",
        attn_implementation=resolve_attention_name("auto", hf_config),
        trust_remote_code=trust_remote_code,
    )
    return model


def build_empty_model(name: str, trust_remote_code: bool, key: str) -> PreTrainedModel:
    """Return the model that a folder or the hub describes on the meta device, with its generation config.

    Args:
        name: Folder, which may lack weights, or hub name.
        trust_remote_code: Whether Python code of the model may run.
        key: Option that has the name, for messages.

    Raises:
        ModelError: There is no such model, or it is no language model.
    """
    hf_config = _read_config(name, trust_remote_code, key)
    try:
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = get_model_class(hf_config).from_config(
                hf_config, dtype=hf_config.dtype, trust_remote_code=trust_remote_code
            )
    except (OSError, *CONFIG_ERRORS) as error:
        raise ModelError(f"{key}: {name!r}: {_get_reason(error)}") from None
    with suppress(OSError), use_hub_or_cache(key, name, ModelError):
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def _read_pretrained(
    name: str,
    hf_config: PretrainedConfig,
    model_class: Any,
    *,
    key: str,
    given: str,
    zero3_config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, set[str]]:
    """Return the model with its weights, as from_pretrained loads them, and the names of those to draw.

    Args:
        name: The folder or hub name.
        hf_config: The model's config.
        model_class: The class with `from_pretrained`.
        key: Key of the recipe, or option, that has the name, for messages.
        given: The name as the user wrote it, for messages.
        zero3_config: DeepSpeed configuration, to load into ZeRO 3's shards.
        options: Further arguments of `from_pretrained`.

    Raises:
        ModelError: The weights cannot be read, or do not fit the model.
    """
    start = f"{key}: {given!r}"
    registered_config = None
    if zero3_config is not None:
        from transformers.integrations import HfDeepSpeedConfig

        # transformers finds the config by a weak reference while it loads weights.
        registered_config = HfDeepSpeedConfig(zero3_config)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report says that misfitting weights can be ignored
    try:
        with tag_errors(Phase.WEIGHTS), use_hub_or_cache(key, name, ModelError):
            model, info = model_class.from_pretrained(
                name,
                config=hf_config,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `info` returns them by name
                **options,
            )
    except SafetensorError as error:
        raise ModelError(
            f"{start}: its weights cannot be read as safetensors: {_get_reason(error)}; fetch them again"
        ) from None
    except (OSError, RuntimeError, *CONFIG_ERRORS) as error:
        raise ModelError(f"{start}: {_get_reason(error)}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
        del registered_config
    drawn = set(info["missing_keys"]) & set(getattr(model, "drawn_beside_weights", ()))
    info["missing_keys"] = set(info["missing_keys"]) - drawn
    _refuse_misfits(info, start)
    return model, drawn


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


def _refuse_misfits(info: dict[str, Any], start: str) -> None:
    """Refuse weights that do not fit the model.

    Args:
        info: from_pretrained's loading info.
        start: The start of the message.

    Raises:
        ModelError: A tensor is missing, unexpected or mismatched.
    """
    problems = []
    for kind in ("missing", "unexpected", "mismatched"):
        # A mismatched key is (name, shape in the file, shape in the model).
        keys = sorted(key if isinstance(key, str) else key[0] for key in info.get(f"{kind}_keys", ()))
        if keys:
            problems.append(f"{kind}: {', '.join(keys[:5])}{' ...' * (len(keys) > 5)}")
    if problems:
        raise ModelError(
            f"{start}: the weights do not fit the model; {'; '.join(problems)}; give weights and config.json "
            "of the same model"
        )


def _check_fit(hf_config: PretrainedConfig, config: CausalLMConfig, request: ModelRequest) -> None:
    """Check that a model fits the data, and its numbers of heads each other.

    Raises:
        ModelError: It has no vocabulary or too small a vocabulary, too few positions, or a number of heads
            that its number of key heads does not divide.
    """
    text_config = hf_config.get_text_config()
    vocab_size = getattr(text_config, "vocab_size", None)
    if vocab_size is None:
        raise ModelError(
            f"model: {hf_config.model_type} is not a language model, since its config has no vocab_size; use "
            "a causal language model"
        )
    is_new = config.pretrained is None
    may_grow = config.grow_vocabulary and not is_new
    if request.vocab_size is not None and vocab_size < request.vocab_size and not may_grow:
        given = "model.vocab_size is" if is_new else f"model.pretrained: {config.pretrained!r} has vocab_size"
        advice = "leave model.vocab_size out" if is_new else "set model.grow_vocabulary=true to add rows"
        raise ModelError(
            f"{given} {vocab_size}, but the tokenizer has {request.vocab_size} entries; "
            f"{advice}, or use the model's own tokenizer (data.tokenizer.pretrained)"
        )
    heads = getattr(text_config, "num_attention_heads", None)
    key_heads = getattr(text_config, "num_key_value_heads", None)
    if heads and key_heads and heads % key_heads:
        raise ModelError(
            f"model.num_heads is {heads}, expected a multiple of num_key_value_heads ({key_heads}); change "
            "one"
        )
    further_advice = ", or raise model.max_sequence_length" if is_new else ""
    check_positions(hf_config, request.sequence_length, request.longest, further_advice)


def check_positions(
    hf_config: PretrainedConfig, sequence_length: int | None, longest: int | None, further_advice: str = ""
) -> None:
    """Raise a ModelError if the model has too few positions for the data.

    Args:
        hf_config: The model's config.
        sequence_length: Number of tokens of a row; `None`: the data are no text.
        longest: Number of tokens of the longest text with consecutive positions; `None`: `sequence_length`.
        further_advice: The end of the message.

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
    raise ModelError(f"{given}, but the model has {positions} positions; {advice}{further_advice}")


def _get_reason(error: Exception) -> str:
    """Return the first sentence of an error of transformers, without its text around the cause."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    if isinstance(error, KeyError):
        return f"transformers has no {error}"
    return summarize_error(error, 10_000).split(". ")[0][:300]
