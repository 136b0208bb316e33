"""The error that says how to install a package that one feature needs, or the DeepSpeed that is needed."""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec

from pipeline.errors import ConfigError

EXTRAS = {
    "PIL": "images",
    "bitsandbytes": "qlora",
    "sklearn": "images",
    "tensorboard": "tensorboard",
    "torchao": "fp8",
}
"""Module -> the extra of pyproject.toml that installs it."""
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}
"""Module -> the name under which pip installs it, where the two differ."""

DEEPSPEED = "0.19.8"
"""Version of DeepSpeed whose internals engine/deepspeed_patches.py changes."""


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported, without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    spec = find_spec(module)
    # A folder without __init__.py, such as the wandb/ that W&B writes, has a spec without an origin.
    return spec is not None and spec.origin is not None


def require_package(module: str, feature: str, alternative: str = "") -> None:
    """Check that a module is installed before a feature imports it.

    Args:
        module: Top-level module.
        feature: Setting, file or command that needs it, for the message.
        alternative: Change that avoids the package. Empty: there is none.

    Raises:
        ConfigError: The module is not installed.
    """
    if is_installed(module):
        return
    distribution = DISTRIBUTIONS.get(module, module)
    extra = EXTRAS.get(module)
    target = distribution if extra is None else f"'deepspeed-pipeline[{extra}]'"
    message = f"{feature} needs {distribution}, which is not installed: pip install {target}"
    raise ConfigError(f"{message}, or {alternative}" if alternative else message)


def require_deepspeed() -> None:
    """Check the version of DeepSpeed before its internals are imported, which another one may not have.

    Raises:
        ConfigError: It is another version, or not installed.
    """
    try:
        found = metadata.version("deepspeed").partition("+")[0]
    except metadata.PackageNotFoundError:
        found = "none"
    if found != DEEPSPEED:
        raise ConfigError(
            f"deepspeed {DEEPSPEED} is needed, whose internals are corrected here; installed: {found}; "
            f"pip install deepspeed=={DEEPSPEED}"
        )
