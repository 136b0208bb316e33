"""The recipe's adapter section: low-rank matrices that are trained in place of a model's own."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.model_schema import Closed

Kind = Literal["lora", "rslora", "dora"]
RANK, ALPHA = 32, 32.0


class AdapterConfig(Closed):
    """Low-rank adapters (Hu et al. 2021), built by peft: the model's own weights stay as they are, and its
    linear layers add a product of two narrow matrices that is trained. `adapter: lora` is enough."""

    kind: Kind = "lora"
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
