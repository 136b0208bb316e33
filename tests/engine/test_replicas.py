"""Digests of what ranks hold the same of: no flipped bit leaves one as it was, and the rank is named."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from engine.own_state import CASES
from support.corrupted_data import SPLITS, read_events, train
from support.launch import DIGITS, TRAIN, make_environment, write_recipe
from support.rank_pool import free_port
from support.tiny import deepspeed_json, make_engine, recipe, token_bundle
from torch import nn

from pipeline.config.schema import WatchConfig
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job
from pipeline.engine.replicas import (
    HISTORY_INDEX,
    BufferBroadcast,
    ReplicaDigests,
    digest_tensors,
    mix_digests,
)
from pipeline.errors import DeviceFailedError
from pipeline.objectives import CausalLM
from pipeline.training.replica_check import ReplicaCheck

CPU = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.complex64,
]


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip a bit in place, also of a view."""
    with torch.no_grad():
        flat = tensor.data.view(-1)  # autograd does not notice
        size = 8 * flat.element_size()
        place = bit // size % flat.numel()
        one = flat[place : place + 1].clone()
        raw = torch.view_as_real(one).reshape(-1) if one.is_complex() else one
        raw = raw.view(torch.uint8)
        raw[bit % size // 8] ^= 1 << (bit % 8)
        flat[place : place + 1] = one


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("offset", "length"), [(0, 1), (1, 2), (2, 8), (3, 5), (1, 31)])
def test_no_flipped_bit_leaves_a_digest_as_it_was(dtype, offset, length):
    torch.manual_seed(length)
    tensor = (torch.randn(offset + length) * 50).to(dtype)[offset:]
    before = int(digest_tensors([tensor], CPU))
    for bit in range(0, 8 * tensor.element_size() * length, 3):
        flip(tensor, bit)
        assert int(digest_tensors([tensor], CPU)) != before
        flip(tensor, bit)
        assert int(digest_tensors([tensor], CPU)) == before


def test_what_changes_places_shows(monkeypatch):
    monkeypatch.setattr("pipeline.engine.replicas.SMALL_TENSOR_ELEMENTS", 4)
    a = torch.randn(16)
    b = torch.randn(16)
    assert int(digest_tensors([a, b], CPU)) != int(digest_tensors([b, a], CPU))
    assert int(digest_tensors([], CPU)) == 0


def test_a_step_without_an_update_is_read_too():
    """DeepSpeed leaves the optimizer out where fp16 overflows, and the next update rewrites the weights."""

    def digests(bit: int | None) -> list[int]:
        weight = torch.ones(8)
        optimizer = torch.optim.SGD([weight])
        replicas = ReplicaDigests(
            0, lambda: [weight], optimizer, CPU, is_sharded=True, rewritten=lambda: [weight]
        )
        replicas.begin(is_compared=False)
        if bit is not None:
            flip(weight, bit)
        assert replicas.end() is None
        weight.fill_(1)
        replicas.begin(is_compared=True)
        optimizer.step()
        return replicas.end().tolist()

    right = digests(None)
    wrong = digests(40)
    assert right[:HISTORY_INDEX] == wrong[:HISTORY_INDEX]
    assert right[HISTORY_INDEX] != wrong[HISTORY_INDEX]


def test_a_bit_that_stays_flipped_for_any_number_of_steps_shows():
    for bit in (0, 31, 32, 62, 63):
        right = wrong = torch.zeros((), dtype=torch.int64)
        flipped = torch.tensor(1).bitwise_left_shift(bit)
        for step in range(16):
            right = mix_digests(right, torch.tensor(7 * step))
            wrong = mix_digests(wrong, torch.tensor(7 * step) ^ flipped)
            assert int(right) != int(wrong)


