"""What the recipe asks for that not every installation or GPU has."""

from __future__ import annotations

from pipeline.config.combinations import Choice
from pipeline.config.optional_packages import require
from pipeline.errors import ConfigError


def refuse_missing(choice: Choice) -> None:
    """Check packages and the GPU before data and model are built.

    Raises:
        ConfigError: A package is not installed, or the GPU has no products in fp8.
    """
    fp8 = f"model.fp8: {choice.model('fp8')}"
    adapter, split = choice.config.adapter, choice.split
    if choice.multiplies_in_fp8:
        require("torchao", fp8, "set model.fp8=none")
    if choice.quantizes_base:
        require("bitsandbytes", "adapter.quantize: nf4", "leave adapter.quantize out")
    if adapter is not None:
        require("peft", f"adapter: {adapter.kind or 'lora'}", "leave adapter out to train all weights")
    if split.tensor_parallel > 1:
        require("accelerate", "tensor_parallel", "leave tensor_parallel out")
    if split.pipeline_stages > 1:
        require("accelerate", "pipeline", "leave pipeline out")
    if split.zero_stage == 3 and choice.model("pretrained") is not None:
        require("accelerate", "model.pretrained with ZeRO-3", "set zero_optimization.stage to 2")
    if choice.multiplies_in_fp8 and not choice.device.fp8:
        raise ConfigError(
            f"{fp8}: this GPU does not multiply in fp8, which NVIDIA's do from "
            "Ada and Hopper on (8.9) and AMD's from MI300 on; set model.fp8=none"
        )
