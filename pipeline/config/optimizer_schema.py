"""The optimizer and schedule sections of the recipe. See schema.py."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from pipeline.config.interval import WarmUp
from pipeline.config.loading import did_you_mean
from pipeline.config.model_schema import IMPORT_PATH, RecipeSection

ImportPath = Annotated[str, Field(pattern=IMPORT_PATH)]
"""Text of the form `package.module:function`."""
OptimizerKind = Literal["adamw", "sgd", "adafactor"]
ScheduleKind = Literal["cosine", "linear", "constant", "wsd"]


# Advice -> names, separated by spaces, of optimizers and schedules in other trainers and libraries.
_INSTEAD = {
    "write adamw": "adam adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused fusedadam fused_adam",
    "write adamw, and shard its states with --deepspeed zero2 or store them in host memory with --deepspeed "
    "zero2_offload": "adam8bit adam_8bit adamw8bit adamw_8bit adamw_bnb_8bit adamw_torch_4bit "
    "adamw_torch_8bit paged_adamw paged_adamw_8bit paged_adamw_32bit",
    "write adamw, and for the matrices of the blocks optimizer.groups: "
    '[{patterns: ["*_proj.weight"], kind: muon}]': "muon",
    "docs/how-to/extending.md shows it as your own class": "lion lion_8bit paged_lion_8bit paged_lion_32bit",
    **{f"write torch.optim:{name}": name.lower() for name in ("Adamax", "NAdam", "RAdam", "RMSprop")},
    "write constant, and schedule.warmup": "constant_with_warmup warmuplr",
    "write cosine, and schedule.min_learning_rate_ratio": "cosine_with_min_lr warmupcosinelr",
    "docs/how-to/extending.md shows it as a function of three lines": "cosine_with_restarts inverse_sqrt",
    "write linear, which has power 1": "polynomial polynomial_decay warmupdecaylr",
    "write wsd, and schedule.decay_steps": "trapezoidal warmup_stable_decay",
}
ADVICE_ON_OTHER_KINDS = {name: text for text, names in _INSTEAD.items() for name in names.split()}
"""Name in another trainer or library, in lower case and with `_` for `-` -> advice."""


def _check_kind(value: Any, built_in: Any) -> Any:
    """Return the value, unchanged. A value that is no text is left for pydantic to refuse.

    Raises:
        ValueError: The text is neither a built-in kind nor an import path. The message has advice.
    """
    kinds = get_args(built_in)
    if not isinstance(value, str) or value in kinds or re.match(IMPORT_PATH, value):
        return value
    if (advice := ADVICE_ON_OTHER_KINDS.get(value.lower().replace("-", "_"))) is not None:
        raise ValueError(f"{value!r} is no known kind; {advice}")
    raise ValueError(
        f"{value!r} is no known kind{did_you_mean(value.lower(), kinds)}; your own: package.module:function, "
        "see docs/how-to/extending.md"
    )


class ParameterGroupConfig(RecipeSection):
    """A group of parameters with its own learning rate, weight decay or optimizer.

    A parameter that several groups match belongs to the first. Parameters without a group use the
    `optimizer` section.
    """

    patterns: list[str] = Field(min_length=1)
    """Shell patterns for whole parameter names of the model; the names are the same under every split. `*`
    matches any text, also dots. Examples: `*.embed_tokens.*`, `model.layers.[01].*`. Each must match a
    trained parameter."""
    learning_rate_factor: float = Field(1.0, gt=0)
    """Learning rate of these parameters, as a multiple of the schedule's."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay of all these parameters, vectors included. Default: `optimizer.weight_decay`, for
    matrices only."""
    kind: Literal["adamw", "sgd", "adafactor", "muon"] | None = None
    """Optimizer of these parameters. Default: `optimizer.kind`. Another kind needs plain PyTorch or ZeRO 0,
    and such a run synchronizes with the device in every step. `muon` (Jordan et al. 2024; torch's, Nesterov
    momentum 0.95) is for matrices of the blocks, not for embeddings or the head. It makes each update
    orthogonal, and scales it to the size of AdamW's updates."""


class OptimizerConfig(RecipeSection):
    """AdamW (Loshchilov & Hutter 2019), SGD with momentum, Adafactor (Shazeer & Stern 2018) or your own.

    The built-in optimizers are torch's. They compute the same under every split.
    """

    kind: OptimizerKind | ImportPath = "adamw"
    """Optimizer. Its state has two numbers a parameter for `adamw`, one for `sgd`, and one for each row and
    column of a matrix for `adafactor`. `adafactor` needs whole matrices (plain PyTorch, ZeRO 0), and
    synchronizes with the device in every step. Your own: `package.module:function`, which is called with
    the parameter groups and `args` and returns a `torch.optim.Optimizer` (docs/how-to/extending.md). The
    key then runs that code; `--no-import-paths` refuses it."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of your own optimizer."""
    learning_rate: float | None = Field(3e-4, gt=0)
    """Peak learning rate. Default with an `adapter`: by the model's width, 5e-4 x (2000 /
    hidden_size)^0.781; for Qwen models the exponent is 0.0775 (Thinking Machines' fit to 27 models,
    2025)."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square (`adamw`)."""
    eps: float = Field(1e-8, gt=0)
    """Number added to the denominator (`adamw`)."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Factor by which a step multiplies the sum of earlier gradients (`sgd`). 0: no momentum and no state."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay of matrices; biases, norms and other vectors have none. The decay is decoupled from the
    gradient; only with `sgd` it is added to the gradient, after clipping."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Largest global gradient norm; gradients above it are clipped. 0 turns clipping off."""
    groups: list[ParameterGroupConfig] | None = None
    """Groups of parameters with their own learning rate, weight decay or optimizer, chosen by name."""

    @field_validator("kind", mode="before")
    @classmethod
    def _validate_kind(cls, value: Any) -> Any:
        return _check_kind(value, OptimizerKind)

    @field_validator("betas", mode="before")
    @classmethod
    def _convert_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value  # YAML and JSON have no tuples


class ScheduleConfig(RecipeSection):
    """The learning rate over the run: a linear warm-up, then the chosen shape."""

    kind: ScheduleKind | ImportPath = "cosine"
    """Shape after the warm-up. `wsd`: stable, then a linear decay over the last `decay_steps`. Your own:
    `package.module:function`, called as `function(step, total_steps)`, returns a factor of the peak. It
    decides the whole curve; the keys below are then errors (docs/how-to/extending.md). The key then runs
    that code; `--no-import-paths` refuses it."""
    warmup: WarmUp = 0
    """Length of the linear warm-up: optimizer steps (`100`), or a share of the run (`0.03`), rounded up to
    whole steps."""
    decay_steps: int | None = Field(None, gt=0)
    """Number of steps of the final decay (`wsd` only). Default: a fifth of the run."""
    min_learning_rate_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""

    @field_validator("kind", mode="before")
    @classmethod
    def _validate_kind(cls, value: Any) -> Any:
        return _check_kind(value, ScheduleKind)

    def warmup_steps(self, max_steps: int) -> int:
        """Return the length of the warm-up in steps; a share of the run is rounded up.

        Args:
            max_steps: Number of steps of the run.
        """
        is_share = isinstance(self.warmup, float)
        return math.ceil(self.warmup * max_steps) if is_share else int(self.warmup)
