"""A user's own model by import path."""

from __future__ import annotations

import inspect

from torch import nn

from pipeline.config.model_schema import CustomModelConfig
from pipeline.errors import ModelError
from pipeline.importing import import_object
from pipeline.models.request import ModelRequest


def build_custom(config: CustomModelConfig, request: ModelRequest) -> nn.Module:
    """Calls the function `kind` names with `args`; it returns an nn.Module.

    Raises:
        ModelError: no such function, arguments that do not fit it, or another return type.
    """
    build = import_object(config.kind, ModelError)
    if isinstance(build, nn.Module):
        raise ModelError(f"model.kind: {config.kind} is a module; name a function or a class that makes it")
    try:
        inspect.signature(build).bind(**config.args)
    except TypeError as error:
        raise ModelError(f"model.args do not fit {config.kind}: {error}") from None
    except ValueError:
        pass  # a callable written in C may have no signature
    with request.sharding.construct():
        model = build(**config.args)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.kind: {config.kind} returned a {type(model).__name__}, not an nn.Module")
    return model
