"""Cross entropy over a vocabulary or over classes.

Shapes: B batch, T sequence, N = B * T tokens, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.data.batches import IGNORE_INDEX, find_bad_value, format_batch
from pipeline.errors import ConfigError, DataError, ModelError
from pipeline.objectives.interface import Batch, GlobalBatch, LossSum
from pipeline.objectives.linear_cross_entropy import OutputHeads, compute_loss_in_head
from pipeline.objectives.logits_cross_entropy import FusedKernels, cross_entropy_per_token, cross_entropy_sum
from pipeline.objectives.model_call import (
    PROBABILITIES,
    BaseObjective,
    ModelCall,
    are_probabilities,
    get_logits,
    unwrap_model,
)


@dataclass(frozen=True)
class Router:
    """The settings of a model's routers for their load-balancing loss."""

    coefficient: float
    """Weight of the load-balancing loss beside the cross entropy."""
    experts_per_token: int


def get_router(model: Any) -> Router | None:
    """Return the router settings of a model whose config asks for `output_router_logits`, else `None`.

    Raises:
        ModelError: The config asks for them, but lacks the coefficient or the experts for each token.
    """
    config = getattr(unwrap_model(model), "config", None)
    if not getattr(config, "output_router_logits", False):
        return None
    coefficient = getattr(config, "router_aux_loss_coef", None)
    experts = getattr(config, "num_experts_per_tok", None)
    if coefficient is None or experts is None:
        raise ModelError(
            "the model's config has output_router_logits, but lacks router_aux_loss_coef or "
            "num_experts_per_tok, from which the routers' loss is computed; set output_router_logits to false"
        )
    return Router(float(coefficient), int(experts))


def refuse_router_loss(model: Any, split: str) -> None:
    """Raise a ConfigError if the model has a load-balancing loss, which this split does not compute."""
    router = get_router(model)
    if router is not None and router.coefficient:
        raise ConfigError(
            f"model.extra.output_router_logits: the routers' loss is not computed with {split}; use ZeRO or "
            "sequence parallelism, or set it to false to train without that loss"
        )


def tokens_per_expert(logits_NE: Sequence[Tensor], counted_BT: Tensor, router: Router) -> Tensor:
    """Return the number of counted tokens of each expert (E,), fp64, summed over the layers."""
    counted_N = counted_BT.flatten().double()
    total_E = torch.zeros(logits_NE[0].shape[-1], dtype=torch.float64, device=counted_N.device)
    for layer_NE in logits_NE:
        chosen_NK = layer_NE.detach().topk(router.experts_per_token, dim=-1).indices
        total_E.index_add_(0, chosen_NK.flatten(), counted_N.repeat_interleave(router.experts_per_token))
    return total_E


def balance_sum(logits_NE: Sequence[Tensor], counted_BT: Tensor, router: Router, tokens_E: Tensor) -> Tensor:
    """Return the micro-batch's part of the load-balancing loss, times the global batch's counted tokens.

    Gradients flow through the probabilities, not through the choice of experts.

    Args:
        logits_NE: The router logits of each layer, (N, E).
        counted_BT: Whether a token counts, (B, T).
        router: The settings of the routers.
        tokens_E: The result of tokens_per_expert for the global batch, (E,).
    """
    counted_N1 = counted_BT.flatten().float()[:, None]
    probability_E = torch.stack(
        [(layer_NE.float().softmax(-1) * counted_N1).sum(0) for layer_NE in logits_NE]
    )
    share_E = tokens_E * (router.experts_per_token / tokens_E.sum().clamp(min=1))
    experts = logits_NE[0].shape[-1]
    return experts * (share_E.float() * probability_E.mean(0)).sum()


def router_logits_of(output: Any) -> tuple[Tensor, ...]:
    """Return the router logits (N, E) of each layer with experts; empty if the model returns none."""
    logits = (
        output.get("router_logits") if isinstance(output, dict) else getattr(output, "router_logits", None)
    )
    layers = logits if isinstance(logits, (tuple, list)) else ()
    return tuple(layer.flatten(0, -2) for layer in layers if isinstance(layer, Tensor))


LABELS = ("labels", "label", "targets", "target")


