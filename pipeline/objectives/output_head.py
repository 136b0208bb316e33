"""Has a model's output layer return the loss in place of logits, inside its own forward.

There its weight is whole (ZeRO 3 gathers it for that long), and hooks of engines on its output and its
parameters do what they always do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipeline.models.of_transformers import is_model
from pipeline.objectives.given_logits import FusedKernels
from pipeline.objectives.linear_cross_entropy import linear_cross_entropy_sum
from pipeline.objectives.linear_token_losses import linear_token_losses
from pipeline.objectives.model_call import unwrapped
from pipeline.objectives.vocabulary_part import part_of_vocabulary


class OutputHeads:
    """The output layers of the models that an objective is called with."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, nn.Linear | None] = WeakKeyDictionary()

    def of(self, model: Callable[..., Any]) -> nn.Linear | None:
        """A language model's, if its logits are this layer's outputs as they are.

        None for any other model, for one that is compiled whole, and for replicas on several devices.
        """
        if not isinstance(model, nn.Module):
            return None
        if model not in self._known:
            own = unwrapped(model)
            is_plain = not (isinstance(model, nn.DataParallel) or hasattr(model, "_orig_mod"))
            self._known[model] = _head(own) if is_plain else None
        return self._known[model]


class HeadAlone(nn.Module):
    """An output layer in the place of the model, on a pipeline's last stage, where hidden states are there.

    Args:
        output: Makes of logits what the whole model returns.
    """

    def __init__(self, head: nn.Linear, output: Callable[[Tensor], Any]):
        super().__init__()
        self.head = head
        self._output = output
        self._hidden_BTD: Tensor | None = None

    @contextmanager
    def given(self, hidden_BTD: Tensor) -> Iterator[None]:
        """Inside, these are the hidden states of whatever it is called with."""
        self._hidden_BTD = hidden_BTD
        try:
            yield
        finally:
            self._hidden_BTD = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output(self.head(self._hidden_BTD))


class LossInHead:
    """What became of the labels that were handed to the layer."""

    is_taken = False
    """Whether the model's logits are the loss."""


@contextmanager
def loss_in(
    head: nn.Linear | None,
    labels_BT: Tensor,
    of_tokens: bool = False,
    kernels: FusedKernels | None = None,
) -> Iterator[LossInHead]:
    """Inside, the layer returns the loss sum, (1,), of hidden states that fit the labels, and else logits.

    Args:
        of_tokens: The losses of all tokens, (B, T), in place of their sum.
        kernels: See linear_cross_entropy_sum.
    """
    told = LossInHead()
    if head is None:
        yield told
        return

    plain = head.forward  # ranks of a cut layer put their logits together

    def forward(input: Tensor) -> Tensor:  # as nn.Linear names it
        hidden_BTD = input
        weight_VD, kind = head.weight, hidden_BTD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
        if hidden_BTD.shape[:-1] != labels_BT.shape:
            return plain(hidden_BTD)
        told.is_taken = True
        hidden_ND = hidden_BTD.flatten(0, 1)
        labels_N, part = labels_BT.flatten(), part_of_vocabulary(head)
        given = (hidden_ND, weight_VD, head.bias, labels_N, dtype, part, kernels)
        if of_tokens:
            return linear_token_losses(*given).view(labels_BT.shape)
        return linear_cross_entropy_sum(*given)[None]

    head.forward = forward  # type: ignore[method-assign]
    try:
        yield told
    finally:
        del head.forward


def _head(model: Any) -> nn.Linear | None:
    if isinstance(model, HeadAlone):
        return model.head
    if not is_model(model) or model._compiled_call_impl is not None:
        return None
    head, decoder = model.get_output_embeddings(), getattr(model, model.base_model_prefix, None)
    names = {child: name for name, child in model.named_children()}
    is_linear = type(head) is nn.Linear or part_of_vocabulary(head) is not None
    if not is_linear or head not in names or decoder not in names or "forward" in vars(head):
        return None
    return head if _returns_outputs(model, head, names[head], names[decoder]) else None


@torch.no_grad()
def _returns_outputs(model: nn.Module, head: nn.Linear, head_name: str, decoder_name: str) -> bool:
    """Tried with stand-ins for both parts: whether the logits are the very tensor that the layer returns."""
    weight = head.weight
    hidden_BTD = torch.empty(1, 2, head.in_features, dtype=weight.dtype, device=weight.device)
    stand_in = _StandInHead(weight)
    parts = dict(model._modules)
    model._modules |= {head_name: stand_in, decoder_name: _StandInDecoder(hidden_BTD)}
    try:
        output = model.forward(input_ids=torch.zeros(1, 2, dtype=torch.long, device=weight.device))
        is_whole = len(stand_in.given) == 1 and stand_in.given[0].shape == hidden_BTD.shape
        return is_whole and output.logits is stand_in.logits_BTV
    except Exception:  # whatever a forward raises that looks for more than there is
        return False
    finally:
        model._modules |= parts


class _StandInHead(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = weight
        self.given: list[Tensor] = []
        self.logits_BTV = torch.empty(1, 2, 1, dtype=weight.dtype, device=weight.device)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        self.given.append(hidden_BTD)
        return self.logits_BTV


class _StandInDecoder(nn.Module):
    def __init__(self, hidden_BTD: Tensor):
        super().__init__()
        self._output = _Output(hidden_BTD)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output


class _Output(tuple[Tensor]):
    """The hidden states, first and by name; there is nothing else."""

    def __new__(cls, hidden_BTD: Tensor) -> _Output:
        return super().__new__(cls, (hidden_BTD,))

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None
