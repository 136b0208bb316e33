"""Pretrained weights into a model of which a rank keeps parts: one tensor at a time is whole, never all.

transformers' from_pretrained puts each tensor that it has read, converted and cast in the place of one
without values. Here the sharding takes it from there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import PreTrainedModel

from pipeline.errors import ModelError
from pipeline.models.sharding import Sharding

# transformers reads ahead in threads, as many tensors as they get done.
NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
# What it marks those parameters with that it is not to draw.
READ = "_is_hf_initialized"


@contextmanager
def filled_tensorwise(sharding: Sharding) -> Iterator[None]:
    """Inside it `from_pretrained` may be called once; the model is `made` before its first values come.

    Raises:
        ModelError: see Sharding.made; the files have two tensors for one that the model ties.
    """
    filling = _Filling(sharding)
    before = os.environ.get(NO_THREADS)
    os.environ[NO_THREADS] = "1"
    hooks = (
        register_module_module_registration_hook(filling.note_parent),
        register_module_parameter_registration_hook(filling.fill),  # type: ignore[arg-type]
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        os.environ.pop(NO_THREADS)
        if before is not None:
            os.environ[NO_THREADS] = before


class _Filling:
    """What torch calls where a module gets a part."""

    def __init__(self, sharding: Sharding):
        self._sharding = sharding
        self._parents: dict[nn.Module, nn.Module] = {}
        self._tied: dict[nn.Parameter, str | None] | None = None
        """Those with several names, and the checksum of what they were filled with; None: nothing was yet."""

    def note_parent(self, module: nn.Module, _: str, child: nn.Module | None) -> None:
        if child is not None:
            self._parents[child] = module

    @torch.no_grad()
    def fill(self, module: nn.Module, name: str, values: nn.Parameter | None) -> nn.Parameter | None:
        """What is registered in the place of `values`; None: they are."""
        if values is None or values.is_meta or not hasattr(values, READ):
            return None
        if module._parameters.get(name) is None:
            return None
        if self._tied is None:
            self._tied = self._make(module)
        parameter = module._parameters[name]  # what it was tied to just now, if it was
        assert parameter is not None
        if parameter is values:
            return None
        if parameter in self._tied:
            self._refuse_two(parameter, name, values)
        with self._sharding.whole([parameter]):
            parameter.data.copy_(values)
        setattr(parameter, READ, True)
        return parameter

    def _make(self, model: nn.Module) -> dict[nn.Parameter, str | None]:
        while model in self._parents:
            model = self._parents[model]
        assert isinstance(model, PreTrainedModel)
        model.tie_weights(recompute_mapping=False)  # transformers does so after it has read them
        self._sharding.made(model)
        times = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        return {parameter: None for parameter, number in times.items() if number > 1}

    def _refuse_two(self, parameter: nn.Parameter, name: str, values: Tensor) -> None:
        assert self._tied is not None
        found = xxhash.xxh3_64_hexdigest(values.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        if self._tied[parameter] not in (None, found):
            raise ModelError(
                f"model.pretrained: the model has one {name} for input and output, the files have two, which "
                'differ; write "tie_word_embeddings": false into its config.json'
            )
        self._tied[parameter] = found
