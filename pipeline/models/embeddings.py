"""Embeddings: rows for new tokens of a growing vocabulary, and noise during training.

NEFTune (Jain et al. 2023, arXiv 2310.05914) adds uniform noise to embeddings. The noise of a token is not
drawn, but a hash of the token's key (see data/random_numbers.py) and the column. The noise therefore does not
depend on rank, row, micro-batch or device. The price is that equal documents of a step get equal noise. Only
training batches come with keys, so evaluation, generation and a reference model compute without noise.

Shapes: B rows, T tokens, N = B * T, D the embeddings' width.
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

NOISE_KEYS = "noise_keys"
"""Entry of a batch with the keys (B, T), and the keyword with which the model's forward gets them."""
_LOW_HALF = 2**32 - 1  # mask of the lower half of an int64
_NOISE_BITS = 24  # significant bits of fp32
_ELEMENTS_AT_ONCE = 2**22  # more elements in int64 at a time would raise the peak of memory


def find_vocabulary_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that have a row for each token of the vocabulary; a tied one once.

    The list is empty if the model does not name its embeddings (get_input_embeddings).
    """
    parameters: dict[nn.Parameter, None] = {}
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, getter, lambda: None)()
        if module is not None and module is getattr(model, "score", None):
            continue  # a reward model's output layer gives one score, not one for each token
        for name in ("weight", "bias"):
            parameter = getattr(module, name, None)
            if isinstance(parameter, nn.Parameter):
                parameters[parameter] = None
    return list(parameters)


def get_vocabulary_size(model: nn.Module) -> int | None:
    """Return the vocabulary size in the config of a model or pipeline stage; `None` if there is none."""
    config = getattr(model, "config", None)
    size: int | None = getattr(config, "vocab_size", None)
    return size


@torch.no_grad()
def fill_rows(target: Tensor, values: Tensor) -> None:
    """Copy `values` (r, ...) into the first rows of `target` (R, ...), and their mean into the other rows.

    With the mean, a new token changes the model's predictions no more than an average token does
    (https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """
    rows = len(values)
    target[:rows].copy_(values)
    if len(target) > rows:
        # Blocks of a fixed size, in fp64: then the mean does not depend on the number of threads.
        total = sum(block.double().sum(0) for block in values.split(ROWS_AT_ONCE))
        target[rows:] = torch.as_tensor(total / rows)


def grow_vocabulary(model: Any, rows: int, sharding: Sharding) -> None:
    """Enlarge the embeddings of a transformers model to `rows` rows. Collective at ZeRO-3.

    A new parameter replaces one with fewer rows, and is marked with `has_new_rows`: an adapter trains it
    whole. A parameter that has as many rows or more stays as it is.

    Args:
        model: The model, changed in place, with its config.
        rows: The size of the new vocabulary.
        sharding: The split in which the model was built.

    Raises:
        ModelError: The model does not name its embeddings.
    """
    parameters = find_vocabulary_parameters(model)
    if not parameters:
        raise ModelError(
            f"model.grow_vocabulary: a {model.config.model_type} does not name its embeddings, so they "
            "cannot grow; use the model's own tokenizer (data.tokenizer.pretrained)"
        )
    for old in parameters:
        with sharding.gather([old]):
            if len(old) >= rows:
                continue
            values = torch.empty(rows, *old.shape[1:], dtype=old.dtype)
            fill_rows(values, old.data)
        with sharding.construct():
            new = _ParameterHolder(values, old.requires_grad).values
        new.has_new_rows = True  # type: ignore[attr-defined]
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is old:
                    module._parameters[name] = new
    for getter, size in (
        ("get_input_embeddings", "num_embeddings"),
        ("get_output_embeddings", "out_features"),
    ):
        module = getattr(model, getter)()
        if hasattr(module, size):
            setattr(module, size, max(rows, getattr(module, size)))
    model.config.get_text_config().vocab_size = model.vocab_size = rows


class _ParameterHolder(nn.Module):
    """A module around one parameter, since ZeRO-3 shards the parameters of modules only."""

    def __init__(self, values: Tensor, requires_grad: bool):
        super().__init__()
        self.values = nn.Parameter(values, requires_grad)


def add_embedding_noise(model: nn.Module, alpha: float) -> None:
    """Let the model add noise to the output of its token embedding in calls with the keyword `noise_keys`.

    Args:
        model: The model; hooks are registered on it.
        alpha: NEFTune's alpha.

    Raises:
        ModelError: The model has no token embedding that can be found.
    """
    embedding = _find_embedding(model)
    if embedding is None:
        raise ModelError(
            f"model.neftune_alpha: a {type(model).__name__} has no token embedding to add noise to; use a "
            "transformers model that takes token ids, or set model.neftune_alpha=null"
        )
    _register_noise_hook(embedding, alpha)
    model.register_forward_pre_hook(partial(_pass_keys, alpha), with_kwargs=True)


def set_noise_keys(embedding: nn.Module, keys_BT: Iterable[Tensor]) -> None:
    """Set the keys for the next calls of the embedding, one tensor for each; later calls add no noise."""
    setattr(embedding, NOISE_KEYS, deque(keys_BT))


def compute_noise(keys_BT: Tensor, width: int, alpha: float) -> Tensor:
    """Return noise (B, T, D), fp32, between -alpha / sqrt(L D) and alpha / sqrt(L D).

    The computation is in integers until the last division, so every device gives the same noise.

    Args:
        keys_BT: The tokens' keys: a hash in the upper 32 bits, and L, the number of tokens of the token's
            document, in the lower 32 bits.
        width: The embeddings' width D.
        alpha: NEFTune's alpha.
    """
    keys_N = keys_BT.flatten()
    columns_D = _hash_words(torch.arange(1, width + 1, device=keys_N.device))
    lengths_N = (keys_N & _LOW_HALF).clamp(min=1).double()
    largest_N1 = (alpha / (lengths_N * width).sqrt()).float()[:, None]
    noise_ND = torch.empty(len(keys_N), width, device=keys_N.device)
    tokens = max(1, _ELEMENTS_AT_ONCE // width)
    chunks = zip(noise_ND.split(tokens), keys_N.split(tokens), largest_N1.split(tokens), strict=True)
    for noise, keys, largest in chunks:
        bits = _hash_words((keys >> 32 & _LOW_HALF)[:, None] ^ columns_D) >> (32 - _NOISE_BITS)
        # The middle of one of 2^24 equal parts of [-1, 1]: an odd number over 2^24, which fp32 represents.
        torch.mul((bits * 2 + 1 - 2**_NOISE_BITS).float() / 2**_NOISE_BITS, largest, out=noise)
    return noise_ND.view(*keys_BT.shape, width)


def _hash_words(words: Tensor) -> Tensor:
    """Apply a bijection of 32 bits (Wellons, "lowbias32") to each int64, whose upper half stays zero."""
    words = words ^ words >> 16
    words.mul_(0x7FEB352D).bitwise_and_(_LOW_HALF)
    words ^= words >> 15
    words.mul_(0x846CA68B).bitwise_and_(_LOW_HALF)
    words ^= words >> 16
    return words


def _find_embedding(model: nn.Module) -> nn.Module | None:
    try:
        embedding = model.get_input_embeddings() if is_transformers_model(model) else None
    except NotImplementedError:
        return None
    base = getattr(embedding, "base_layer", embedding)  # the layer that an adapter wraps
    return embedding if isinstance(base, nn.Embedding) else None  # a vision model's may be a convolution


def _register_noise_hook(embedding: nn.Module, alpha: float) -> None:
    embedding.register_forward_hook(partial(_add_noise, alpha))
    set_noise_keys(embedding, ())


def _pass_keys(alpha: float, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the keys out of a forward's arguments and pass them to the embedding; a forward pre-hook."""
    keys_BT = kwargs.pop(NOISE_KEYS, None)
    embedding = model.get_input_embeddings()
    if not hasattr(embedding, NOISE_KEYS):  # AutoTP has replaced the embedding
        _register_noise_hook(embedding, alpha)
    set_noise_keys(embedding, () if keys_BT is None else (keys_BT,))
    return args, kwargs


def _add_noise(alpha: float, embedding: Any, _: Any, embedded_BTD: Tensor) -> Tensor:
    """Return the embedding's output with noise, if there are keys for this call; a forward hook."""
    keys = getattr(embedding, NOISE_KEYS)
    if not keys:
        return embedded_BTD
    noise_BTD = compute_noise(keys.popleft(), embedded_BTD.shape[-1], alpha)
    return embedded_BTD + noise_BTD.to(embedded_BTD.dtype)
