"""Cross entropy over a vocabulary or over classes.

Shapes: B batch, T sequence, N = B * T tokens, V vocabulary, C classes, L layers with experts, E experts, K
experts that are chosen for a token.
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
    PROBABILITIES_ERROR,
    BaseObjective,
    ModelCall,
    are_probabilities,
    get_logits,
    unwrap_model,
)


@dataclass(frozen=True)
class RouterSettings:
    """Settings of a mixture of experts for the load-balancing loss of its routers."""

    coefficient: float
    """Weight of the load-balancing loss beside the cross entropy."""
    experts_per_token: int
    """Number of experts that a router chooses for each token."""


def get_router_settings(model: Any) -> RouterSettings | None:
    """Return the router settings of a model whose config sets `output_router_logits`, else `None`.

    Raises:
        ModelError: The config sets it, but lacks the coefficient or the number of experts for each token.
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
    return RouterSettings(float(coefficient), int(experts))


def refuse_router_loss(model: Any, split: str) -> None:
    """Raise a ConfigError if the model has a load-balancing loss, which this split does not compute.

    Args:
        model: The model, wrapped or not.
        split: Name of the split, for the message.
    """
    router = get_router_settings(model)
    if router is not None and router.coefficient:
        raise ConfigError(
            f"model.extra.output_router_logits: the routers' loss is not computed with {split}; use ZeRO or "
            "sequence parallelism, or set the key to false to train without that loss"
        )


def count_tokens_per_expert(
    logits_NE: Sequence[Tensor], is_counted_BT: Tensor, router: RouterSettings
) -> Tensor:
    """Return the number of counted tokens that are routed to each expert (E,), fp64, summed over the layers.

    Args:
        logits_NE: The router logits of each layer, (N, E).
        is_counted_BT: Whether the loss counts a token, (B, T).
        router: The settings of the routers.
    """
    is_counted_N = is_counted_BT.flatten().double()
    tokens_E = torch.zeros(logits_NE[0].shape[-1], dtype=torch.float64, device=is_counted_N.device)
    for layer_NE in logits_NE:
        chosen_NK = layer_NE.detach().topk(router.experts_per_token, dim=-1).indices
        tokens_E.index_add_(0, chosen_NK.flatten(), is_counted_N.repeat_interleave(router.experts_per_token))
    return tokens_E


def compute_balance_sum(
    logits_NE: Sequence[Tensor], is_counted_BT: Tensor, router: RouterSettings, tokens_E: Tensor
) -> Tensor:
    """Return the micro-batch's part of the load-balancing loss, not yet divided by the counted tokens.

    As in transformers, the loss is E x sum over experts of (share of tokens routed to the expert) x (mean
    probability of the expert). Shares and probabilities are means over the layers. Gradients flow through the
    probabilities, not through the choice of experts.

    Args:
        logits_NE: The router logits of each layer, (N, E).
        is_counted_BT: Whether the loss counts a token, (B, T).
        router: The settings of the routers.
        tokens_E: The result of count_tokens_per_expert, summed over the global batch, (E,).
    """
    is_counted_N1 = is_counted_BT.flatten().float()[:, None]
    probability_sums_LE = torch.stack(
        [(layer_NE.float().softmax(-1) * is_counted_N1).sum(0) for layer_NE in logits_NE]
    )
    # The shares add up to experts_per_token, since each token is routed to that many experts.
    token_share_E = tokens_E * (router.experts_per_token / tokens_E.sum().clamp(min=1))
    num_experts = logits_NE[0].shape[-1]
    return num_experts * (token_share_E.float() * probability_sums_LE.mean(0)).sum()


def get_router_logits(output: Any) -> tuple[Tensor, ...]:
    """Return the router logits (N, E) of each layer with experts; empty if the output has none."""
    logits = (
        output.get("router_logits") if isinstance(output, dict) else getattr(output, "router_logits", None)
    )
    layers = logits if isinstance(logits, (tuple, list)) else ()
    return tuple(layer.flatten(0, -2) for layer in layers if isinstance(layer, Tensor))


CLASS_LABEL_KEYS = ("labels", "label", "targets", "target")
"""Entries of a batch that Classification reads labels from: the first that a batch has."""


