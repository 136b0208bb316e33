"""Checks of packages that only some features need, and of DeepSpeed's version.

Each error says how to install the package.
"""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from pipeline.errors import ConfigError

EXTRAS = {
    "PIL": "images",
    "bitsandbytes": "qlora",
    "lm_eval": "tasks",
    "sklearn": "images",
    "starlette": "serve",
    "tensorboard": "tensorboard",
    "torchao": "fp8",
    "uvicorn": "serve",
}
"""Module -> extra of pyproject.toml that installs it."""
DISTRIBUTIONS = {"lm_eval": "lm-eval", "PIL": "pillow", "sklearn": "scikit-learn"}
"""Module -> name of its package on PyPI, if the two differ."""

DEEPSPEED_VERSION = "0.19.8"
"""Required version of DeepSpeed. engine/deepspeed_patches.py changes internals of exactly this version."""


class MissingPackageError(ConfigError):
    """A setting needs a package that is not installed."""


def is_installed(module: str) -> bool:
    """Return whether a top-level module is installed, without importing it."""
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
        alternative: What to do instead of installing the package, in the imperative; empty for nothing.

    Raises:
        MissingPackageError: The module is not installed.
    """
    if is_installed(module):
        return
    distribution = DISTRIBUTIONS.get(module, module)
    extra = EXTRAS.get(module)
    target = distribution if extra is None else _format_extra(extra)
    message = f"{feature} needs {distribution}, which is not installed: pip install {target}"
    raise MissingPackageError(f"{message}, or {alternative}" if alternative else message)


def _format_extra(extra: str) -> str:
    """Return the arguments of `pip install` for an extra: of this clone, or else of the installed package."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"-e {shlex.quote(f'{clone}[{extra}]')}"
    return f"'deepspeed-pipeline[{extra}]'"


def require_deepspeed() -> None:
    """Check the version of DeepSpeed before any of its internals is imported.

    Raises:
        ConfigError: Another version is installed, or none.
    """
    try:
        installed = metadata.version("deepspeed").partition("+")[0]  # without a local label such as +cu124
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed != DEEPSPEED_VERSION:
        raise ConfigError(
            f"deepspeed {DEEPSPEED_VERSION} is needed, since this trainer corrects its internals; "
            f"installed: {installed}; pip install deepspeed=={DEEPSPEED_VERSION}"
        )