class VocabularyObjective(BaseObjective):
    """Base of the objectives on the cross entropy of a language model's labels.

    Args:
        call: The call of the model.
        kernels: Compiled kernels for the loss, with or without logits; `None`: the loss is computed in
            blocks. See logits_cross_entropy.py.
    """

    name = "causal_lm"

    def __init__(self, call: ModelCall | None = None, kernels: FusedKernels | None = None):
        super().__init__(call)
        self._kernels = kernels
        self._heads = OutputHeads()

    def losses(self, model: Callable[..., Any], batch: Batch, of_tokens: bool = False) -> tuple[Tensor, Any]:
        """Return the sum over the labels, or each token's loss (B, T), in fp32, and the model's output."""
        labels_BT = self._get_labels(batch)
        head = self._heads.of(model)
        if head is not None:
            self._check_labels(batch, head.out_features)
        with compute_loss_in_head(head, labels_BT, of_tokens, self._kernels) as state:
            output = self._call(model, batch)
        if not state.is_taken:
            losses = self._compute_from_logits(batch, get_logits(output), of_tokens)
        else:
            losses = get_logits(output) if of_tokens else get_logits(output).sum()
        return losses, output

    def _compute_from_logits(self, batch: Batch, logits_BTV: Tensor, of_tokens: bool) -> Tensor:
        labels_BT = self._get_labels(batch)
        if logits_BTV.shape[:-1] != labels_BT.shape:
            raise ModelError(
                f"objective {self.name}: the model returned logits {tuple(logits_BTV.shape)} for labels "
                f"{tuple(labels_BT.shape)}; return logits (samples, tokens, vocabulary)"
            )
        self._check_labels(batch, logits_BTV.shape[-1])
        logits_NV = logits_BTV.flatten(0, 1)
        labels_N = labels_BT.flatten()
        if of_tokens:
            return cross_entropy_per_token(logits_NV, labels_N, self._kernels).view(labels_BT.shape)
        return cross_entropy_sum(logits_NV, labels_N, self._kernels)

    @staticmethod
    def _check_labels(batch: Batch, vocabulary: int) -> None:
        check_labels(batch, "shift_labels" if "shift_labels" in batch else "labels", vocabulary)

    def _get_labels(self, batch: Batch) -> Tensor:
        name = find_labels(batch, ("labels", "shift_labels"), self.name)
        labels_BT: Tensor = batch.get("shift_labels", batch[name])
        if labels_BT.dim() != 2:
            raise DataError(
                f"objective {self.name} expects a label for each token, (samples, tokens), but the batch has "
                f"{format_batch(batch)}"
            )
        labels_BT = labels_BT.long()
        return labels_BT if "shift_labels" in batch else F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE_INDEX)


class CausalLM(VocabularyObjective):
    """The next-token cross entropy over the labels that are not -100.

    A batch holds `input_ids` (B, T) and either `shift_labels` (B, T), where position t holds the token after
    t, or `labels` (B, T) aligned with the inputs, as transformers has them.

    If the config of a mixture of experts asks for `output_router_logits`, the routers' load-balancing loss
    over the counted tokens of the global batch is minimised too. That loss multiplies two sums over the
    global batch, so the tokens of each expert are counted before the first backward; see `prepare_step`.

    If the model's logits are the unchanged outputs of its last layer, no logits are computed: see
    linear_cross_entropy.py. `kernels` compute the loss either way; see logits_cross_entropy.py.
    """

    unit = "tokens"
    means: Mapping[str, tuple[str, str]] = {"router_aux_loss": ("router_aux_loss", "routed_tokens")}

    def __init__(self, call: ModelCall | None = None, kernels: FusedKernels | None = None):
        super().__init__(call, kernels)
        self._get_global_sums: Callable[[Tensor], Tensor] = lambda tokens_E: tokens_E

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        count = (self._get_labels(batch) != IGNORE_INDEX).sum()
        if self._is_first_count:
            self._warn_of_none(count, "labels")
        return count

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        loss_sum, output = self.losses(model, batch)
        counted_BT = self._get_labels(batch) != IGNORE_INDEX
        count = counted_BT.sum()
        router = get_router(model)
        layers = router_logits_of(output)
        if router is None or not layers or not torch.is_grad_enabled():
            return LossSum(loss_sum, count)
        tokens_E = self._get_global_sums(tokens_per_expert(layers, counted_BT, router))
        balance = balance_sum(layers, counted_BT, router, tokens_E)
        extras = {"router_aux_loss": balance.detach(), "routed_tokens": count}
        return LossSum(loss_sum, count, extras, router.coefficient * balance)

    def prepare_step(self, batch: GlobalBatch) -> None:
        """Count the tokens of each expert over the global batch.

        With several micro-batches this takes one more forward of each, with the same random numbers, since
        the counts must be known before the first backward. A single micro-batch is counted in its own
        forward, with one all-reduce.
        """
        self._get_global_sums = batch.all_reduce_sum
        router = get_router(batch.model)
        if router is None or len(batch.micro_batches) == 1:
            return
        micro_batches = [batch.to_device(each) for each in batch.micro_batches]
        device = self._get_labels(micro_batches[0]).device
        tokens_E: Tensor | None = None
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for micro_batch in micro_batches:
                with compute_loss_in_head(self._heads.of(batch.model), self._get_labels(micro_batch)):
                    layers = router_logits_of(self._call(batch.model, micro_batch))
                if not layers:
                    return
                counted_BT = self._get_labels(micro_batch) != IGNORE_INDEX
                counts_E = tokens_per_expert(layers, counted_BT, router)
                tokens_E = counts_E if tokens_E is None else tokens_E + counts_E
        assert tokens_E is not None
        total_E = batch.all_reduce_sum(tokens_E)
        self._get_global_sums = lambda _: total_E


