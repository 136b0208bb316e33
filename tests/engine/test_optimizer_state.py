"""Every state of an optimizer is saved by its own name: another one resumes from it bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_own_optimizer import built
from torch import nn

from pipeline.checkpoint.shards import Region, Shard
from pipeline.engine.state import (
    ParameterState,
    TensorPlacement,
    get_flat_state_tensors,
    place_state_tensors,
    place_whole_parameters,
    restore_state,
)
from pipeline.errors import CheckpointError

OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "SGD without momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.1),
    **{
        f"own {name}": lambda model, name=name: built(name, module=model)
        for name in ("Counting", "CountAlone", "RowMeans")
    },
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.5, centered=True),
}


@dataclass
class Kept:
    """A ShardSource of whole tensors."""

    scalars: Mapping[str, Any]
    shards: list[Shard]

    def get_shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {(shard.name, shard.kind): shard.region.shape for shard in self.shards}

    def read(self, name: str, kind: str, region: Region, out: torch.Tensor) -> None:
        (values,) = (shard.values for shard in self.shards if (shard.name, shard.kind) == (name, kind))
        out.copy_(values)


class Trained:
    def __init__(self, kind: str):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.model.append(nn.ParameterList([nn.Parameter(torch.tensor(2.0))]))
        self.optimizer = OPTIMIZERS[kind](self.model)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.state = ParameterState(place_whole_parameters(self.model), {}, self.optimizer, (0, 1), {})

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            torch.manual_seed(step)
            y = self.model[2](self.model[1](self.model[0](torch.randn(4, 6)))) * self.model[3][0]
            loss = (y - torch.randn(4, 3)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def kept(self) -> Kept:
        shards = [
            Shard.of(shard.name, shard.kind, shard.region, shard.values.clone())
            for shard in self.state.shards(None)
        ]
        return Kept(self.state.scalars(), shards)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_another_one_goes_on_bit_for_bit(kind, before):
    whole = Trained(kind)
    whole.train(0, 3)
    kept = whole.kept()
    expected = whole.train(3, 7)
    resumed = Trained(kind)
    resumed.train(0, before)
    with torch.no_grad():
        restore_state(resumed.state, kept, resumed.names)
    assert resumed.state.scalars() == kept.scalars
    assert resumed.train(3, 7) == expected


def test_what_is_kept_has_the_optimizers_own_names():
    trained = Trained("Adafactor")
    trained.train(0, 2)
    kept = trained.kept()
    assert kept.scalars == {"optimizer/step": 2}
    shapes = {kind: shape for (name, kind), shape in kept.get_shapes().items() if name == "0.weight"}
    assert shapes == {"weight": (5, 6), "row_var": (5, 1), "col_var": (1, 6)}


def test_what_is_not_shaped_like_its_parameter_cannot_be_cut():
    trained = Trained("Adafactor")
    trained.train(0, 1)
    parameter = trained.model[0].weight
    cut = TensorPlacement("0.weight", (10, 6), (5, 6), ((None, ((0, 5), (0, 6))),))
    with pytest.raises(CheckpointError, match=r"'col_var' of 0.weight .* use ZeRO stage 0"):
        list(place_state_tensors(trained.optimizer, parameter, cut))
    with pytest.raises(CheckpointError, match="another shape than the tensor that the optimizer steps"):
        get_flat_state_tensors(trained.optimizer, parameter)
