"""Peak memory of a part of a step: of this process, as the system counts it."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.engine.clipping import suppress_steps
from pipeline.monitoring.metrics import read_resident_bytes
from pipeline.training.micro_batch import PeakMemory, allocate_optimizer_states

MIB = 2**20


def test_a_peak_is_that_of_its_own_stretch():
    peaks = PeakMemory(torch.device("cpu"), 1)
    peaks.begin()
    before = peaks.read_current()
    torch.ones(16 * MIB)  # 64 MiB, gone at once
    assert 60 * MIB < peaks.read_and_reset() - before < 90 * MIB
    torch.ones(4 * MIB)
    assert peaks.read_and_reset() - before < 40 * MIB
    assert peaks.read_limit() > before
    assert PeakMemory(torch.device("cpu"), 2).read_limit() < peaks.read_limit()


def test_states_of_a_refused_step_are_in_memory_and_unchanged():
    """Pages of zeros take no memory on a CPU until they are written to."""
    p = nn.Parameter(torch.ones(16 * MIB))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW([p], fused=True)
    before = read_resident_bytes()
    with allocate_optimizer_states() as unmade, suppress_steps(optimizer, p.device):
        optimizer.step()
    assert read_resident_bytes() - before > 120 * MIB  # two states of 64 MiB
    state = optimizer.state[p]
    assert not any(bool(state[name].any()) for name in ("exp_avg", "exp_avg_sq", "step"))
    assert unmade == [0]


def test_states_that_a_refused_step_does_not_make_are_counted():
    p = nn.Parameter(torch.ones(8, 4))
    p.grad = torch.ones_like(p)
    muon = torch.optim.Muon([p])
    for expected in (8 * 4 * 4, 0):
        with allocate_optimizer_states() as unmade, suppress_steps(muon, p.device):
            muon.step()
        assert unmade == [expected]
        p.grad = torch.ones_like(p)
        muon.step()