# A flip comes at one moment of a step, and is either compared or not: see the table of
# docs/reference/metrics-and-alerts.md.
MOMENTS = ("before the forward", "before the backward", "before the update", "after the update")
WEIGHTS = {("weights", moment) for moment in MOMENTS}
REPLICATED = (
    WEIGHTS | {("optimizer state", moment) for moment in MOMENTS} | {("gradients", "before the update")}
)
FLIPS = [*sorted(REPLICATED), ("gradients", "before the backward")]
"""The latter in gradients that micro-batches add up, before their reduction: no rank's are another's."""
# Name -> ranks, DeepSpeed JSON, steps between two comparisons, what is compared.
COMPARED = {
    "ddp": (3, None, 1, REPLICATED),
    "zero0": (2, deepspeed_json(0), 1, REPLICATED),
    "zero0-bf16": (2, deepspeed_json(0, "bf16"), 1, REPLICATED),
    "zero1": (3, deepspeed_json(1), 3, WEIGHTS),
    "zero1-bf16": (2, deepspeed_json(1, "bf16"), 3, WEIGHTS),
    "zero2": (2, deepspeed_json(2), 3, WEIGHTS),
    "zero2-bf16": (2, deepspeed_json(2, "bf16"), 3, WEIGHTS),
    "zero2-offload": (2, deepspeed_json(2, "bf16", offload_optimizer={"device": "cpu"}), 3, WEIGHTS),
}


class AtMoments(CausalLM):
    """Calls `at` around the last micro-batch's forward."""

    def __init__(self, at, micro_batches: int):
        super().__init__()
        self._at = at
        self._micro_batches = micro_batches
        self._seen = 0

    def __call__(self, model, batch):
        self._seen += 1
        is_last = self._seen % self._micro_batches == 0
        if is_last:
            self._at("before the forward")
        loss = super().__call__(model, batch)
        if is_last:
            self._at("before the backward")
        return loss


def flips(job, deepspeed, every: int, times: int):
    """Findings for so many flipped bits, each in one rank: (kind, moment, the rank, its event).

    Between two of them all that they may have changed is put back.
    """
    data = token_bundle()
    draw = random.Random(0)
    tree = recipe(batch={"micro_batch_size": 2, "gradient_accumulation_steps": 2})
    engine = make_engine(job, tree, deepspeed, data)
    check = ReplicaCheck(job, engine.replicas, WatchConfig(compare_every=every), 0)
    batch = {key: value[None].repeat(2, 1) for key, value in data.train[job.ranks.rank].items()}
    weights = list(engine.module.parameters())
    optimizer = engine._optimizer
    own = [p for group in optimizer.param_groups for p in group["params"]]
    is_sharded = deepspeed is not None and deepspeed["zero_optimization"]["stage"] > 0
    coming: list[tuple[str, str, int, int]] = []
    steps = 0

    def tensors_of(kind: str) -> list[torch.Tensor]:
        if kind == "weights":
            return weights if is_sharded else list({id(p): p for p in weights + own}.values())
        if kind == "optimizer state":
            moments = [optimizer.state[p][name] for p in own for name in ("exp_avg", "exp_avg_sq")]
            return moments + own if is_sharded else moments
        reduced = [p.grad for p in own if p.grad is not None]
        return reduced or [p.grad for p in weights if p.grad is not None]

    def at(moment: str) -> None:
        if coming and coming[0][1] == moment:
            kind, _, place, bit = coming.pop()
            if tensors := tensors_of(kind):  # ZeRO 2 keeps no gradients of its parameters
                flip(tensors[place % len(tensors)], bit)

    hook = optimizer.register_step_pre_hook(lambda *_: at("before the update"))
    optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)  # before the tensors are read
    objective = AtMoments(at, 2)

    def step():
        nonlocal steps
        check.begin(steps)
        engine.train_step([batch, batch], objective, 1e-3, 0)
        at("after the update")
        found = check.end(steps)
        steps += 1
        return found

    window = 2 * every  # with a comparison behind the flip
    false = [step() for _ in range(window)]
    states = [each for p in own for each in optimizer.state[p].values() if isinstance(each, torch.Tensor)]
    before = [(each, each.detach().clone()) for each in [*weights, *own, *states]]
    told = []
    for number in range(times):
        kind, moment = FLIPS[number % len(FLIPS)]
        rank = draw.randrange(job.ranks.world_size)
        late = draw.randrange(every)
        flipped = (kind, moment, draw.randrange(10**6), draw.randrange(10**6))
        found = []
        for index in range(window):
            if index == late and rank == job.ranks.rank:
                coming.append(flipped)
            found.append(step())
            coming.clear()
        told.append((kind, moment, rank, next((each for each in found if each is not None), None)))
        with torch.no_grad():
            for each, values in before:
                each.copy_(values)
    false += [step() for _ in range(window)]
    engine.close()
    return told, [each for each in false if each is not None]