class VocabularyObjective(BaseObjective):
    """Base of the objectives on the cross entropy of a language model's labels.

    Args:
        call: The call of the model.
        kernels: Compiled kernels for the loss; `None`: the loss is computed in blocks. See
            logits_cross_entropy.py.
    """

    name = "causal_lm"
    """Name of the objective in messages: its `objective.kind`."""

    def __init__(self, call: ModelCall | None = None, kernels: FusedKernels | None = None):
        super().__init__(call)
        self._kernels = kernels
        self._heads = OutputHeads()

    def compute_losses(
        self, model: Callable[..., Any], batch: Batch, per_token: bool = False
    ) -> tuple[Tensor, Any]:
        """Run a forward, and return the cross entropy in fp32 and the model's output.

        Args:
            model: The model, wrapped or not.
            batch: A batch on the model's device.
            per_token: Whether to return each token's loss (B, T), not the sum over the labels.

        Raises:
            DataError: Labels are missing, have another shape, or are outside of the vocabulary.
            ModelError: The model returned no logits, or logits of another shape than the labels.
        """
        labels_BT = self._get_labels(batch)
        head = self._heads.find(model)
        if head is not None:
            self._check_labels(batch, head.out_features)
        with compute_loss_in_head(head, labels_BT, per_token, self._kernels) as state:
            output = self._call(model, batch)
        result = get_logits(output)  # losses of the tokens if the head has computed the loss, else logits
        if not state.has_computed_loss:
            losses = self._compute_from_logits(batch, result, per_token)
        else:
            losses = result if per_token else result.sum()
        return losses, output

    def _compute_from_logits(self, batch: Batch, logits_BTV: Tensor, per_token: bool) -> Tensor:
        labels_BT = self._get_labels(batch)
        if logits_BTV.shape[:-1] != labels_BT.shape:
            raise ModelError(
                f"objective {self.name}: the model returned logits {tuple(logits_BTV.shape)} for labels "
                f"{tuple(labels_BT.shape)}; return logits (samples, tokens, vocabulary)"
            )
        self._check_labels(batch, logits_BTV.shape[-1])
        logits_NV = logits_BTV.flatten(0, 1)
        labels_N = labels_BT.flatten()
        if per_token:
            return cross_entropy_per_token(logits_NV, labels_N, self._kernels).view(labels_BT.shape)
        return cross_entropy_sum(logits_NV, labels_N, self._kernels)

    @staticmethod
    def _check_labels(batch: Batch, vocabulary_size: int) -> None:
        check_labels(batch, "shift_labels" if "shift_labels" in batch else "labels", vocabulary_size)

    def _get_labels(self, batch: Batch) -> Tensor:
        """Return the label (B, T) of each position, int64: the token after it, or -100.

        Raises:
            DataError: The batch has no labels, or not one label for each token.
        """
        names = ("shift_labels",) if "shift_labels" in batch else ("labels",)
        labels_BT: Tensor = batch[find_labels(batch, names, self.name)]
        if labels_BT.dim() != 2:
            raise DataError(
                f"objective {self.name} expects a label for each token, (samples, tokens), but the batch has "
                f"{format_batch(batch)}"
            )
        labels_BT = labels_BT.long()
        return labels_BT if "shift_labels" in batch else F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE_INDEX)


