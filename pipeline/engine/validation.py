"""DeepSpeed's own validation of a configuration, without a process group."""

from __future__ import annotations

import copy
import logging
from typing import Any

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

from pipeline.engine.deepspeed_patches import check_patches
from pipeline.errors import ConfigError


def check_configuration(config: dict[str, Any]) -> None:
    """Lets the installed DeepSpeed look at every value; a newer one may refuse what config/ knows nothing of.

    Raises:
        ConfigError: DeepSpeed refuses one, or differs from the version that deepspeed_patches knows where
            this configuration uses it.
    """
    deepspeed.utils.logger.setLevel(logging.WARNING)
    check_patches(config)
    config = copy.deepcopy(config)
    config.pop("train_batch_size", None)  # it would be held to the ranks, who may not have met yet
    try:
        DeepSpeedConfig(config)
    except (ValueError, AssertionError, DeepSpeedConfigError) as error:  # pydantic's error is a ValueError
        raise ConfigError(f"DeepSpeed refuses the configuration: {' '.join(str(error).split())}") from None
