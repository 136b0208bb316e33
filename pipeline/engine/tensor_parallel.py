"""Additions to DeepSpeed's AutoTP: vocabulary-parallel loss, norm, and the placement of a rank's parts.

Matrices are cut over the ranks of a tensor group by transformers' plan. An output layer, and the embedding
tied to it, is cut by vocabulary entries. Norms and other embeddings are whole on each rank.

For the loss the ranks exchange three numbers per token: largest logit, sum of exponentials, logit of the
label. DeepSpeed itself would gather logits of shape (tokens, vocabulary) on every rank.
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
    """Set in the section whether an embedding and the output layer tied to it are cut by vocabulary.

    They stay whole if DeepSpeed refuses to cut them: the embedding scales its output (Gemma), the section
    states how to cut, or the output layer is not named `lm_head`.

    Raises:
        ModelError: neither the section nor transformers says how to cut the model's matrices.
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
    """Return whether the output layer is tied, and only to embeddings that DeepSpeed can cut."""
    head = _output_layer(model)
    names = {child: name for name, child in model.named_children()}
    if type(head) is not nn.Linear or names.get(head) != "lm_head" or len(head.weight) < ranks:
        return False
    sharing = [m for m in model.modules() if m is not head and getattr(m, "weight", None) is head.weight]
    return bool(sharing) and all(map(_is_plain_embedding, sharing))


def _output_layer(model: Any) -> Any:
    return model.get_output_embeddings() if is_transformers_model(model) else None


def _is_plain_embedding(module: Any) -> bool:
    if type(module) is not nn.Embedding:  # a subclass may scale its output
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def share_vocabulary(model: Any) -> None:
    """Make a cut output layer compute the loss without gathering logits.

    Other callers (generation, a user's own objective) still get the logits of the whole vocabulary.
    """
    head = _output_layer(model)
    if type(head) not in (LinearLayer, VocabParallelLinear) or min(head._partition_sizes) == 0:
        return
    if type(head) is VocabParallelLinear:
        head.gather_output = True
        model.loss_function = model._deepspeed_original_loss_function  # for logits of the whole vocabulary
    if not head.gather_output:
        return
    sizes = head._partition_sizes
    group = head.mp_group
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
    """Return whether this rank counts a parameter in a norm.

    Every rank counts its parts. Whole parameters are counted by the group's first rank.
    """
    return is_model_parallel_parameter(parameter) or groups.get_tensor_model_parallel_rank() == 0


def sum_over_tensor_group(square: Tensor) -> Tensor:
    """Sum a tensor over the tensor group in place and return it. Collective."""
    dist.all_reduce(square, group=groups.get_tensor_model_parallel_group())
    return square


def broadcast_from_first_rank(scores: Tensor) -> Tensor:
    """Return the scores of the tensor group's first rank. Collective.

    Ranks that chose different tokens would wait for each other forever.
    """
    scores = scores.contiguous()
    first = groups.get_tensor_model_parallel_src_rank()
    dist.broadcast(scores, first, group=groups.get_tensor_model_parallel_group())
    return scores


def place_cut_parameters(module: nn.Module) -> Placements:
    """Return the placements of this rank's parameters under tensor parallelism.

    Parameters that are whole on each rank are written by one rank each, in turn.

    Raises:
        ModelError: AutoTP does not state how it cut a parameter.
    """
    rank = groups.get_tensor_model_parallel_rank()
    size = groups.get_tensor_model_parallel_world_size()
    places = {}
    for index, (p, whole) in enumerate(place_whole_parameters(module).items()):
        place = locate_part(whole.name, p, whole.shape, rank, size)
        is_written = place.boxes != WHOLE_TENSOR or index % size == rank
        places[p] = replace(place, is_written=is_written, is_frozen=whole.is_frozen)
    return places


def locate_part(
    name: str, parameter: nn.Parameter, own: tuple[int, ...], rank: int, size: int
) -> TensorPlacement:
    """Return the placement of this rank's part of a parameter.

    Args:
        name: Name of the parameter.
        parameter: Parameter with AutoTP's metadata.
        own: Shape of this rank's part.
        rank: This rank's number in the tensor group.
        size: Number of ranks in the tensor group.

    Raises:
        ModelError: AutoTP does not state how it cut the parameter.
    """
    metadata = getattr(parameter, DS_AUTOTP_UC_META, None)
    if metadata is None or metadata["replicated"]:
        return TensorPlacement.whole(name, own)
    whole = tuple(metadata["original_shape"])
    view = metadata["logical_shape"]
    dim = metadata["partition_dim"]
    if dim is None and whole == own:
        return TensorPlacement.whole(name, own)
    # A parameter may consist of several matrices (such as q, k and v). Each is cut by itself: its widths by
    # rank.
    widths = metadata["sub_param_shard_widths"] or [metadata["partition_sizes"]]
    if dim is None or widths == [None]:
        raise ModelError(
            f"tensor_parallel: DeepSpeed does not state how it cut {name}, which checkpoints need; use "
            "zero_optimization.stage 3, or state it in tensor_parallel.partition_config"
        )
    own_widths = [each[rank] for each in widths]
    own_starts = itertools.accumulate(own_widths, initial=0)
    whole_starts = itertools.accumulate((sum(each) for each in widths), initial=0)
    boxes: list[tuple[Box, Box]] = []
    for width, own_start, whole_start, each in zip(
        own_widths, own_starts, whole_starts, widths, strict=False
    ):
        first = whole_start + sum(each[:rank])
        boxes += zip(
            _find_boxes(own, view, dim, start=own_start, width=width, size=sum(own_widths)),
            _find_boxes(whole, view, dim, start=first, width=width, size=sum(map(sum, widths))),
            strict=True,
        )
    return TensorPlacement(name, whole, own, tuple(boxes))


def _find_boxes(
    shape: tuple[int, ...], view: tuple[int, ...], dim: int, start: int, width: int, size: int
) -> Iterator[Box]:
    """Yield the boxes of a matrix that a range of indices in one dimension of a view covers.

    Args:
        shape: Shape of the matrix.
        view: Shape of the view: the first dimension may be split into several, the others are equal.
        dim: Dimension of the view.
        start: First index of the range.
        width: Number of indices in the range.
        size: Length of the dimension.
    """
    rest = tuple((0, n) for n in shape[1:])
    if dim >= len(view) - len(shape) + 1:  # a dimension after the matrix's first
        at = dim - (len(view) - len(shape))
        yield tuple((start, start + width) if d == at else (0, n) for d, n in enumerate(shape))
        return
    firsts = view[: len(view) - len(shape) + 1]
    inner = math.prod(firsts[dim + 1 :])
    for outer in range(math.prod(firsts[:dim])):
        begin = (outer * size + start) * inner
        yield ((begin, begin + width * inner), *rest)