class CausalLM(VocabularyObjective):
    """The next-token cross entropy over the labels that are not -100.

    A batch has `input_ids` (B, T) and labels in one of two forms: `shift_labels` (B, T), where position t has
    the token after t, or `labels` (B, T), aligned with the inputs as in transformers.

    If the config of a mixture of experts sets `output_router_logits`, the routers' load-balancing loss over
    the counted tokens of the global batch is minimised too. That loss multiplies two sums over the global
    batch, so the tokens of each expert are counted before the first backward; see `prepare_step`.

    If the model returns its last layer's outputs unchanged as logits, the loss is computed in that layer,
    without the logits: see linear_cross_entropy.py. Otherwise see logits_cross_entropy.py.
    """

    unit = "tokens"
    means: Mapping[str, tuple[str, str]] = {"router_aux_loss": ("router_aux_loss", "routed_tokens")}

    def __init__(self, call: ModelCall | None = None, kernels: FusedKernels | None = None):
        super().__init__(call, kernels)
        # Returns the tokens of each expert in the global batch, given those in a single micro-batch.
        self._get_global_sums: Callable[[Tensor], Tensor] = lambda tokens_E: tokens_E

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        count = (self._get_labels(batch) != IGNORE_INDEX).sum()
        if self._is_first_count:
            self._warn_if_none_counts(count, "labels")
        return count

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective.

        Collective in a training step of one micro-batch, if the routers have a load-balancing loss.
        """
        loss_sum, output = self.compute_losses(model, batch)
        is_counted_BT = self._get_labels(batch) != IGNORE_INDEX
        count = is_counted_BT.sum()
        router = get_router_settings(model)
        logits_NE = get_router_logits(output)
        if router is None or not logits_NE or not torch.is_grad_enabled():
            return LossSum(loss_sum, count)
        tokens_E = self._get_global_sums(count_tokens_per_expert(logits_NE, is_counted_BT, router))
        balance_sum = compute_balance_sum(logits_NE, is_counted_BT, router, tokens_E)
        extras = {"router_aux_loss": balance_sum.detach(), "routed_tokens": count}
        return LossSum(loss_sum, count, extras, router.coefficient * balance_sum)

    def prepare_step(self, batch: GlobalBatch) -> None:
        """Count the tokens of each expert over the global batch, if the routers have a load-balancing loss.

        Several micro-batches take one more forward of each, with the same random numbers, since the counts
        must be known before the first backward; then this is collective. A single micro-batch is counted in
        its own forward, with one all-reduce.
        """
        self._get_global_sums = batch.all_reduce_sum
        router = get_router_settings(batch.model)
        if router is None or len(batch.micro_batches) == 1:
            return
        micro_batches = [batch.to_device(each) for each in batch.micro_batches]
        device = self._get_labels(micro_batches[0]).device
        tokens_E: Tensor | None = None
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for micro_batch in micro_batches:
                labels_BT = self._get_labels(micro_batch)
                with compute_loss_in_head(self._heads.find(batch.model), labels_BT):
                    logits_NE = get_router_logits(self._call(batch.model, micro_batch))
                if not logits_NE:
                    return
                counts_E = count_tokens_per_expert(logits_NE, labels_BT != IGNORE_INDEX, router)
                tokens_E = counts_E if tokens_E is None else tokens_E + counts_E
        assert tokens_E is not None
        total_E = batch.all_reduce_sum(tokens_E)
        self._get_global_sums = lambda _: total_E


def find_labels(batch: Batch, names: Sequence[str], objective: str) -> str:
    """Return the first of these names that is an entry of the batch.

    Args:
        batch: A batch.
        names: Names of entries that may have the labels, the preferred one first.
        objective: Name of the objective, for messages.

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
    """Raise a DataError if a label in the entry `name` is neither -100 nor in [0, classes)."""
    if (wrong := find_bad_value(batch, name, classes)) is not None:
        raise DataError(
            f"{name!r} has {wrong.value}, but the model has {classes} outputs: expected 0 to {classes - 1} "
            f"({IGNORE_INDEX}: not counted){wrong.sample}"
        )


class Classification(BaseObjective):
    """The cross entropy over classes, with optional class weights, over the labels that are not -100.

    Logits are (..., C), and labels (...) are one of the entries CLASS_LABEL_KEYS. With weights, the count is
    the sum of the weights of the labels, as in torch.nn.CrossEntropyLoss. The weights are fp32 in every
    precision.

    Args:
        class_weights: Weight of each class; `None`: 1 for all.
        label_smoothing: Share of each target that is spread evenly over all classes.
        call: The call of the model.
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
        self._checks_for_probabilities = True

    def _get_weights(self, device: torch.device) -> Tensor | None:
        if self.weights_C is not None and self.weights_C.device != device:
            self.weights_C = self.weights_C.to(device)  # happens once, since a run has one device
        return self.weights_C

    def count(self, batch: Batch) -> Tensor:
        """See Objective.count."""
        name = find_labels(batch, CLASS_LABEL_KEYS, "classification")
        labels = batch[name].long()
        weights_C = self._get_weights(labels.device)
        is_counted = labels != IGNORE_INDEX
        if self._is_first_count:
            self._warn_if_none_counts(is_counted.sum(), name)
        if weights_C is None:
            return is_counted.sum()
        if (wrong := find_bad_value(batch, name, weights_C.numel())) is not None:
            raise ConfigError(
                f"objective.class_weights has {weights_C.numel()} weights, but a label is "
                f"{wrong.value}{wrong.sample}; write one weight for each class"
            )
        return (weights_C[labels.clamp(min=0)] * is_counted).sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> LossSum:
        """See Objective."""
        name = find_labels(batch, CLASS_LABEL_KEYS, "classification")
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

    def _refuse_probabilities(self, logits: Tensor) -> None:
        """Raise a ModelError if the logits are probabilities. Checks until a batch is large enough to tell.

        A check synchronizes the host with the device.
        """
        if not self._checks_for_probabilities:
            return
        verdict = are_probabilities(logits)
        if verdict:
            raise ModelError(PROBABILITIES_ERROR)
        self._checks_for_probabilities = verdict is None
