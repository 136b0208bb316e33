"""Embeddings: rows for the new tokens of a vocabulary that grows, and noise on those that are trained on.

NEFTune (Jain et al. 2023, arXiv 2310.05914) adds uniform noise. A token's noise is a function of its key
and the column alone (see data/random_numbers.py), so it is the same under every split. A batch that brings no
keys, as in evaluation, gets none. Shapes: B rows, T tokens, N = B * T, D the embeddings' width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ModelError
from pipeline.models.sharding import Sharding
from pipeline.models.transformers_facts import is_transformers_model

ROWS_AT_ONCE = 4096


def find_vocabulary_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those with a row for each token, tied ones once; none where the model does not name its embeddings."""
    found: dict[nn.Parameter, None] = {}
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, getter, lambda: None)()
        if module is not None and module is getattr(model, "score", None):
            continue
        for name in ("weight", "bias"):
            parameter = getattr(module, name, None)
            if isinstance(parameter, nn.Parameter):
                found[parameter] = None
    return list(found)


def get_vocabulary_size(model: nn.Module) -> int | None:
    """How many words a language model, or its stage, knows by its config; None: it does not say."""
    config = getattr(model, "config", None)
    words: int | None = getattr(config, "vocab_size", None)
    return words


@torch.no_grad()
def fill_rows(target: Tensor, values: Tensor) -> None:
    """The first rows of `target` (R, ...) become `values` (r, ...), every further one their mean.

    A token that is new then changes no distribution more than an average one would
    (https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """
    rows = len(values)
    target[:rows].copy_(values)
    if len(target) > rows:
        # In fp64 and in fixed blocks: the same value whatever the number of threads.
        total = sum(block.double().sum(0) for block in values.split(ROWS_AT_ONCE))
        target[rows:] = torch.as_tensor(total / rows)


def grow_vocabulary(model: Any, rows: int, sharding: Sharding) -> None:
    """Gives a model of transformers that many rows; what has as many or more stays. Collective at ZeRO-3.

    Raises:
        ModelError: it does not say which parameters they are.
    """
    parameters = find_vocabulary_parameters(model)
    if not parameters:
        raise ModelError(f"model.grow_vocabulary: a {model.config.model_type} does not name its embeddings")
    for old in parameters:
        with sharding.gather([old]):
            if len(old) >= rows:
                continue
            values = torch.empty(rows, *old.shape[1:], dtype=old.dtype)
            fill_rows(values, old.data)
        with sharding.construct():
            new = _Holder(values, old.requires_grad).values
        new.has_new_rows = True  # type: ignore[attr-defined] # an adapter leaves it trained
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is old:
                    module._parameters[name] = new
    for getter, size in (
        ("get_input_embeddings", "num_embeddings"),
        ("get_output_embeddings", "out_features"),
    ):
        if hasattr(module := getattr(model, getter)(), size):
            setattr(module, size, max(rows, getattr(module, size)))
    model.config.get_text_config().vocab_size = model.vocab_size = rows


class _Holder(nn.Module):
    """A module that is made only for ZeRO-3 to shard its parameter."""

    def __init__(self, values: Tensor, requires_grad: bool):
        super().__init__()
        self.values = nn.Parameter(values, requires_grad)


NOISE_KEYS = "noise_keys"  # in a batch (B, T), and on its way through the model's forward
_LOW, _BITS = 2**32 - 1, 24  # as many as fp32 has
_ELEMENTS = 2**22  # worked on at a time: more in int64 would be seen in the peak of memory


def add_embedding_noise(model: nn.Module, alpha: float) -> None:
    """Has the model add noise to the output of its token embedding where it is called with keys.

    Raises:
        ModelError: it has no token embedding that can be found.
    """
    embedding = _embedding_of(model)
    if embedding is None:
        raise ModelError(
            f"model.neftune_alpha: a {type(model).__name__} has no token embedding to add noise to (a "
            "transformers model that takes ids has); use null"
        )
    _listen(embedding, alpha)
    model.register_forward_pre_hook(partial(_hand_on, alpha), with_kwargs=True)


def set_noise_keys(embedding: nn.Module, keys_BT: Iterable[Tensor]) -> None:
    """The next calls of the embedding are of these tokens, and those after them get no noise."""
    setattr(embedding, NOISE_KEYS, deque(keys_BT))


def compute_noise(keys_BT: Tensor, width: int, alpha: float) -> Tensor:
    """(B, T, D) fp32, within alpha / sqrt(L D) of 0, L the number of tokens of a token's document.

    In whole numbers until the last division, so that every device gives the same.
    """
    keys_N = keys_BT.flatten()
    columns_D = _scrambled(torch.arange(1, width + 1, device=keys_N.device))
    lengths_N = (keys_N & _LOW).clamp(min=1).double()
    largest_N1 = (alpha / (lengths_N * width).sqrt()).float()[:, None]
    noise_ND = torch.empty(len(keys_N), width, device=keys_N.device)
    size = max(1, _ELEMENTS // width)
    for noise, keys, largest in zip(
        *(each.split(size) for each in (noise_ND, keys_N, largest_N1)), strict=True
    ):
        bits = _scrambled((keys >> 32 & _LOW)[:, None] ^ columns_D) >> (32 - _BITS)
        # The middle of one of 2^24 equal parts of [-1, 1]: an odd number over 2^24, which fp32 holds.
        torch.mul((bits * 2 + 1 - 2**_BITS).float() / 2**_BITS, largest, out=noise)
    return noise_ND.view(*keys_BT.shape, width)


def _scrambled(words: Tensor) -> Tensor:
    """A bijection of 32 bits (Wellons, "lowbias32"), of each; in int64, whose upper half is left out."""
    words = words ^ words >> 16
    words.mul_(0x7FEB352D).bitwise_and_(_LOW)
    words ^= words >> 15
    words.mul_(0x846CA68B).bitwise_and_(_LOW)
    words ^= words >> 16
    return words


def _embedding_of(model: nn.Module) -> nn.Module | None:
    try:
        embedding = model.get_input_embeddings() if is_transformers_model(model) else None
    except NotImplementedError:
        return None
    own = getattr(embedding, "base_layer", embedding)  # inside of an adapter
    return embedding if isinstance(own, nn.Embedding) else None  # of images it is a convolution, for one


def _listen(embedding: nn.Module, alpha: float) -> None:
    embedding.register_forward_hook(partial(_add, alpha))
    set_noise_keys(embedding, ())


def _hand_on(alpha: float, model: Any, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Before the model's forward, which knows of no keys."""
    keys_BT = named.pop(NOISE_KEYS, None)
    embedding = model.get_input_embeddings()
    if not hasattr(embedding, NOISE_KEYS):  # AutoTP has put its own in the place
        _listen(embedding, alpha)
    set_noise_keys(embedding, () if keys_BT is None else (keys_BT,))
    return values, named


def _add(alpha: float, embedding: Any, _: Any, embedded_BTD: Tensor) -> Tensor:
    """After the embedding's forward."""
    coming = getattr(embedding, NOISE_KEYS)
    if not coming:
        return embedded_BTD
    noise_BTD = compute_noise(coming.popleft(), embedded_BTD.shape[-1], alpha)
    return embedded_BTD + noise_BTD.to(embedded_BTD.dtype)