@pytest.mark.slow
@pytest.mark.daily("ddp", "zero2")
@pytest.mark.parametrize("split", COMPARED)
def test_all_flipped_bits_in_what_is_compared_are_found_and_nothing_else(ranks, split):
    """The one of three ranks is named; of two, both are, as there is no majority."""
    world_size, deepspeed, every, compared = COMPARED[split]
    for told, false in ranks(world_size).run(flips, deepspeed, every, 3 * len(FLIPS), timeout=500):
        assert false == []
        for kind, moment, rank, event in told:
            if (kind, moment) not in compared:
                assert event is None, (kind, moment)
                continue
            assert event is not None, (kind, moment)
            assert event.fields["kind"] == kind
            named = [int(each) for each in event.fields["ranks"].split(",")]
            assert named == ([rank] if world_size > 2 else [0, 1])


def alarms(job, tree, deepspeed, times: int):
    """Findings in so many steps of healthy ranks, and the last step that was compared."""
    data = token_bundle()
    engine = make_engine(job, tree, deepspeed, data)
    check = ReplicaCheck(job, engine.replicas, WatchConfig(compare_every=1), 0)
    told = []
    for step in range(times):
        seed_step(0, step, engine.seed_rank)
        first = 2 * (step * engine.dp_world_size + engine.dp_rank)
        rows = [[data.train[(first + 32 * m + k) % 64] for k in range(2)] for m in range(2)]
        check.begin(step)
        group = [{key: torch.stack([row[key] for row in each]) for key in each[0]} for each in rows]
        engine.train_step(group, CausalLM(), 1e-2, 0)
        told.append(check.end(step))
    engine.close()
    return [each for each in told if each is not None], check.good_until


ACCUMULATED = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
OWN_STATE = {"ddp": None, "zero0": deepspeed_json(0), "zero0-bf16": deepspeed_json(0, "bf16")}
OWN_STATE["zero2-bf16"] = deepspeed_json(2, "bf16")


@pytest.mark.slow
@pytest.mark.daily(*(f"{case}-ddp" for case in ("batch norm", "own buffer", "negative zeros", "NaN")))
@pytest.mark.parametrize(
    ("case", "split"),
    [
        pytest.param(case, split, id=f"{case}-{split}")
        for case in CASES
        for split in OWN_STATE
        if (case, split) != ("an expert that one rank uses", "zero2-bf16")  # DeepSpeed sends other sizes
    ],
)
def test_what_ranks_may_have_of_their_own_is_no_corruption(ranks, case, split):
    model = {"kind": "engine.own_state:OwnState", "args": {"case": case}}
    engine = {"find_unused_parameters": True} if split == "ddp" and "one rank" in case else {}
    tree = recipe(model=model, objective={"kind": "causal_lm"}, batch=ACCUMULATED, engine=engine)
    for told, last in ranks(2).run(alarms, tree, OWN_STATE[split], 8):
        assert told == []
        assert last == 7


CUT = {"tensor_parallel": {"autotp_size": 2}}
STAGES = {"pipeline": {"stages": 2}}
MUON = {"optimizer": {"learning_rate": 1e-2, "groups": [{"patterns": ["*_proj.*"], "kind": "muon"}]}}
OTHERS = {
    "norms that a cut model has whole": (4, deepspeed_json(0) | CUT, {}),
    "zero1, cut": (4, deepspeed_json(1) | CUT, {}),
    "copies of stages": (4, deepspeed_json(0) | STAGES, {}),
    "copies of stages, bf16": (4, deepspeed_json(0, "bf16") | STAGES, {}),
    "sequences in parts": (2, deepspeed_json(0) | {"sequence_parallel_size": 2}, {}),
    "muon": (3, None, MUON),
    "adafactor": (3, deepspeed_json(0), {"optimizer": {"kind": "adafactor", "learning_rate": 1e-2}}),
    "fp16": (2, deepspeed_json(0, "fp16"), {}),
}


