"""Sequence parallelism by Ulysses: the ranks of a sequence group have equal parts of the same sequences.

Outside attention each rank computes its own positions. Inside, DeepSpeed's UlyssesSPAttentionHF exchanges
tensors so that each rank computes all positions of its own heads. Shapes: B batch, T whole sequence, P this
rank's part of it.
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
    find_unsupported_feature,
    get_attention_function,
    register_attention,
)
from pipeline.models.document_attention import ATTENTION_NAME as OWN
from pipeline.models.document_attention import BOUNDS_KEY, DocumentAttention, build_bounds_arguments
from pipeline.objectives import UNDIVIDED_SEQUENCE, Batch, SequenceGroup, set_sequence_group

NAME = "ulysses"


class SequenceParallel:
    """Replaces a model's attention by one over a sequence group, and cuts batches into parts.

    The attention has a name of its own in transformers' table, so other models in the process keep theirs.
    """

    def __init__(self, model: Any, degree: int, device: torch.device):
        """Make the model attend over this rank's sequence group, which build_parallel_state made.

        Raises:
            ModelError: the model's attention cannot be replaced, or its heads cannot be divided evenly.
        """
        self._model: Any = model
        self._degree = degree
        self._device = device
        self._rank = sequence_groups.get_sequence_parallel_rank()
        self._group = sequence_groups.get_sequence_parallel_group()
        self._shared: dict[tuple[int, ...], UlyssesSPAttentionHF] = {}
        if not hasattr(self._model, "set_attn_implementation"):
            raise ModelError(
                f"sequence_parallel_size: {type(model).__name__} is no transformers model, and only their "
                "attention can be divided over ranks; use zero_optimization.stage 3"
            )
        config: Any = self._model.config.get_text_config()
        self._whole = str(config._attn_implementation)
        self._core = self._choose_attention()
        self._bounds: Tensor | None = None  # document bounds of the whole sequences of the current batch
        self._check_heads(config)
        self.activate()
        set_sequence_group(model, SequenceGroup(degree, self._sum_over_group))
        mixers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if mixers or config._attn_implementation != NAME:
            raise ModelError(
                f"sequence_parallel_size: {config.model_type} mixes positions by other means than "
                f"transformers' attention ({', '.join(sorted(mixers)) or 'its own'}); use "
                "zero_optimization.stage 3"
            )

    def _choose_attention(self) -> AttentionFunction:
        """Return the attention over whole sequences, one that needs no (T, T) mask.

        Raises:
            ModelError: the model's attention cannot be replaced by such a one.
        """
        if "flash" in self._whole:
            return get_attention_function(self._whole)
        if self._whole != OWN:
            why = find_unsupported_feature(self._model)
            if why:
                raise ModelError(f"sequence_parallel_size: {why}; use zero_optimization.stage 3")
        return DocumentAttention()

    def _check_heads(self, config: Any) -> None:
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        if heads % self._degree or (groups % self._degree and self._degree % groups):
            raise ModelError(
                f"sequence_parallel_size {self._degree}: {heads} attention heads and {groups} key-value "
                "heads cannot be divided evenly over the ranks; use a degree that divides both"
            )

    def _sum_over_group(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def activate(self) -> None:
        """Make the model attend over the group from now on."""
        # The table belongs to the process, and another engine may have registered its own.
        register_attention(NAME, self._attend)
        if self._model.config._attn_implementation != NAME:
            self._model.set_attn_implementation(NAME)

    def release(self) -> None:
        """Restore the model's own attention over whole sequences, as generation needs it."""
        self._model.set_attn_implementation(self._whole)

    def close(self) -> None:
        """Release the model, and remove references to it from transformers' table of attentions."""
        self.release()
        set_sequence_group(self._model, UNDIVIDED_SEQUENCE)
        register_attention(NAME, get_attention_function(self._whole))

    def take_part(self, batch: Batch) -> dict[str, Any]:
        """Return this rank's positions of every (B, T) tensor.

        Adds `position_ids`, and replaces `labels` by `shift_labels`. Until the next call the model attends
        within the documents of this batch, also when it recomputes activations.

        Raises:
            DataError: the degree does not divide T, or the attention mask hides more than the end of a row.
        """
        length = self._length(batch)
        whole = dict(batch)
        if "labels" in whole and "shift_labels" not in whole:
            # Shifted before the cut: the target of this rank's last position is on the next rank.
            whole["shift_labels"] = F.pad(whole.pop("labels")[:, 1:], (0, 1), value=IGNORE_INDEX)
        default_positions = torch.arange(length).expand(len(batch["input_ids"]), -1)
        whole.setdefault("position_ids", default_positions)
        host = {key: get_host_batch(batch).get(key, whole[key]) for key in ("input_ids", "position_ids")}
        # Computed before the cut: a part does not show where its documents begin.
        whole[BOUNDS_KEY] = self._bounds = add_document_bounds(host)[BOUNDS_KEY].to(
            self._device, non_blocking=True
        )
        size = length // self._degree
        mine = slice(self._rank * size, (self._rank + 1) * size)

        def cut(value: Any) -> Any:
            is_cut = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
            return value[:, mine] if is_cut else value

        return {key: cut(value) for key, value in whole.items() if key != "attention_mask"}

    def _length(self, batch: Batch) -> int:
        if "input_ids" not in batch:
            raise DataError(
                f"sequence_parallel_size: a batch has {', '.join(batch)}, expected input_ids, whose "
                "positions are divided over the ranks; use zero_optimization.stage 3 for other models"
            )
        length = batch["input_ids"].shape[1]
        if length % self._degree:
            raise DataError(
                f"sequence_parallel_size {self._degree} does not divide sequences of {length} tokens; "
                "pad them to a multiple"
            )
        mask = get_host_batch(batch).get("attention_mask")  # reading the device's copy would wait
        if mask is not None and (mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any())):
            raise DataError(
                "sequence_parallel_size: an attention_mask hides other positions than the end of a sequence; "
                "pad on the right"
            )
        positions = batch.get("position_ids")
        if positions is not None and positions.shape != batch["input_ids"].shape:
            raise DataError(
                f"sequence_parallel_size: position_ids of shape {tuple(positions.shape)} for input_ids of "
                f"shape {tuple(batch['input_ids'].shape)}; give every token its position"
            )
        return int(length)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **rest: Any
    ) -> tuple[Tensor, None]:
        """Compute attention over the group.

        Shapes: query (B, heads, P, width), key and value (B, groups, P, width), result (B, P, heads, width).
        """
        shared = self._shared_attention(query, key)
        groups = getattr(module, "num_key_value_groups", None)
        sinks = rest.get("s_aux")
        if sinks is not None:  # attention sinks, one per head: those of this rank's heads
            rest["s_aux"] = sinks.chunk(self._degree)[self._rank]
        # DeepSpeed gathers position ids, but nothing reads them.
        rest["position_ids"] = torch.zeros(1, 1, device=query.device)
        output, _ = shared(module, query, key, value, None, **rest)
        if groups is not None:
            module.num_key_value_groups = groups  # DeepSpeed changes it if it repeats key-value heads
        return output.unflatten(-1, (query.shape[1], query.shape[3])), None

    def _attend_whole(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _: None,
        position_ids: Tensor,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention over whole sequences (B, this rank's heads, T, width), within their documents."""
        rest |= build_bounds_arguments(self._whole, self._bounds, None, query.transpose(1, 2))
        output: tuple[Tensor, None] = self._core(module, query, key, value, None, **rest)
        return output

    def _shared_attention(self, query: Tensor, key: Tensor) -> UlyssesSPAttentionHF:
        size, heads, _, width = query.shape
        shape = (size, heads, key.shape[1], width)
        if shape not in self._shared:
            self._shared[shape] = UlyssesSPAttentionHF(
                attn=self._attend_whole,
                batch_size=size,
                attn_head_count=heads,
                attn_head_size=width,
                kv_head_count=key.shape[1],
                num_hidden_layers=1,
                process_group=self._group,
                seq_length_is_variable=True,
            )
        return self._shared[shape]
