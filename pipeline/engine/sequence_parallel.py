"""Sequence parallelism by Ulysses: the ranks of a sequence group have equal parts of the same sequences.

Outside of attention each rank computes the positions of its part. Inside attention, DeepSpeed's
UlyssesSPAttentionHF exchanges tensors so that each rank computes all positions of a part of the heads.

Dimensions of shapes: B batch, T whole sequence, P this rank's part of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequence_groups
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor, nn

from pipeline.data.batches import IGNORE_INDEX, get_host_batch
from pipeline.engine.interface import add_document_bounds
from pipeline.errors import DataError, ModelError
from pipeline.models.attention import (
    AttentionFunction,
    find_document_attention_obstacle,
    get_attention_function,
    register_attention,
)
from pipeline.models.document_attention import ATTENTION_NAME as DOCUMENT_ATTENTION
from pipeline.models.document_attention import BOUNDS_KEY, DocumentAttention, build_bounds_arguments
from pipeline.objectives import UNDIVIDED_SEQUENCE, Batch, SequenceGroup, set_sequence_group

ULYSSES_ATTENTION = "ulysses"
"""Name of the attention over a sequence group in transformers' table."""


class SequenceParallel:
    """Replaces a model's attention by one over a sequence group, and cuts batches into parts.

    The attention has its own name in transformers' table, so other models in the process keep their
    attention.

    Args:
        model: This rank's copy of a transformers model, changed in place.
        degree: Number of ranks in a sequence group.
        device: Device of this rank.
    """

    def __init__(self, model: Any, degree: int, device: torch.device):
        """Make the model attend over this rank's sequence group. Call build_parallel_state first.

        Raises:
            ModelError: the model's attention cannot be replaced, its heads cannot be divided evenly, or it
                mixes positions by other means than attention.
        """
        self._model: Any = model
        self._degree = degree
        self._device = device
        self._rank = sequence_groups.get_sequence_parallel_rank()
        self._group = sequence_groups.get_sequence_parallel_group()
        self._ulysses_attentions: dict[tuple[int, ...], UlyssesSPAttentionHF] = {}
        if not hasattr(self._model, "set_attn_implementation"):
            raise ModelError(
                f"sequence_parallel_size: {type(model).__name__} is no transformers model, and only the "
                "attention of such models can be divided over ranks; use zero_optimization.stage 3"
            )
        config: Any = self._model.config.get_text_config()
        self._original_attention = str(config._attn_implementation)
        self._whole_attention = self._choose_attention()
        self._bounds: Tensor | None = None  # document bounds of the current batch's whole sequences
        self._check_heads(config)
        self.activate()
        set_sequence_group(model, SequenceGroup(degree, self._sum_over_group))
        mixers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if mixers or config._attn_implementation != ULYSSES_ATTENTION:
            raise ModelError(
                f"sequence_parallel_size: {config.model_type} mixes positions by other means than "
                f"transformers' attention ({', '.join(sorted(mixers)) or 'its own'}); use "
                "zero_optimization.stage 3"
            )

    def _choose_attention(self) -> AttentionFunction:
        """Return a function of attention over whole sequences that needs no (T, T) mask.

        It is the model's own flash attention, or else DocumentAttention.

        Raises:
            ModelError: DocumentAttention cannot replace the model's attention.
        """
        if "flash" in self._original_attention:
            return get_attention_function(self._original_attention)
        if self._original_attention != DOCUMENT_ATTENTION:
            reason = find_document_attention_obstacle(self._model)
            if reason:
                raise ModelError(f"sequence_parallel_size: {reason}; use zero_optimization.stage 3")
        return DocumentAttention()

    def _check_heads(self, config: Any) -> None:
        """Raise a ModelError if the heads cannot be divided evenly over the ranks."""
        heads = config.num_attention_heads
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        # DeepSpeed repeats key-value heads if there are fewer than ranks.
        key_value_heads_fit = key_value_heads % self._degree == 0 or self._degree % key_value_heads == 0
        if heads % self._degree or not key_value_heads_fit:
            raise ModelError(
                f"sequence_parallel_size {self._degree}: {heads} attention heads and {key_value_heads} "
                "key-value heads cannot be divided evenly over the ranks; use a degree that divides both"
            )

    def _sum_over_group(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the sequence group in place and return it. Collective."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def activate(self) -> None:
        """Make the model attend over the group until `release`."""
        # The table belongs to the process, and another engine may have registered its attention.
        register_attention(ULYSSES_ATTENTION, self._attend)
        if self._model.config._attn_implementation != ULYSSES_ATTENTION:
            self._model.set_attn_implementation(ULYSSES_ATTENTION)

    def release(self) -> None:
        """Restore the model's original attention over whole sequences, which generation needs."""
        self._model.set_attn_implementation(self._original_attention)

    def close(self) -> None:
        """Release the model, and remove references to it from transformers' table of attentions."""
        self.release()
        set_sequence_group(self._model, UNDIVIDED_SEQUENCE)
        register_attention(ULYSSES_ATTENTION, get_attention_function(self._original_attention))

    def cut_batch(self, batch: Batch) -> dict[str, Any]:
        """Return the batch with this rank's positions of every (B, T) tensor.

        Adds `position_ids` and the document bounds, replaces `labels` by `shift_labels`, and leaves out the
        attention mask. Until the next call the model attends within the documents of this batch, also when it
        recomputes activations.

        Raises:
            DataError: the batch has no `input_ids`, the degree does not divide T, the attention mask hides
                more than the end of a row, or `position_ids` have another shape than `input_ids`.
        """
        length = self._check_batch(batch)
        entries = dict(batch)
        if "labels" in entries and "shift_labels" not in entries:
            # Shifted before the cut: the target of this rank's last position is on the next rank.
            entries["shift_labels"] = F.pad(entries.pop("labels")[:, 1:], (0, 1), value=IGNORE_INDEX)
        default_positions = torch.arange(length).expand(len(batch["input_ids"]), -1)
        entries.setdefault("position_ids", default_positions)
        host = {key: get_host_batch(batch).get(key, entries[key]) for key in ("input_ids", "position_ids")}
        # Computed before the cut: a part does not show where its documents begin.
        bounds = add_document_bounds(host)[BOUNDS_KEY]
        self._bounds = bounds.to(self._device, non_blocking=True)
        entries[BOUNDS_KEY] = self._bounds
        part_length = length // self._degree
        own_positions = slice(self._rank * part_length, (self._rank + 1) * part_length)

        def cut(value: Any) -> Any:
            is_cut = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
            return value[:, own_positions] if is_cut else value

        return {key: cut(value) for key, value in entries.items() if key != "attention_mask"}

    def _check_batch(self, batch: Batch) -> int:
        """Return the length T of the batch's sequences.

        Raises:
            DataError: the batch cannot be divided; see cut_batch.
        """
        if "input_ids" not in batch:
            raise DataError(
                f"sequence_parallel_size: a batch has {', '.join(batch)}; expected input_ids, whose "
                "positions are divided over the ranks; use zero_optimization.stage 3 for other models"
            )
        length = batch["input_ids"].shape[1]
        if length % self._degree:
            raise DataError(
                f"sequence_parallel_size {self._degree} does not divide sequences of {length} tokens; "
                "pad them to a multiple"
            )
        mask = get_host_batch(batch).get("attention_mask")  # needs no synchronization
        if mask is not None and (mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any())):
            raise DataError(
                "sequence_parallel_size: an attention_mask hides other positions than the end of a sequence; "
                "pad sequences on the right"
            )
        positions = batch.get("position_ids")
        if positions is not None and positions.shape != batch["input_ids"].shape:
            raise DataError(
                f"sequence_parallel_size: position_ids of shape {tuple(positions.shape)} for input_ids of "
                f"shape {tuple(batch['input_ids'].shape)}; give every token its position"
            )
        return int(length)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **arguments: Any
    ) -> tuple[Tensor, None]:
        """Compute attention over the group, with the signature of transformers' attention. Collective.

        Shapes: query (B, heads, P, width), key and value (B, key-value heads, P, width), result (B, P, heads,
        width).
        """
        attention = self._get_ulysses_attention(query, key)
        num_groups = getattr(module, "num_key_value_groups", None)
        sinks = arguments.get("s_aux")
        if sinks is not None:  # attention sinks, one per head: select those of this rank's heads
            arguments["s_aux"] = sinks.chunk(self._degree)[self._rank]
        # DeepSpeed gathers position ids, but nothing reads them.
        arguments["position_ids"] = torch.zeros(1, 1, device=query.device)
        output, _ = attention(module, query, key, value, None, **arguments)
        if num_groups is not None:
            module.num_key_value_groups = num_groups  # DeepSpeed changes it if it repeats key-value heads
        return output.unflatten(-1, (query.shape[1], query.shape[3])), None

    def _attend_whole(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _: None,
        position_ids: Tensor,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention over whole sequences (B, this rank's heads, T, width), within their documents."""
        arguments |= build_bounds_arguments(
            self._original_attention, self._bounds, None, query.transpose(1, 2)
        )
        output: tuple[Tensor, None] = self._whole_attention(module, query, key, value, None, **arguments)
        return output

    def _get_ulysses_attention(self, query: Tensor, key: Tensor) -> UlyssesSPAttentionHF:
        """Return DeepSpeed's attention for tensors of these shapes; made once per shape."""
        batch_size, heads, _, width = query.shape
        shape = (batch_size, heads, key.shape[1], width)
        if shape not in self._ulysses_attentions:
            self._ulysses_attentions[shape] = UlyssesSPAttentionHF(
                attn=self._attend_whole,
                batch_size=batch_size,
                attn_head_count=heads,
                attn_head_size=width,
                kv_head_count=key.shape[1],
                num_hidden_layers=1,
                process_group=self._group,
                seq_length_is_variable=True,
            )
        return self._ulysses_attentions[shape]