@pytest.mark.slow
@pytest.mark.daily("muon")
@pytest.mark.parametrize("name", OTHERS)
def test_other_splits_and_optimizers_are_no_corruption(ranks, name):
    world_size, deepspeed, changes = OTHERS[name]
    tree = recipe(batch=ACCUMULATED, **changes)
    for told, last in ranks(world_size).run(alarms, tree, deepspeed, 8, timeout=500):
        assert told == []
        assert last == 7


def corrupted(job, split, folder: str, at: int):
    """The end of a run in which one rank has a bit flipped before step `at`."""

    def prepare(parts, corrupted):
        steps = 0
        original = parts.loader.next_group

        def next_group():
            nonlocal steps
            steps += 1
            if steps == at and job.ranks.rank == 1:
                flip(next(iter(parts.engine.module.parameters())), 7)
            return original()

        parts.loader.next_group = next_group

    watch = {"compare_every": 5, "on_corruption": "stop"}
    try:
        train(job, split, folder, {}, prepare=prepare, checkpoint={"every": 4, "keep_last": 9}, watch=watch)
    except DeviceFailedError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.daily("ddp")
@pytest.mark.parametrize("split", ["ddp", "zero2-bf16"])
def test_a_run_with_a_broken_rank_ends_and_goes_on_from_before(ranks, split, tmp_path):
    """The flip comes before step 9; steps 5 and 10 are compared. Step 9 at ZeRO 2 removes it."""
    world_size, deepspeed = SPLITS[split]
    said = ranks(world_size).run(corrupted, deepspeed, str(tmp_path), 9, timeout=500)
    assert said[0] == said[1]
    assert said[0].startswith(
        "corruption at step 10 on ranks 0,1 (watch.on_corruption: stop): checkpoints after step 5 "
        "are no longer used; the same command resumes from an earlier one"
    )
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("*step-*"))
    assert names == ["step-00000004", "suspect-step-00000008"]
    (told,) = read_events(tmp_path, "corruption")
    assert told["level"] == "error"
    when = "of step 10" if split == "ddp" else "between steps 5 and 10"
    assert f"the weights {when} should be the same on 2 ranks" in told["message"]
    assert "rank 1 on" in told["message"]
    assert ranks(world_size).run(corrupted, deepspeed, str(tmp_path), 0, timeout=500) == [None] * world_size
    (told,) = read_events(tmp_path, "corruption")
    assert (told["step"], told["from_step"]) == (4, 10)


@pytest.mark.slow
@pytest.mark.nightly
def test_other_kinds_of_processors_are_no_corruption(tmp_path):
    """One of three ranks has other vector instructions: it rounds differently, and nothing is broken."""
    port = str(free_port())
    recipe = write_recipe(tmp_path, watch={"compare_every": 1}, batch={"global_batch_size": 12}, **DIGITS)
    place = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, TRAIN, "--config", str(recipe), f"run_dir={tmp_path / 'run'}"],
            env=make_environment(RANK=rank, LOCAL_RANK=rank, ATEN_CPU_CAPABILITY=kind, **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, kind in (("0", "avx2"), ("1", "default"), ("2", "avx2"))
    ]
    said = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert "ranks compute on 2 kinds of processors (avx2, default)" in said[0].lower()
    assert not read_events(tmp_path / "run", "corruption")


def shared(job: Job, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    module = nn.Module()
    module.register_buffer("values", torch.full(shape, 3 + job.ranks.rank).to(dtype))
    BufferBroadcast(module).broadcast()
    return torch.equal(module.values.float(), torch.full(shape, 3.0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint16, torch.float8_e4m3fn])
def test_a_buffer_of_any_type_is_rank_0s_on_all_ranks(ranks, dtype):
    for shape in ((), (2, 3)):
        assert all(ranks(2).run(shared, dtype, shape))
