"""Modules as people write them for fp32 and plain PyTorch, and the curve each trains on under any split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from support.tiny import recipe, resolve
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pipeline.data.batches import collate_items
from pipeline.data.bundle import DataBundle
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import mean_loss
from pipeline.engine.state import get_persistent_buffers
from pipeline.evaluation.held_out import evaluate
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_eval_loader, build_loader

STEPS = 8


class LayerNorm32(nn.LayerNorm):
    """Normalisation kept in fp32 by its author, as in CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).type_as(x)


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.gn = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.gn(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    """BatchNorm2d and 1d, GroupNorm, and the data's mean and deviation as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4]).view(1, 1, 1))
        self.register_buffer("std", torch.tensor([1.3]).view(1, 1, 1))
        self.stem = nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(128, 16, bias=False), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 5)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem((inputs - self.mean) / self.std)))


class CRNN(nn.Module):
    """Convolutions, BatchNorm, two layers of LSTM both ways; for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d((2, 1))
        )
        self.norm = LayerNorm32(32)
        self.lstm = nn.LSTM(32, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.conv(inputs).permute(0, 3, 1, 2).flatten(2)  # (B, W, C * H)
        return self.head(self.lstm(self.norm(x))[0])


def ctc(outputs: Tensor, batch: Any) -> Tensor:
    """Return the CTC loss, as in torch's documentation: outputs (B, W, K) -> the sum over the micro-batch."""
    B, W, _ = outputs.shape
    lengths = torch.full((B,), W), torch.full((B,), batch["targets"].shape[1])
    return F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), batch["targets"], *lengths, reduction="sum")


class Attention(nn.Module):
    """Rotations as complex numbers in a buffer, a causal mask of floats, a table of positions."""

    def __init__(self, length: int, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        angles = torch.outer(torch.arange(length).float(), 0.1 ** torch.arange(width // heads // 2).float())
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1))

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        q = self.turned(q)
        k = self.turned(k)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.mask).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Positions as in PyTorch's tutorial, tied weights, normalisation and averages of several kinds."""

    def __init__(self, length: int = 12, width: int = 16, vocabulary: int = 20):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.register_buffer(
            "positions", torch.sin(torch.outer(torch.arange(length) / 7, torch.arange(width) + 1.0))
        )
        self.attention = Attention(length, width, 4)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.across = nn.InstanceNorm1d(width, affine=True, track_running_stats=True)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.rms = nn.RMSNorm(width)
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        if self.training:
            self.average.lerp_(x.detach().float().mean((0, 1)), 0.1)
            self.seen += 1
        x = self.across(x.transpose(1, 2)).transpose(1, 2) + self.average
        x = self.layer(self.attention(x + self.positions))
        return self.head(self.rms(x + self.gru(x)[0]))[:, -1]


class Parametrized(nn.Module):
    """Weights that are computed from others, by spectral and weight normalisation; a bare matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(100, 16))
        self.second = parametrizations.weight_norm(nn.Linear(16, 16))
        self.third = nn.utils.spectral_norm(nn.Linear(16, 8))
        self.slope = nn.PReLU(8)
        self.matrix = nn.Parameter(torch.randn(8, 5) / 3)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.silu(self.first(inputs.flatten(1)))
        return self.slope(self.third(self.second(x) * self.scale)) @ self.matrix


@dataclass
class Samples:
    """`images`: (1, 10, 10) and a class; `lines`: (1, 8, 12) and three letters; `tokens`: 12 and a class."""

    kind: str
    number: int = 64

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = index % 5
        if self.kind == "tokens":
            return {"inputs": torch.randint(0, 20, (12,), generator=generator), "labels": torch.tensor(label)}
        shape = (1, 8, 12) if self.kind == "lines" else (1, 10, 10)
        inputs = torch.randn(shape, generator=generator) * (1 + label) + index % 2
        if self.kind == "lines":
            return {"inputs": inputs, "targets": torch.randint(1, 5, (3,), generator=generator)}
        return {"inputs": inputs, "labels": torch.tensor(label)}


# Module -> the data it reads.
MODULES = {"ResNet": "images", "CRNN": "lines", "Encoder": "tokens", "Parametrized": "images"}


@dataclass(frozen=True)
class Curve:
    losses: list[float]
    grad_norms: list[float]
    eval_loss: float
    buffers: dict[str, Tensor]


def recipe_of(name: str) -> dict[str, Any]:
    objective = {"kind": "parity.modules:ctc"} if name == "CRNN" else {"kind": "classification"}
    return recipe(
        model={"kind": f"parity.modules:{name}"},
        objective=objective,
        batch={"gradient_accumulation_steps": 2, "global_batch_size": 16},
    )


def train_module(job: Job, name: str, split: dict[str, Any] | None) -> Curve:
    """Return the module's curve under a split, and its buffers after it. Collective."""
    kind = MODULES[name]
    data = DataBundle(Samples(kind), {"held out": Samples(kind, 19)}, collate_items, None, None, 5, kind)
    config, resolved = resolve(recipe_of(name), split, job.ranks.world_size)
    engine = build_engine(config, resolved, job, data)
    loader = build_loader(config, resolved.batch_plan, data, engine)
    objective = build_objective(config)
    losses = []
    norms = []
    for step in range(STEPS):
        seed_step(config.seed, step, engine.seed_rank)
        result = engine.train_step(loader.next_group(), objective, 3e-3, False)
        total = job.all_reduce_sum(result.loss_sum.to(torch.float64))
        losses.append(float(mean_loss(total, result.global_count)))
        norms.append(float(result.grad_norm))
    held_out = build_eval_loader(config, resolved.batch_plan, data, engine)
    row = evaluate(engine, objective, held_out, job)
    return Curve(
        losses,
        norms,
        row["eval/loss"],
        {k: v.clone() for k, v in get_persistent_buffers(engine.module).items()},
    )
