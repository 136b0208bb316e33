"""The bytes that an engine reports, against its tensors and the ZeRO paper's formulas."""

from __future__ import annotations

import gc

import pytest
from parity.test_memory import TREE, start, zero
from support.memory import reachable_tensor_bytes

from pipeline.engine.memory import count_tensor_bytes
from pipeline.objectives import CausalLM

# Bytes a parameter of weights, gradients and the optimizer on each of N ranks, in half precision.
SHARES = {
    0: lambda n: (2, 2, 12),
    1: lambda n: (2, 2, 12 / n),
    2: lambda n: (2, 2 / n, 12 / n),
    3: lambda n: (2 / n, 2 / n, 12 / n),
}


def in_the_second_step(job, deepspeed):
    """(what is said, bytes of all tensors that the engine brought, parameters), gradients being there."""
    before, engine, loader = start(job, TREE, deepspeed)
    found = []
    holder = engine._engine if deepspeed else engine._optimizer
    take_step = holder.step

    def look(*arguments):
        gc.collect()
        found.append((count_tensor_bytes(engine, "cpu"), reachable_tensor_bytes() - before))
        return take_step(*arguments)

    holder.step = look
    for _ in range(2):
        engine.train_step(loader.next_group(), CausalLM(), 1e-3, False)
    assert not any(count_tensor_bytes(engine, "cuda").values())
    return *found[len(found) // 2], engine.num_parameters  # after the first micro-batch that follows a step


@pytest.mark.slow
@pytest.mark.daily("2", "3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_names_what_it_holds(ranks, stage):
    for said, there, number in ranks(2).run(in_the_second_step, zero(stage, "bf16")):
        shares = [each / number for each in list(said.values())[:3]]
        assert shares == pytest.approx(SHARES[stage](2), rel=0.05)
        assert sum(said.values()) == pytest.approx(there, rel=0.05)


@pytest.mark.slow
def test_so_does_plain_pytorch(ranks):
    for said, there, number in ranks(1).run(in_the_second_step, None):
        shares = [each / number for each in list(said.values())[:3]]
        assert shares == pytest.approx([4, 4, 8], rel=0.01)
        assert sum(said.values()) == pytest.approx(there, rel=0.05)
