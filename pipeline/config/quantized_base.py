"""Where `adapter.quantize` can be had."""

from __future__ import annotations

from importlib.util import find_spec

from pipeline.config.choice import Choice
from pipeline.errors import ConfigError


def refuse_quantized_base(choice: Choice) -> None:
    """Raises:
    ConfigError: it is asked for, and bitsandbytes is not installed.
    """
    if choice.quantizes_base and find_spec("bitsandbytes") is None:
        raise ConfigError(
            "adapter.quantize: nf4 needs bitsandbytes, which is not installed: "
            "pip install 'deepspeed-pipeline[qlora]', or leave adapter.quantize out"
        )
