"""What the recipe asks for that not every installation or GPU has."""

from __future__ import annotations

from importlib.util import find_spec

from pipeline.config.choice import Choice
from pipeline.errors import ConfigError


def refuse_missing(choice: Choice) -> None:
    """Raises:
    ConfigError: a library of an extra is not installed, or the GPU has no products in fp8.
    """
    fp8 = f"model.fp8: {choice.model('fp8')}"
    if choice.multiplies_in_fp8:
        _need("torchao", fp8, "fp8", "set model.fp8=none")
    if choice.quantizes_base:
        _need("bitsandbytes", "adapter.quantize: nf4", "qlora", "leave adapter.quantize out")
    if choice.multiplies_in_fp8 and not choice.device.fp8:
        raise ConfigError(
            f"{fp8}: this GPU does not multiply in fp8, which NVIDIA's do from "
            "Ada and Hopper on (8.9) and AMD's from MI300 on; set model.fp8=none"
        )


def _need(library: str, asked: str, extra: str, instead: str) -> None:
    if find_spec(library) is None:
        raise ConfigError(
            f"{asked} needs {library}, which is not installed: pip install 'deepspeed-pipeline[{extra}]', "
            f"or {instead}"
        )
