"""Additions to DeepSpeed's AutoTP: vocabulary-parallel loss, norm, and the placement of a rank's parts.

Matrices are cut over the ranks of a tensor group by transformers' plan. An output layer, and an embedding
tied to it, is cut by vocabulary entries. Norms and other embeddings are whole on each rank.

For the loss the ranks exchange three numbers per token: the largest logit, the sum of exponentials, and the
label's logit. DeepSpeed itself would gather logits of shape (tokens, vocabulary) on every rank.
"""

from __future__ import annotations

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
    """Set `vocab_parallel_lm_head` in the JSON's section `tensor_parallel`.

    The key says whether an embedding and the output layer tied to it are cut by vocabulary. Both stay whole
    if DeepSpeed refuses to cut them: the embedding scales its output (Gemma), the section states how to cut,
    or the output layer is not named `lm_head`.

    Args:
        config: DeepSpeed JSON. It is changed.
        model: Whole model; its parameters need no values.

    Raises:
        ModelError: neither the section nor transformers says how to cut the model's matrices.
    """
    section = config["tensor_parallel"]
    is_stated = "partition_config" in section or "preset_model" in section
    # Without a plan DeepSpeed guesses by names, and refuses GPT-2's transposed matrices.
    if not is_stated and _get_hf_tp_plan(model) is None:
        name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ModelError(
            f"tensor_parallel: transformers has no tensor-parallel plan for {name}; use "
            "zero_optimization.stage 3, or state what to cut in tensor_parallel.partition_config"
        )
    section["vocab_parallel_lm_head"] = not is_stated and _can_cut_tied_output(model, section["autotp_size"])


def _can_cut_tied_output(model: Any, num_ranks: int) -> bool:
    """Return whether the output layer is tied, and only to embeddings that DeepSpeed can cut."""
    head = _find_output_layer(model)
    names = {child: name for name, child in model.named_children()}
    if type(head) is not nn.Linear or names.get(head) != "lm_head":
        return False
    if len(head.weight) < num_ranks:
        return False
    sharing = [m for m in model.modules() if m is not head and getattr(m, "weight", None) is head.weight]
    return bool(sharing) and all(map(_is_plain_embedding, sharing))


def _find_output_layer(model: Any) -> Any:
    """Return a transformers model's output layer, or `None` if there is none."""
    return model.get_output_embeddings() if is_transformers_model(model) else None


def _is_plain_embedding(module: Any) -> bool:
    """Return whether the module is an embedding that only looks up rows, so that DeepSpeed can cut it."""
    if type(module) is not nn.Embedding:  # a subclass may scale its output
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def enable_vocabulary_parallel_loss(model: Any) -> None:
    """Let objectives compute the loss of a cut output layer without gathering logits.

    Records this rank's part of the vocabulary at the layer and at an embedding tied to it. Other callers
    (generation, a user's own objective) still get the logits of the whole vocabulary. Does nothing if the
    output layer is not cut by vocabulary, or a rank has no entry.

    Args:
        model: Model after AutoTP has cut it.
    """
    head = _find_output_layer(model)
    if type(head) not in (LinearLayer, VocabParallelLinear) or min(head._partition_sizes) == 0:
        return
    if type(head) is VocabParallelLinear:
        head.gather_output = True
        # DeepSpeed's loss function expects this rank's logits, the model's original one the gathered logits.
        model.loss_function = model._deepspeed_original_loss_function
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

    part = VocabularyPart(
        start=sum(sizes[: head.tp_index]),
        max_rows=max(sizes),
        gather=gather,
        all_reduce_sum=all_reduce_sum,
    )
    set_vocabulary_part(head, part)
    for embedding in model.modules():
        if type(embedding) is VocabParallelEmbedding:
            embedding.num_embeddings = sum(sizes)
            set_vocabulary_part(embedding, part)


def counts_in_norm(parameter: Tensor) -> bool:
    """Return whether this rank counts a parameter in the gradient norm.

    Every rank counts its parts of cut parameters. Only the tensor group's first rank counts parameters that
    are whole on each rank.
    """
    return is_model_parallel_parameter(parameter) or groups.get_tensor_model_parallel_rank() == 0


def sum_over_tensor_group(tensor: Tensor) -> Tensor:
    """Sum a tensor over the tensor group in place and return it. Collective."""
    dist.all_reduce(tensor, group=groups.get_tensor_model_parallel_group())
    return tensor


