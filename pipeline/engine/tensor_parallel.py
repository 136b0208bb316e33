"""What DeepSpeed's AutoTP needs beside itself: a loss over the words of all ranks, a norm that counts every
part once, and which part of the whole model a rank holds.

Matrices are cut over the ranks of a tensor group as transformers' plan says, an output layer by words, with
the embedding that is tied to it; norms and other embeddings lie whole on each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.layers import LinearLayer, VocabParallelEmbedding, VocabParallelLinear
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from torch import Tensor, nn

from pipeline.checkpoint.shards import Box
from pipeline.engine.state import WHOLE_TENSOR, Placements, TensorPlacement, place_whole_parameters
from pipeline.errors import ModelError
from pipeline.models.transformers_facts import is_transformers_model
from pipeline.objectives import VocabularyPart, set_vocabulary_part


def complete_tensor_section(config: dict[str, Any], model: nn.Module) -> None:
    """Set in the section whether an embedding and the output layer tied to it are cut, by words.

    Raises:
        ModelError: nothing says which of the model's matrices to cut, and how.
    """
    section = config["tensor_parallel"]
    stated = "partition_config" in section or "preset_model" in section
    # Without a plan DeepSpeed guesses by names, and refuses GPT-2's transposed matrices.
    if not stated and _get_hf_tp_plan(model) is None:
        name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ModelError(
            f"tensor_parallel: transformers has no tensor-parallel plan for {name}; use "
            "zero_optimization.stage 3, or say what to cut in tensor_parallel.partition_config"
        )
    section["vocab_parallel_lm_head"] = not stated and _can_cut_tied(model, section["autotp_size"])


def _can_cut_tied(model: Any, ranks: int) -> bool:
    """Return whether the output layer is tied, and to embeddings alone that DeepSpeed cuts by words."""
    head, names = _output_layer(model), {child: name for name, child in model.named_children()}
    if type(head) is not nn.Linear or names.get(head) != "lm_head" or len(head.weight) < ranks:
        return False
    sharing = [m for m in model.modules() if m is not head and getattr(m, "weight", None) is head.weight]
    return bool(sharing) and all(map(_is_plain_embedding, sharing))


def _output_layer(model: Any) -> Any:
    return model.get_output_embeddings() if is_transformers_model(model) else None


def _is_plain_embedding(module: Any) -> bool:
    if type(module) is not nn.Embedding:  # one that multiplies what it looks up
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def share_vocabulary(model: Any) -> None:
    """Have a cut output layer return the loss without logits, and all words' logits to others."""
    head = _output_layer(model)
    if type(head) not in (LinearLayer, VocabParallelLinear) or min(head._partition_sizes) == 0:
        return
    if type(head) is VocabParallelLinear:
        head.gather_output = True
        model.loss_function = model._deepspeed_original_loss_function  # of whole logits
    if not head.gather_output:
        return
    sizes, group = head._partition_sizes, head.mp_group
    head.out_features, head.in_features = head._orig_weight_shape

    def gather(tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty(len(sizes), *tensor.shape)
        dist.all_gather(list(gathered.unbind()), tensor, group=group)
        return gathered

    def all_reduce_sum(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=group)
        return tensor

    part = VocabularyPart(sum(sizes[: head.tp_index]), max(sizes), gather, all_reduce_sum)
    set_vocabulary_part(head, part)
    for embedding in model.modules():
        if type(embedding) is VocabParallelEmbedding:
            embedding.num_embeddings = sum(sizes)
            set_vocabulary_part(embedding, part)


def counts_in_norm(parameter: Tensor) -> bool:
    """Return whether this rank counts a parameter in a norm: each part, and whole parameters once."""
    return is_model_parallel_parameter(parameter) or groups.get_tensor_model_parallel_rank() == 0


def sum_over_tensor_group(square: Tensor) -> Tensor:
    """Sum over a tensor group, in place. Collective."""
    dist.all_reduce(square, group=groups.get_tensor_model_parallel_group())
    return square


def broadcast_from_first_rank(scores: Tensor) -> Tensor:
    """Return the scores of a tensor group's first rank: after two different tokens its ranks would wait for
    ever.
    """
    scores = scores.contiguous()
    first = groups.get_tensor_model_parallel_src_rank()
    dist.broadcast(scores, first, group=groups.get_tensor_model_parallel_group())
    return scores


def place_cut_parameters(module: nn.Module) -> Placements:
    """Return the places of a tensor rank's parameters. One rank, in turn, writes those that lie whole on
    each.

    Raises:
        ModelError: AutoTP does not say how it cut one of them.
    """
    rank, size = groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()
    places = {}
    for index, (p, whole) in enumerate(place_whole_parameters(module).items()):
        place = locate_part(whole.name, p, whole.shape, rank, size)
        is_written = place.boxes != WHOLE_TENSOR or index % size == rank
        places[p] = replace(place, is_written=is_written, is_frozen=whole.is_frozen)
    return places


def locate_part(
    name: str, parameter: nn.Parameter, own: tuple[int, ...], rank: int, size: int
) -> TensorPlacement:
    """Return which part of the whole parameter this rank's, of shape `own`, is.

    Raises:
        ModelError: AutoTP does not say.
    """
    told = getattr(parameter, DS_AUTOTP_UC_META, None)
    if told is None or told["replicated"]:
        return TensorPlacement.whole(name, own)
    whole, view, dim = tuple(told["original_shape"]), told["logical_shape"], told["partition_dim"]
    if dim is None and whole == own:
        return TensorPlacement.whole(name, own)
    # Each of several matrices in one is cut by itself: its rows a rank.
    widths = told["sub_param_shard_widths"] or [told["partition_sizes"]]
    if dim is None or widths == [None]:
        raise ModelError(
            f"tensor_parallel: DeepSpeed does not say how it cut {name}, and a checkpoint must know; use "
            "zero_optimization.stage 3, or say how in tensor_parallel.partition_config"
        )
    taken = [each[rank] for each in widths]
    into_own = itertools.accumulate(taken, initial=0)
    into_whole = itertools.accumulate((sum(each) for each in widths), initial=0)
    boxes: list[tuple[Box, Box]] = []
    for width, here, there, each in zip(taken, into_own, into_whole, widths, strict=False):
        first = there + sum(each[:rank])
        boxes += zip(
            _boxes(own, view, dim, here, width, sum(taken)),
            _boxes(whole, view, dim, first, width, sum(map(sum, widths))),
            strict=True,
        )
    return TensorPlacement(name, whole, own, tuple(boxes))


def _boxes(
    shape: tuple[int, ...], view: tuple[int, ...], dim: int, start: int, width: int, size: int
) -> Iterator[Box]:
    """Yield boxes of the matrix itself for `width` indices from `start` on in one dimension, `size` long, of
    a view.

    Args:
        view: Like shape, but for a first dimension that may be several.
    """
    rest = tuple((0, n) for n in shape[1:])
    if dim >= len(view) - len(shape) + 1:  # not in the first dimension
        at = dim - (len(view) - len(shape))
        yield tuple((start, start + width) if d == at else (0, n) for d, n in enumerate(shape))
        return
    firsts = view[: len(view) - len(shape) + 1]
    inner = math.prod(firsts[dim + 1 :])
    for outer in range(math.prod(firsts[:dim])):
        begin = (outer * size + start) * inner
        yield ((begin, begin + width * inner), *rest)
