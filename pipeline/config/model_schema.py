"""The model and adapter sections of the recipe, and the base class of all sections. See schema.py."""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""Pattern of `package.module:function`."""


class RecipeSection(BaseModel):
    """Base of all sections of the recipe. Unknown keys are errors, and values are frozen after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _normalise(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept 1e3, which YAML reads as 1000.0, as a whole number. Refuse the text `None` for null."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        types = get_args(annotation) or (annotation,)
        expects_integer = int in types and float not in types
        if expects_integer and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
            return int(value)
        is_text_for_null = isinstance(value, str) and value.strip().lower() in ("none", "nil")
        if is_text_for_null and NoneType in types:
            raise ValueError(f"{value!r} is a text; write null")
        return value


class ModelSection(RecipeSection):
    """Base of the sections of all kinds of model. Its keys are those of every model."""

    weights: str | None = None
    """Weights from which a new run starts: a `.safetensors`, `.pt`, `.pth` or `.bin` file, a folder of such
    files, a run directory or one of its checkpoints. A resumed run does not read them again."""
    strict: bool = True
    """Whether `weights` must fit exactly: a missing or unexpected parameter, or another shape, is an error.
    `false` loads what fits."""
    inputs: list[str] | None = Field(None, min_length=1)
    """Entries of a batch that go to the model, by name or in the order of its forward's arguments; the others
    go to the loss. Default: by the forward's signature (docs/how-to/extending.md)."""
    grow_vocabulary: bool = False
    """Whether the input and output embedding grow if `weights` or `pretrained` have fewer rows of the
    vocabulary than the tokenizer needs. Each new row is the mean of the existing ones."""
    freeze: list[str] | None = Field(None, min_length=1)
    """Parameters that are not trained, by shell patterns over their whole names (`model.embed_tokens.*`,
    `model.layers.[0-3].*`). They get no gradient and no optimizer state."""
    neftune_alpha: float | None = Field(None, gt=0)
    """Strength of NEFTune noise for fine-tuning. In training, uniform noise of at most `neftune_alpha` /
    sqrt(tokens of the sample x width) is added to each number of a token's embedding. Published values: 5
    to 15. Default: no noise."""

    @property
    def language_model(self) -> CausalLMConfig | None:
        """This section if it is a language model's, else `None`."""
        return self if isinstance(self, CausalLMConfig) else None

    @property
    def cnn(self) -> CNNConfig | None:
        """This section if it is the small convolutional network's, else `None`."""
        return self if isinstance(self, CNNConfig) else None

    @property
    def custom(self) -> CustomModelConfig | None:
        """This section if it names a model of the user, else `None`."""
        return self if isinstance(self, CustomModelConfig) else None

    @property
    def default_objective(self) -> str | None:
        """Kind of objective that `auto` means; `None` for a model of the user."""
        if self.language_model is not None:
            return "causal_lm"
        return None if self.cnn is None else "classification"

    @property
    def pretrained_from(self) -> str | None:
        """Folder or hub name of a pretrained model; `None` for a new one."""
        return None if self.language_model is None else self.language_model.pretrained


class CausalLMConfig(ModelSection):
    """A language model of transformers: new (`architecture`) or with weights (`pretrained`)."""

    kind: Literal["causal_lm"] = "causal_lm"
    architecture: str | None = None
    """Model type in transformers of a new model with random weights: `llama`, `gpt2`, `qwen2`, ..."""
    pretrained: str | None = None
    """Local folder or hub name of a pretrained model (safetensors). Give exactly one of this and
    `architecture`."""
    vocab_size: int | None = Field(None, gt=0, le=2**28)
    """Number of rows of the embedding, at least the tokenizer's size. Default: the tokenizer's size."""
    hidden_size: int | None = Field(None, gt=0, le=2**20)
    """Width of the residual stream. Default: the architecture's own."""
    intermediate_size: int | None = Field(None, gt=0, le=2**24)
    """Width of the MLP. Default: the architecture's own."""
    num_layers: int | None = Field(None, gt=0, le=2**14)
    """Number of decoder blocks. Default: the architecture's own."""
    num_heads: int | None = Field(None, gt=0, le=2**16)
    """Number of attention heads. Default: the architecture's own."""
    num_key_value_heads: int | None = Field(None, gt=0, le=2**16)
    """Number of key-value heads in grouped-query attention. Default: the architecture's own."""
    max_sequence_length: int | None = Field(None, gt=0, le=2**30)
    """Number of positions of the model, in tokens. Default of a new model: `data.sequence_length`."""
    extra: dict[str, Any] = {}
    """Further fields of the transformers config of this architecture, under their names there."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Implementation of attention. `auto`: this trainer's, which calls torch's kernels document by document
    without a mask, also for sliding windows, capped scores and sinks. A model that needs more, such as
    ALiBi, gets the attention of transformers, and a message at the start says so. The other names choose an
    implementation of transformers."""
    activation_checkpointing: Literal["none", "full", "selective"] | Annotated[int, Field(gt=0)] = "none"
    """Blocks whose activations are recomputed in the backward pass instead of stored. `full`: all blocks. A
    number: every Nth block. `selective`: all blocks, but the results of matrix products are stored."""
    activation_offload: bool = False
    """Whether the inputs of blocks with `activation_checkpointing` are stored in host memory until the
    backward pass. For long sequences: GPU memory then no longer grows with the number of blocks. The copies
    run on the compute stream, so a step takes longer."""
    fp8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Scaling with which the blocks' linear layers multiply in fp8 (torchao, from this package's optional
    dependencies `fp8`). `tensorwise`: one scale for each tensor, the fastest. `rowwise`: one scale for each
    row. `rowwise_with_gw_hp`: the same, with weight gradients in high precision. A CPU emulates fp8. The
    commands `evaluate` and `generate` do not multiply in fp8."""
    trust_remote_code: bool = False
    """Whether to run Python code of the hub repository named in `pretrained`. `--no-import-paths` refuses
    it."""

    @property
    def balances_experts(self) -> bool:
        """Return whether `extra` asks for the load-balancing loss of a mixture of experts."""
        has_weight = self.extra.get("router_aux_loss_coef", True) != 0
        return bool(self.extra.get("output_router_logits")) and has_weight


# Key of the recipe -> field of a transformers config.
TRANSFORMERS_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "max_sequence_length": "max_position_embeddings",
}


class CNNConfig(ModelSection):
    """A small convolutional network for images, a plain nn.Module."""

    kind: Literal["cnn"]
    num_classes: int | None = Field(None, gt=1, le=2**28)
    """Number of outputs. Default: the number of classes in the data."""
    channels: int = Field(32, gt=0, le=2**16)
    """Number of channels of the first convolution; the second has twice as many."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Probability of dropping an activation before the last layer."""


