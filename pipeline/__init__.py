"""A DeepSpeed training pipeline. docs/reference/api.md lists the names that a script may use.

Importing this package loads neither torch nor DeepSpeed: each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.config.settings import Settings, load_settings
    from pipeline.errors import PipelineError
    from pipeline.monitoring.events import Event
    from pipeline.training.api import Run, evaluate, export, generate
    from pipeline.training.callbacks import Answer, Callback, Moment
    from pipeline.training.loop import Step

__all__ = [
    "Answer",
    "Callback",
    "Event",
    "Moment",
    "PipelineError",
    "Run",
    "Settings",
    "Step",
    "evaluate",
    "export",
    "generate",
    "load_settings",
]

_MODULES = {
    "Answer": "training.callbacks",
    "Callback": "training.callbacks",
    "Event": "monitoring.events",
    "Moment": "training.callbacks",
    "PipelineError": "errors",
    "Run": "training.api",
    "Settings": "config.settings",
    "Step": "training.loop",
    "evaluate": "training.api",
    "export": "training.api",
    "generate": "training.api",
    "load_settings": "config.settings",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
