"""Losses of pairs of answers as formulas, of numbers alone. Shapes: P pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.errors import ConfigError


@dataclass(frozen=True)
class PairLoss:
    """Which loss of a pair: numbers of the recipe.

    Sources, as TRL 1.16 has them: DPO (Rafailov et al. 2023, equation 7), cDPO (Mitchell 2023) for `sigmoid`
    with smoothing, `robust` (Chowdhury et al. 2024, equation 10), `hinge` (SLiC, Zhao et al. 2023), `ipo`
    (Azar et al. 2023, equation 17, of means over tokens), `odds` (ORPO, Hong et al. 2024, equations 4 to 7,
    likewise). SimPO (Meng et al. 2024, equation 6) is `sigmoid` of means over tokens with a margin, CPO (Xu
    et al. 2024, equation 3) `sigmoid` without a reference.
    """

    link: str
    beta: float
    label_smoothing: float = 0.0
    gamma: float = 0.0
    """What beta times the difference has to exceed."""

    def __call__(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """(P,), to be divided by the number of pairs.

        Args:
            chosen_P, rejected_P: Scores: log-probabilities, their sums or means over tokens, less a
            reference's.
        """
        beta, smoothing = self.beta, self.label_smoothing
        if self.link == "odds":
            odds_P = (chosen_P - rejected_P) - (log1mexp(chosen_P) - log1mexp(rejected_P))
            return -beta * F.logsigmoid(odds_P)
        if self.link == "ipo":
            return (chosen_P - rejected_P - 1 / (2 * beta)) ** 2
        logits_P = beta * (chosen_P - rejected_P) - self.gamma
        if self.link == "hinge":
            return torch.relu(1 - logits_P)
        right_P, wrong_P = -F.logsigmoid(logits_P), -F.logsigmoid(-logits_P)
        if self.link == "robust":
            return ((1 - smoothing) * right_P - smoothing * wrong_P) / (1 - 2 * smoothing)
        if self.link != "sigmoid":
            raise ConfigError(f"objective.loss_type: {self.link!r} is no loss of pairs")
        return (1 - smoothing) * right_P + smoothing * wrong_P


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 without cancellation (Mächler 2012, equation 7)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near_zero = x > -math.log(2)
    near = torch.where(is_near_zero, x, -1.0)
    far = torch.where(is_near_zero, -1.0, x)
    return torch.where(is_near_zero, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))