class CustomModelConfig(ModelSection):
    """Your own model: `kind: package.module:function`, called with `args`, returns an nn.Module."""

    kind: str = Field(pattern=IMPORT_PATH)
    """Import path `package.module:function`. The key runs that code; `--no-import-paths` refuses it."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""


def get_kind_tag(value: Any) -> str | None:
    """Return the tag by which pydantic chooses a section's class.

    It is `custom` for an import path, else the kind as it is: for a wrong one, or `None` for none, pydantic
    reports an error.
    """
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "custom" if isinstance(kind, str) and ":" in kind else kind


ModelConfig = Annotated[
    Annotated[CausalLMConfig, Tag("causal_lm")]
    | Annotated[CNNConfig, Tag("cnn")]
    | Annotated[CustomModelConfig, Tag("custom")],
    Discriminator(get_kind_tag),
]


AdapterKind = Literal["lora", "rslora", "dora"]
# For `rank` and `alpha` without a value and without `adapter.weights`.
DEFAULT_ADAPTER_RANK = 32
DEFAULT_ADAPTER_ALPHA = 32.0


class AdapterConfig(RecipeSection):
    """Low-rank adapters (LoRA, Hu et al. 2021), built by peft. `adapter: lora` is a short form.

    The model's own weights are frozen. Each chosen linear layer adds the product of two narrow matrices, and
    these are trained.
    """

    kind: AdapterKind = "lora"
    """Kind of adapter. `lora`: the product is scaled by alpha / rank. `rslora`: by alpha / sqrt(rank)
    (Kalajdzievski 2023). `dora`: the norm of each row of the layer is trained as well (Liu et al. 2024);
    steps take longer."""
    rank: int | None = Field(None, gt=0, le=2**16)
    """Width of the narrow matrices. Default: 32, or the rank of `weights`."""
    alpha: float | None = Field(None, gt=0)
    """Scale of the product; see `kind`. Default: 32, or the alpha of `weights`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping a value of the adapter's input."""
    targets: list[str] | None = Field(None, min_length=1)
    """Linear layers that get an adapter: names, or shell patterns of whole names (`q_proj`,
    `model.layers.[0-3].*`). Default, also written `all-linear`: all but the output layer, or the targets of
    `weights`."""
    modules_to_save: list[str] | None = Field(None, min_length=1)
    """Modules that are fully trained beside the adapters, by names or shell patterns (`lm_head`). They
    always include an embedding that grew (`model.grow_vocabulary`) and its output layer."""
    init: Literal["uniform", "gaussian"] = "uniform"
    """First values of the matrix next to the input. `uniform`: peft's default. `gaussian`: normal with a
    standard deviation of 1 / rank. The other matrix is 0, so that training starts from the unchanged
    model."""
    quantize: Literal["nf4"] | None = None
    """`nf4`: frozen weights of linear layers are stored in 4 bits (QLoRA, Dettmers et al. 2023), except
    those of the output layer and of `modules_to_save`. bitsandbytes quantizes them to NF4 in blocks of 64,
    and their scales as well: about 0.516 bytes a parameter. For plain PyTorch, DDP and ZeRO 0 to 2."""
    weights: str | None = None
    """Adapter of this model from which training starts: a folder of peft, or an adapter that `export`
    wrote."""

    @field_validator("targets", mode="before")
    @classmethod
    def _expand_all_linear(cls, value: Any) -> Any:
        return None if value in ("all-linear", ["all-linear"]) else value

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value
