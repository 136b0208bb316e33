"""Where `model.fp8` can be had."""

from __future__ import annotations

from importlib.util import find_spec

from pipeline.config.choice import Choice
from pipeline.errors import ConfigError


def refuse_fp8(choice: Choice) -> None:
    """Raises:
    ConfigError: it is asked for, and torchao is not installed or the GPU has no such products.
    """
    if not choice.multiplies_in_fp8:
        return
    if find_spec("torchao") is None:
        raise ConfigError(
            f"model.fp8: {choice.model('fp8')} needs torchao, which is not installed: "
            "pip install 'deepspeed-pipeline[fp8]', or set model.fp8=none"
        )
    if not choice.device.fp8:
        raise ConfigError(
            f"model.fp8: {choice.model('fp8')}: this GPU does not multiply in fp8, which NVIDIA's do from "
            "Ada and Hopper on (8.9) and AMD's from MI300 on; set model.fp8=none"
        )
