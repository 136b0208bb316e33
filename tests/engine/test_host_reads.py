"""No host in the way of a step: what each engine launches and where the host reads, counted on the CPU.

DeepSpeed runs the same code on CUDA, but for its streams: with overlap_comm, which one rank has not, it
waits for them once or twice a step.
"""

from __future__ import annotations

from collections import Counter
from time import perf_counter

import pytest
from engine.census import Census, counted
from support.tiny import deepspeed_json, make_engine, recipe, settings, token_bundle

from pipeline.config.batch_plan import plan_batch
from pipeline.distributed.process_group import Job
from pipeline.monitoring.metrics import Meters, Workload
from pipeline.objectives import CausalLM
from pipeline.training.assemble import build_loader
from pipeline.training.loop import TrainState

pytestmark = pytest.mark.slow

PARAMETERS = 37_088
WARM_UP = 3  # the first step allocates and warns
# Why the host reads there, each time a micro-batch or a step.
EACH_MICRO_BATCH = {
    "linear_cross_entropy.py:_find_counted_rows": 2,  # on a CPU alone, which computes nothing for the others
}
EACH_STEP = {3: {"utils.py:is_invalid_grad_norm": 1}}  # whether to step at all
# Operators besides those of plain PyTorch in fp32, which are the model's and the loss's: upper bounds, with
# one micro-batch and with two. The model has 21 parameters in two groups.
OVERHEAD = {
    ("ddp", "fp32"): (30, 33),
    (0, "fp32"): (28, 30),
    (1, "fp32"): (60, 63),
    (2, "fp32"): (60, 108),
    (3, "fp32"): (88, 116),
    # Here twelve casts a layer are attention's, which a CPU computes in fp32.
    (0, "bf16"): (79, 131),
    (1, "bf16"): (110, 164),
    (2, "bf16"): (110, 209),
    (3, "bf16"): (138, 217),
}
PLAIN = (336, 638)


def step_of(
    job: Job, engine: str | int, precision: str, micro_batches: int, kind: type[CausalLM] = CausalLM
) -> Census:
    """A step as the loop makes it, its row of the log behind it, after some that warm up."""
    plain = {"single": "single", "ddp": "ddp"}.get(str(engine))
    split = {"torch": {"parallel": plain}} if plain else deepspeed_json(int(engine), precision)
    tree = recipe(batch={"micro_batch_size": 2, "gradient_accumulation_steps": micro_batches})
    data = token_bundle()
    config = settings(tree, dict(split)).config
    made = make_engine(job, tree, split, data)
    assert made.num_parameters == PARAMETERS
    loader = build_loader(config, plan_batch(config.batch, made.dp_world_size), data, made)
    meters = Meters(Workload(1, 1, "tokens", None, None), job, perf_counter)
    state = TrainState.start(made.device)
    objective = kind()
    for _ in range(WARM_UP):
        made.train_step(loader.next_group(), objective, 1e-3, 0)
    group = loader.next_group()
    with counted() as census:
        result = made.train_step(group, objective, 1e-3, 0)
        state = state.after(result)
        meters.observe(result)
        row = meters.collect_row({"train/tokens_seen": state.tokens_seen, "train/epoch": 0.0})
    assert row.read().row["train/loss"] > 0
    loader.close()
    made.close()
    return census


def steps_of(job: Job, cases: list[tuple[str | int, str, int]]) -> list[Census]:
    return [step_of(job, *case) for case in cases]


@pytest.fixture(scope="module")
def censuses(ranks):
    cases = [("single", "fp32", 1), ("single", "fp32", 2)]
    cases += [(*engine, number) for engine in OVERHEAD for number in (1, 2)]
    return dict(zip(cases, ranks(1).run(steps_of, cases)[0], strict=True))


def beyond(census: Census, allowed: dict[str, int]) -> Counter[str]:
    return census.reads - Counter(allowed)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("engine", "precision"), [("single", "fp32"), *OVERHEAD])
def test_the_host_reads_nothing_but_what_is_listed(censuses, engine, precision, number):
    allowed = {place: number * times for place, times in EACH_MICRO_BATCH.items()} | EACH_STEP.get(engine, {})
    assert not beyond(censuses[engine, precision, number], allowed)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("engine", "precision"), OVERHEAD)
def test_an_engine_launches_little_beside_the_model(censuses, engine, precision, number):
    plain = censuses["single", "fp32", number]
    own = censuses[engine, precision, number]
    assert own.operators - plain.operators <= OVERHEAD[engine, precision][number - 1]


@pytest.mark.parametrize("number", [1, 2])
def test_a_step_of_plain_pytorch_launches_no_more(censuses, number):
    assert censuses["single", "fp32", number].operators <= PLAIN[number - 1]


def test_no_tensor_of_a_step_is_larger_than_the_model(censuses):
    """Neither a bucket of half a billion elements nor, with a vocabulary this small, anything of a batch."""
    assert {key: each.largest for key, each in censuses.items() if each.largest > 4 * PARAMETERS} == {}


class Reading(CausalLM):
    """Somebody looks at the loss."""

    def __call__(self, model, batch):
        loss = super().__call__(model, batch)
        self.seen = loss.loss_sum.item()
        return loss


def test_one_more_read_is_seen_and_named(ranks):
    census = ranks(1).run(step_of, "single", "fp32", 1, Reading)[0]
    assert beyond(census, EACH_MICRO_BATCH) == {"torch_engine.py:train_step": 1}
