"""Digests of what ranks hold the same of: no flipped bit leaves one as it was, and the rank is named."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from support.launch import DIGITS, TRAIN, environment, write_recipe
from support.own_state import CASES
from support.poisoned import SPLITS, events, train
from support.ranks import free_port
from support.tiny import deepspeed_json, make_engine, recipe, token_bundle

from pipeline.config.watching_schema import WatchConfig
from pipeline.data.random_numbers import seed_step
from pipeline.engine.replicas import digest
from pipeline.errors import DeviceFailedError
from pipeline.objectives import CausalLM
from pipeline.replica_check import ReplicaCheck

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
    """In place, whatever it is a view of."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        size = 8 * flat.element_size()
        place = bit // size % flat.numel()
        one = flat[place : place + 1].clone()
        raw = torch.view_as_real(one).reshape(-1) if one.is_complex() else one
        raw = raw.view(torch.uint8)
        raw[bit % size // 8] ^= 1 << (bit % 8)
        tensor.view(-1)[place : place + 1] = one


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("length", [1, 2, 5, 8, 31])
def test_no_flipped_bit_leaves_a_digest_as_it_was(dtype, offset, length):
    torch.manual_seed(length)
    tensor = (torch.randn(offset + length) * 50).to(dtype)[offset:]
    before = int(digest([tensor], CPU))
    for bit in range(0, 8 * tensor.element_size() * length, 3):
        flip(tensor, bit)
        assert int(digest([tensor], CPU)) != before
        flip(tensor, bit)
        assert int(digest([tensor], CPU)) == before


def test_what_changes_places_shows(monkeypatch):
    monkeypatch.setattr("pipeline.engine.replicas.SMALL", 4)
    a, b = torch.randn(16), torch.randn(16)
    assert int(digest([a, b], CPU)) != int(digest([b, a], CPU))
    assert int(digest([], CPU)) == 0


FIFTY = {
    "ddp": (3, None, ("weights", "optimizer state", "gradients")),
    "zero0": (2, deepspeed_json(0), ("weights", "optimizer state", "gradients")),
    "zero0-bf16": (2, deepspeed_json(0, "bf16"), ("weights", "optimizer state", "gradients")),
    "zero2": (2, deepspeed_json(2), ("weights",)),
}


def flips(job, deepspeed, kinds, times: int):
    """Of so many flipped bits, each in one rank: how many were told with their kind and rank, and how many
    more times something was told."""
    data = token_bundle()
    tree = recipe(batch={"micro_batch_size": 2, "gradient_accumulation_steps": 1})
    engine = make_engine(job, tree, deepspeed, data)
    check, draw = ReplicaCheck(job, engine.replicas, WatchConfig(compare_every=1), 0), random.Random(0)
    batch = {key: value[None].repeat(2, 1) for key, value in data.train[job.ranks.rank].items()}
    optimizer = engine._optimizer
    own = [p for group in optimizer.param_groups for p in group["params"]]
    in_gradients: list[tuple[int, int]] = []

    def before_step(*_):
        for place, bit in in_gradients:
            flip(own[place % len(own)].grad, bit)
        in_gradients.clear()

    optimizer.register_step_pre_hook(before_step)

    def repair():
        states = [each for p in own for each in optimizer.state[p].values() if isinstance(each, torch.Tensor)]
        for tensor in [*engine.module.parameters(), *own, *(states if "gradients" in kinds else [])]:
            torch.distributed.broadcast(tensor.detach(), 0)

    def step():
        check.begin(0)
        engine.train_step([batch], CausalLM(), 1e-3, 0)
        return check.end(0)

    clean = [step(), step()]
    right = 0
    for number in range(times):
        kind, rank = kinds[number % len(kinds)], draw.randrange(job.ranks.world_size)
        place, bit = draw.randrange(10**6), draw.randrange(10**6)
        if rank == job.ranks.rank:
            moments = [optimizer.state[p]["exp_avg"] for p in own] if "gradients" in kinds else []
            if kind == "gradients":
                in_gradients.append((place, bit))
            else:
                tensors = moments if kind == "optimizer state" else list(engine.module.parameters())
                flip(tensors[place % len(tensors)], bit)
        told = step()
        if told is not None and told.fields["kind"] == kind:
            ranks = [int(each) for each in told.fields["ranks"].split(",")]
            alone = job.ranks.world_size > 2
            right += ranks == [rank] if alone else rank in ranks
        repair()
        clean += [step()]
        repair()
    engine.close()
    return right, sum(each is not None for each in clean)


@pytest.mark.slow
@pytest.mark.daily("ddp", "zero2")
@pytest.mark.parametrize("split", FIFTY)
def test_fifty_of_fifty_flipped_bits_are_found_and_nothing_else(ranks, split):
    """Of three ranks the one; of two it cannot be told which is right, and both are named."""
    world_size, deepspeed, kinds = FIFTY[split]
    for right, false in ranks(world_size).run(flips, deepspeed, kinds, 50, timeout=500):
        assert (right, false) == (50, 0)


def alarms(job, tree, deepspeed, times: int):
    """What is told in so many steps of ranks that nothing has happened to, and the last that was compared."""
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
@pytest.mark.daily(*[f"{case}-ddp" for case in CASES])
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
    model = {"kind": "support.own_state:OwnState", "args": {"case": case}}
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


def corrupted(job, split, folder: str, at: int, action: str = "stop"):
    """What a run ends with one of whose ranks has a bit flipped before step `at`."""

    def prepare(parts, poison):
        steps = 0
        original = parts.loader.next_group

        def next_group():
            nonlocal steps
            steps += 1
            if steps == at and job.ranks.rank == 1:
                flip(next(iter(parts.engine.module.parameters())), 7)
            return original()

        parts.loader.next_group = next_group

    watch = {"compare_every": 5, "on_corruption": action}
    try:
        train(job, split, folder, {}, prepare=prepare, checkpoint={"every": 4, "keep_last": 9}, watch=watch)
    except DeviceFailedError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("split", ["ddp", "zero2-bf16"])
def test_a_run_with_a_broken_rank_ends_and_goes_on_from_before(ranks, split, tmp_path):
    """The flip comes before step 9; what is there after steps 5 and 10 is compared. ZeRO 2 mends such weights
    itself, by gathering them from their owners in a step: there the flip comes after step 10."""
    at = 9 if split == "ddp" else 11
    world_size, deepspeed = SPLITS[split]
    said = ranks(world_size).run(corrupted, deepspeed, str(tmp_path), at, timeout=500)
    assert said[0] == said[1]
    assert "of step 10 should be the same on 2 ranks" in said[0]
    assert "rank 1 on" in said[0]
    assert "no checkpoint after step 5 counts" in said[0]
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("*step-*"))
    assert names == ["step-00000004", "suspect-step-00000008"]
    (told,) = events(tmp_path, "corruption")
    assert told["level"] == "error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "hindrance"),
    [
        (2, "nobody knows which is to"),
        (4, "a machine leaves what launch/torchrun.sh --nnodes MIN:MAX has started"),
    ],
)
def test_where_no_machine_can_leave_the_run_ends_and_says_why(ranks, world_size, hindrance, tmp_path, caplog):
    said = ranks(world_size).run(corrupted, None, str(tmp_path), 9, "leave", timeout=500)
    assert f"no machine leaves the job: {hindrance}" in said[0]
    assert "no checkpoint after step 5 counts" in said[0]
    (told,) = events(tmp_path, "corruption")
    assert "leaves" not in told


@pytest.mark.slow
def test_other_kinds_of_processors_are_no_corruption(tmp_path):
    """Of three ranks one has another's vector instructions: it rounds otherwise, and nothing is broken."""
    port = str(free_port())
    recipe = write_recipe(tmp_path, watch={"compare_every": 1}, batch={"global_batch_size": 12}, **DIGITS)
    place = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, TRAIN, "--config", str(recipe), f"run_dir={tmp_path / 'run'}"],
            env=environment(RANK=rank, LOCAL_RANK=rank, ATEN_CPU_CAPABILITY=kind, **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, kind in (("0", "avx2"), ("1", "default"), ("2", "avx2"))
    ]
    said = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert "ranks compute on 2 kinds of processors (avx2, default)" in said[0].lower()
    assert not events(tmp_path / "run", "corruption")
