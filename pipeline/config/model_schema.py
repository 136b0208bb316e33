"""The recipe's model and adapter sections, and what every section has in common. See schema.py."""

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


class RecipeSection(BaseModel):
    """A section of the recipe: no unknown keys, no change after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: Any, info: ValidationInfo) -> Any:
        """Take 1e3, which YAML reads as 1000.0, as a whole number, and refuse `None` in the place of null."""
        wanted = cls.model_fields[str(info.field_name)].annotation
        kinds = get_args(wanted) or (wanted,)
        counts = int in kinds and float not in kinds
        if isinstance(value, float) and counts and value.is_integer() and abs(value) < 2**63:
            return int(value)
        if isinstance(value, str) and NoneType in kinds and value.strip().lower() in ("none", "nil"):
            raise ValueError(f"{value!r} is a text; write null")
        return value


class ModelSection(RecipeSection):
    """What every kind of model has: weights from elsewhere to start from."""

    weights: str | None = None
    """Where a new run's weights come from: a `.safetensors`, `.pt`, `.pth` or `.bin` file, a folder of
    them, a run directory or one of its checkpoints. A run that goes on does not read it again."""
    strict: bool = True
    """Of `weights`, anything missing, unexpected or of another shape is an error; `false` loads what fits."""
    inputs: list[str] | None = Field(None, min_length=1)
    """Entries of a batch that go to the model, by name or in the order of its forward's arguments; the others
    go to the loss. Default: by the forward's signature (docs/your-own-model.md)."""
    grow_vocabulary: bool = False
    """Where `weights` or `pretrained` have fewer rows of the vocabulary than the tokenizer needs: further
    rows of the input and output embedding, each the mean of those there are."""
    freeze: list[str] | None = Field(None, min_length=1)
    """Parameters that stay as they are, by shell patterns over their whole names (`model.embed_tokens.*`,
    `model.layers.[0-3].*`): they get no gradient, and no optimizer state."""
    neftune_alpha: float | None = Field(None, gt=0)
    """NEFTune, for fine-tuning: in training each number of a token's embedding is moved by a random one, by
    `neftune_alpha` / sqrt(tokens of the sample x width) at most. Published: 5 to 15. Null: by none."""

    @property
    def language_model(self) -> CausalLMConfig | None:
        """This section, of a language model; `None` of any other kind."""
        return self if isinstance(self, CausalLMConfig) else None

    @property
    def cnn(self) -> CNNConfig | None:
        """This section, of the small convolutional network; `None` of any other kind."""
        return self if isinstance(self, CNNConfig) else None

    @property
    def custom(self) -> CustomModelConfig | None:
        """This section, of a user's own model; `None` of a built-in kind."""
        return self if isinstance(self, CustomModelConfig) else None

    @property
    def default_objective(self) -> str | None:
        """Kind of the objective that `auto` stands for; `None` of a user's own model."""
        if self.language_model is not None:
            return "causal_lm"
        return None if self.cnn is None else "classification"

    @property
    def pretrained_from(self) -> str | None:
        """Folder or hub name of a pretrained model; `None` of a new one."""
        return None if self.language_model is None else self.language_model.pretrained