def find_labels(batch: Batch, names: Sequence[str], objective: str) -> str:
    """Return the first of these names that is an entry of the batch.

    Raises:
        DataError: The batch has none of them, or the entry is no tensor of class numbers.
    """
    name = next((name for name in names if name in batch), None)
    if name is None:
        raise DataError(
            f"objective {objective} reads {names[0]!r}, but the batch has {format_batch(batch)}; rename the "
            "labels in the data set, or use an objective of your own"
        )
    labels = batch[name]
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"objective {objective} reads class numbers (integers from 0) from {name!r}, but the batch has "
            f"{format_batch({name: labels})}; convert them in the data set, or use an objective of your own"
        )
    return name


def check_labels(batch: Batch, name: str, classes: int) -> None:
    """Raise a DataError if a label is neither -100 nor in [0, classes)."""
    if (wrong := find_bad_value(batch, name, classes)) is not None:
        raise DataError(
            f"{name!r} has {wrong.value}, but the model has {classes} outputs: expected 0 to {classes - 1} "
            f"({IGNORE_INDEX}: not counted){wrong.sample}"
        )


class Classification(BaseObjective):
    """The cross entropy over classes, with optional class weights, over the labels that are not -100.

    Logits are (..., C), and labels (...) are one of the entries LABELS. With weights, the mean is over the
    weights of the labels, as in torch.nn.CrossEntropyLoss. The weights are fp32 in every precision.
    """

    unit = "samples"
    means: Mapping[str, tuple[str, str]] = {"accuracy": ("correct", "samples")}

    def __init__(
        self,
        class_weights: list[float] | None = None,
        label_smoothing: float = 0.0,
        call: ModelCall | None = None,
    ):
        super().__init__(call)
        self.weights_C = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
        self.label_smoothing = label_smoothing
        self._checks_scores = True

    def _get_weights(self, device: torch.device) -> Tensor | None:
        if self.weights_C is not None and self.weights_C.device != device:
            self.weights_C = self.weights_C.to(device)  # happens once, since a run has one device
        return self.weights_C

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        name = find_labels(batch, LABELS, "classification")
        labels = batch[name].long()
        weights_C = self._get_weights(labels.device)
        valid = labels != IGNORE_INDEX
        if self._is_first_count:
            self._warn_of_none(valid.sum(), name)
        if weights_C is None:
            return valid.sum()
        if (wrong := find_bad_value(batch, name, weights_C.numel())) is not None:
            raise ConfigError(
                f"objective.class_weights has {weights_C.numel()} weights, but a label is "
                f"{wrong.value}{wrong.sample}; write one weight for each class"
            )
        return (weights_C[labels.clamp(min=0)] * valid).sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        name = find_labels(batch, LABELS, "classification")
        labels = batch[name].long()
        logits = get_logits(self._call(model, batch)).float()
        weights_C = self._get_weights(logits.device)
        if weights_C is not None and weights_C.numel() != logits.shape[-1]:
            raise ConfigError(
                f"objective.class_weights has {weights_C.numel()} weights, but the model has "
                f"{logits.shape[-1]} classes; write one weight for each class"
            )
        if logits.shape[:-1] != labels.shape:
            raise ModelError(
                f"objective classification: the model returned logits {tuple(logits.shape)}, and {name!r} "
                f"has {tuple(labels.shape)}; expected (samples, classes) and (samples)"
            )
        check_labels(batch, name, logits.shape[-1])
        self._refuse_probabilities(logits)
        loss_sum = F.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            weights_C,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        extras = {"correct": (logits.argmax(-1) == labels).sum(), "samples": (labels != IGNORE_INDEX).sum()}
        return LossSum(loss_sum, self.count(batch), extras)

    def _refuse_probabilities(self, scores: Tensor) -> None:
        if not self._checks_scores:
            return
        verdict = are_probabilities(scores)
        if verdict:
            raise ModelError(PROBABILITIES)
        self._checks_scores = verdict is None