def broadcast_from_first_rank(scores: Tensor) -> Tensor:
    """Give every rank the scores that the tensor group's first rank has for the next token. Collective.

    If ranks chose different tokens, they would wait for each other forever. May overwrite `scores`.
    """
    scores = scores.contiguous()
    first_rank = groups.get_tensor_model_parallel_src_rank()
    dist.broadcast(scores, first_rank, group=groups.get_tensor_model_parallel_group())
    return scores


def place_cut_parameters(module: nn.Module) -> Placements:
    """Return the placements of this rank's parameters under tensor parallelism.

    Each parameter that is whole on every rank is written to a checkpoint by one rank. The ranks take turns.

    Raises:
        ModelError: AutoTP does not state how it cut a parameter.
    """
    rank = groups.get_tensor_model_parallel_rank()
    num_ranks = groups.get_tensor_model_parallel_world_size()
    placements = {}
    for index, (p, local) in enumerate(place_whole_parameters(module).items()):
        placement = locate_part(local.name, p, local.shape, rank, num_ranks)
        is_written = placement.boxes != WHOLE_TENSOR or index % num_ranks == rank
        placements[p] = replace(placement, is_written=is_written, is_frozen=local.is_frozen)
    return placements


def locate_part(
    name: str, parameter: nn.Parameter, local_shape: tuple[int, ...], rank: int, num_ranks: int
) -> TensorPlacement:
    """Return the placement of this rank's part of a parameter.

    AutoTP's metadata says how it cut the parameter: the whole shape, a view of this shape, the dimension of
    the view that is cut, and the widths of all ranks' parts in it.

    Args:
        name: Name of the parameter.
        parameter: Parameter with AutoTP's metadata; without it the parameter is whole.
        local_shape: Shape of this rank's part.
        rank: This rank's number in the tensor group.
        num_ranks: Number of ranks in the tensor group.

    Raises:
        ModelError: AutoTP does not state how it cut the parameter.
    """
    metadata = getattr(parameter, DS_AUTOTP_UC_META, None)
    if metadata is None or metadata["replicated"]:
        return TensorPlacement.whole(name, local_shape)
    shape = tuple(metadata["original_shape"])
    view = metadata["logical_shape"]
    dim = metadata["partition_dim"]
    if dim is None and shape == local_shape:
        return TensorPlacement.whole(name, local_shape)
    # A parameter may consist of several matrices (such as q, k and v), which are cut separately. `widths` has
    # a list for each matrix: the width of every rank's part.
    widths = metadata["sub_param_shard_widths"] or [metadata["partition_sizes"]]
    if dim is None or widths == [None]:
        raise ModelError(
            f"tensor_parallel: DeepSpeed does not state how it cut {name}, which checkpoints need; use "
            "zero_optimization.stage 3, or state it in tensor_parallel.partition_config"
        )
    local_size = sum(matrix_widths[rank] for matrix_widths in widths)
    size = sum(map(sum, widths))
    boxes: list[tuple[Box, Box]] = []
    local_start = 0  # of this matrix, in this rank's part
    matrix_start = 0  # of this matrix, in the whole parameter
    for matrix_widths in widths:
        width = matrix_widths[rank]
        start = matrix_start + sum(matrix_widths[:rank])
        boxes += zip(
            _find_boxes(local_shape, view, dim, start=local_start, width=width, size=local_size),
            _find_boxes(shape, view, dim, start=start, width=width, size=size),
            strict=True,
        )
        local_start += width
        matrix_start += sum(matrix_widths)
    return TensorPlacement(name, shape, local_shape, tuple(boxes))


def _find_boxes(
    shape: tuple[int, ...], view: tuple[int, ...], dim: int, start: int, width: int, size: int
) -> Iterator[Box]:
    """Yield the boxes of a matrix that a range of indices in one dimension of a view covers.

    Args:
        shape: Shape of the matrix.
        view: Shape of a view of the matrix. The view may split the matrix's first dimension into several; the
            other dimensions are equal.
        dim: Dimension of the view in which the range is.
        start: First index of the range.
        width: Number of indices in the range.
        size: Length of that dimension, which may differ from the one in `view`.
    """
    num_added = len(view) - len(shape)  # dimensions that the view has in addition
    if dim > num_added:  # a dimension after the matrix's first
        matrix_dim = dim - num_added
        yield tuple((start, start + width) if d == matrix_dim else (0, n) for d, n in enumerate(shape))
        return
    other_bounds = tuple((0, n) for n in shape[1:])
    split_dims = view[: num_added + 1]
    num_inner = math.prod(split_dims[dim + 1 :])
    for outer in range(math.prod(split_dims[:dim])):
        begin = (outer * size + start) * num_inner
        yield ((begin, begin + width * num_inner), *other_bounds)