class CausalLMConfig(ModelSection):
    """A language model from transformers: new (`architecture`) or with weights (`pretrained`)."""

    kind: Literal["causal_lm"] = "causal_lm"
    architecture: str | None = None
    """transformers model type of a new model with random weights: `llama`, `gpt2`, `qwen2`, ..."""
    pretrained: str | None = None
    """Local folder or hub name to start from (safetensors). Exactly one of this and `architecture`."""
    vocab_size: int | None = Field(None, gt=0, le=2**28)
    """Rows of the embedding. Default: the tokenizer's size. Not smaller than the tokenizer's."""
    hidden_size: int | None = Field(None, gt=0, le=2**20)
    """Width of the residual stream. Default: the architecture's own."""
    intermediate_size: int | None = Field(None, gt=0, le=2**24)
    """Width of the MLP. Default: the architecture's own."""
    num_layers: int | None = Field(None, gt=0, le=2**14)
    """Decoder blocks. Default: the architecture's own."""
    num_heads: int | None = Field(None, gt=0, le=2**16)
    """Attention heads. Default: the architecture's own."""
    num_key_value_heads: int | None = Field(None, gt=0, le=2**16)
    """Key-value heads of grouped-query attention. Default: the architecture's own."""
    max_sequence_length: int | None = Field(None, gt=0, le=2**30)
    """Longest sequence the positions allow. Default of a new model: `data.sequence_length`."""
    extra: dict[str, Any] = {}
    """Further fields of the transformers config of this architecture, in its own words."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Who computes attention. `auto`: this trainer by torch's kernels, document by document and without a
    mask, sliding windows, capped scores and sinks included; transformers where a model needs more, such as
    ALiBi (told at the start). The other names are transformers' own."""
    activation_checkpointing: Literal["none", "full", "selective"] | Annotated[int, Field(gt=0)] = "none"
    """Recompute activations in backward instead of keeping them: those of every block (`full`), of every
    Nth (a number), or of every block but for its matrix products (`selective`)."""
    activation_offload: bool = False
    """With `activation_checkpointing`: the input of each block that recomputes waits for backward in host
    memory. For long sequences: what a GPU keeps of one no longer grows with the blocks. The copies run on
    the compute stream, so a step takes longer."""
    fp8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Multiply the blocks' linear layers in fp8, by this recipe of torchao (the `fp8` extra): one scale a
    tensor, the fastest; one a row; one a row, and the gradients of weights as they are. On a CPU emulated.
    `evaluate` and `generate` multiply without."""
    trust_remote_code: bool = False
    """Run Python code that ships with the hub repository named in `pretrained`. `--no-import-paths` refuses
    it."""


# The recipe's word -> transformers' word.
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
    """Outputs. Default: the data set's."""
    channels: int = Field(32, gt=0, le=2**16)
    """Channels of the first convolution; the second has twice as many."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Probability of dropping an activation before the last layer."""


class CustomModelConfig(ModelSection):
    """A model of your own: `kind: package.module:function`, called with `args`, returns an nn.Module."""

    kind: str = Field(pattern=IMPORT_PATH)
    """Import path `package.module:function`. It runs that code; `--no-import-paths` refuses it."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""


def kind_tag(value: Any) -> str | None:
    """Return the tag of a section's union member: a built-in kind, or `custom` for an import path."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "custom" if isinstance(kind, str) and ":" in kind else kind


ModelConfig = Annotated[
    Annotated[CausalLMConfig, Tag("causal_lm")]
    | Annotated[CNNConfig, Tag("cnn")]
    | Annotated[CustomModelConfig, Tag("custom")],
    Discriminator(kind_tag),
]


AdapterKind = Literal["lora", "rslora", "dora"]
DEFAULT_ADAPTER_RANK, DEFAULT_ADAPTER_ALPHA = 32, 32.0


class AdapterConfig(RecipeSection):
    """Low-rank adapters (Hu et al. 2021), built by peft: the model's own weights stay as they are, and its
    linear layers add a product of two narrow matrices that is trained. `adapter: lora` is enough."""

    kind: AdapterKind = "lora"
    """`lora`: the product is scaled by alpha / rank. `rslora`: by alpha / sqrt(rank) (Kalajdzievski 2023).
    `dora`: the length of each of the layer's rows is trained as well (Liu et al. 2024); steps take longer."""
    rank: int | None = Field(None, gt=0, le=2**16)
    """Width of the narrow matrices. Default: 32, or that of `weights`."""
    alpha: float | None = Field(None, gt=0)
    """Scale of what they add, see `kind`. Default: 32, or that of `weights`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping a value of their input."""
    targets: list[str] | None = Field(None, min_length=1)
    """Linear layers that get one: names or shell patterns of the whole model's (`q_proj`,
    `model.layers.[0-3].*`). Default, also written `all-linear`: all but the output layer, or those of
    `weights`."""
    modules_to_save: list[str] | None = Field(None, min_length=1)
    """Modules that are trained whole beside the adapters, by names or shell patterns (`lm_head`). An
    embedding that grew (`model.grow_vocabulary`), and its output layer, always are."""
    init: Literal["uniform", "gaussian"] = "uniform"
    """First values of the matrix next to the input: as peft's default, or normal with a deviation of
    1 / rank. The other is 0, so that training starts from the model as it is."""
    quantize: Literal["nf4"] | None = None
    """`nf4`: the model's linear layers, all but the output layer and `modules_to_save`, hold their frozen
    weights in 4 bits (QLoRA, Dettmers et al. 2023): NF4 by bitsandbytes, in blocks of 64 whose scales are
    quantised as well, about 0.516 bytes a parameter. Plain PyTorch, DDP and ZeRO 0 to 2."""
    weights: str | None = None
    """Adapter to start from: a folder of peft's, or what `export` wrote of a run. It must be of this
    model."""

    @field_validator("targets", mode="before")
    @classmethod
    def _all_linear(cls, value: Any) -> Any:
        return None if value in ("all-linear", ["all-linear"]) else value

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value
