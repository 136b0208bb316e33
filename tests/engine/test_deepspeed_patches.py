"""Each change to DeepSpeed's internals is needed: every test here fails without the one that it names.

Four have theirs elsewhere: test_close.py (a model after its engine), test_zero3_construction.py (weights),
test_generate.py (forwards over whole parameters) and test_frozen.py (a stage that counts no gradient).
"""

from __future__ import annotations

import os
import tomllib
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from parity.measure import has_async_io
from parity.splits import NVME
from support.launch import DIGITS, ROOT, launch, write_recipe
from support.tiny import TOLERANCES, deepspeed_json, make_engine, recipe, token_bundle, train_curve

from pipeline.config.optional_packages import DEEPSPEED_VERSION
from pipeline.data.batches import collate_items
from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.engine import deepspeed_patches as patches
from pipeline.engine.deepspeed_patches import check_with_deepspeed
from pipeline.objectives import CausalLM

pytestmark = pytest.mark.slow

ALONE = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
LARGE = recipe()["model"] | {"num_layers": 1, "hidden_size": 128, "intermediate_size": 8191}


def oracle(steps: int, **changes):
    return train_curve(ALONE, recipe(batch={"micro_batch_size": 8}, **changes), None, steps)


def hold(curve, expected, precision: str) -> None:
    for column, band in enumerate(TOLERANCES[precision]):
        assert max(abs(a[column] / b[column] - 1) for a, b in zip(curve, expected, strict=True)) < band


def batches(data):
    """The number that the recipe accumulates on two ranks: with fewer DeepSpeed would not step."""
    return [collate_items([data.train[i], data.train[i + 1]]) for i in (0, 2)]


@pytest.mark.nightly
def test_another_version_ends_with_one_line_before_it_is_imported(tmp_path):
    other = tmp_path / "other" / "deepspeed-0.20.0+abc.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.20.0+abc\n")
    (other.parent / "deepspeed.py").write_text("raise ImportError('nothing that is known here')\n")
    found = os.pathsep.join([str(other.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    recipe = write_recipe(tmp_path, **DIGITS)
    split = ROOT / "ds_configs" / "zero2.json"
    done = launch("--config", str(recipe), "--deepspeed", str(split), PYTHONPATH=found)
    line = "deepspeed 0.19.8 is needed, since this trainer corrects its internals; installed: 0.20.0; "
    assert (done.returncode, line + "pip install deepspeed==0.19.8" in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr


def test_the_installation_pins_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pin = f"deepspeed=={DEEPSPEED_VERSION}"
    assert pin in project["dependencies"]
    assert pin in (ROOT / "constraints.txt").read_text().split()
    assert f'"{pin}"' in (ROOT / "benchmarks" / "gpu.sh").read_text()
    check_with_deepspeed({"train_micro_batch_size_per_gpu": 1})


def linear_nodes(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_compiled_code_at_zero_3_has_torchs_linear_and_no_guard_of_a_parameters_number():
    """One graph serves parameters of any ds_id; outside of compiled code DeepSpeed's function stays."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with in_place_of_torchs_linear():
        function = torch.compile(F.linear, backend=backend)
        for number in range(3):
            weight = torch.nn.Parameter(torch.ones(4, 8))
            weight.ds_id = number
            function(torch.ones(2, 8), weight).sum().backward()
            torch.testing.assert_close(weight.grad, torch.full((4, 8), 2.0))
        eager = F.linear(torch.ones(2, 8), weight)
    assert [linear_nodes(graph) for graph in graphs] == [[torch._C._nn.linear]]
    assert type(eager.grad_fn).__name__ == "LinearFunctionForZeroStage3Backward"


@contextmanager
def in_place_of_torchs_linear():
    """Have F.linear be what zero.Init puts in its place once DeepSpeed has been started."""
    patches.use_compilable_linear()
    before = F.linear
    F.linear = patches.partition_parameters.zero3_linear_wrap
    try:
        yield
    finally:
        F.linear = before


def first_steps_counted(job: Job, split) -> set[float]:
    data = token_bundle()
    engine = make_engine(job, recipe(), split, data)
    engine.train_step(batches(data), CausalLM(), 1e-3, 0)
    states = engine._optimizer.state.values()
    counted = {float(state["step"]) for state in states}
    engine.close()
    return counted


def test_the_first_update_at_stage_0_is_the_first(ranks):
    assert ranks(2).run(first_steps_counted, deepspeed_json(0, "bf16")) == [{1.0}, {1.0}]


def first_change(job: Job, split) -> tuple[float, float]:
    """(length of the first update at rate 1, gradient norm)."""
    data = token_bundle()
    plain = {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": 0.0}
    engine = make_engine(job, recipe(optimizer=plain), split, data)
    before = [p.detach().float().clone() for p in engine.module.parameters()]
    norm = float(engine.train_step(batches(data), CausalLM(), 1.0, 0).grad_norm)
    after = [p.detach().float() for p in engine.module.parameters()]
    engine.close()
    return float(torch.nn.utils.get_total_norm([a - b for a, b in zip(after, before, strict=True)])), norm


def test_the_loss_is_scaled_at_stage_0_in_fp16(ranks):
    for length, norm in ranks(2).run(first_change, deepspeed_json(0, "fp16")):
        assert length == pytest.approx(norm, rel=0.02)


def test_gradients_are_averaged_over_sequence_ranks_too(ranks):
    """tests/parity has the stages; without `reduce_scatter` the average is taken elsewhere."""
    split = deepspeed_json(3, reduce_scatter=False) | {"sequence_parallel_size": 2}
    hold(ranks(2).run(train_curve, recipe(), split, 3)[0], oracle(3), "fp32")


@pytest.mark.nightly
@pytest.mark.skipif(not has_async_io(), reason="libaio is missing")
def test_gradients_come_back_from_the_disk_as_they_went(ranks):
    """Matrices of an odd number of rows: their halves lie at addresses that direct I/O cannot read to."""
    split = deepspeed_json(3, offload_optimizer=NVME)
    curve = ranks(2).run(train_curve, recipe(model=LARGE), split, 3, timeout=1800)[0]  # an op may be built
    hold(curve, oracle(3, model=LARGE), "fp32")


def autocast_inside(job: Job) -> bool:
    data = token_bundle()
    engine = make_engine(job, recipe(), deepspeed_json(2, "bf16"), data)
    patches.keep_autocast(engine._engine, torch.bfloat16)
    seen: list[bool] = []
    hook = engine.module.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    torch.set_autocast_enabled("cuda", True)  # what DeepSpeed looks at, whatever the device
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            engine._engine(input_ids=data.train[0]["input_ids"][None])
    finally:
        torch.set_autocast_enabled("cuda", False)
        hook.remove()
        engine.close()
    return seen[0]


def test_the_engines_forward_leaves_autocast_on(ranks):
    assert ranks(2).run(autocast_inside) == [True, True]


TIED = {"architecture": "gpt2", "extra": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}


def curve_and_warnings(job: Job, *run) -> tuple[list[tuple[float, float]], list[str]]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        curve = train_curve(job, *run)
    return curve, [str(each.message) for each in heard if "broadcast" in str(each.message)]


def test_weights_tied_over_stages_train(ranks):
    model = {key: value for key, value in recipe()["model"].items() if key != "intermediate_size"} | TIED
    split = deepspeed_json(1) | {"pipeline": {"stages": 2}}
    for curve, heard in ranks(2).run(curve_and_warnings, recipe(model=model), split, 3):
        hold(curve, oracle(3, model=model), "fp32")
        assert not heard


def on_a_cpu(job: Job) -> tuple[bool, bool]:
    import deepspeed
    from deepspeed.comm.torch import build_shm_op

    return build_shm_op() is None, deepspeed.accelerator.get_accelerator().is_fp16_supported()


def test_a_cpu_compiles_no_all_reduce_and_takes_fp16(ranks):
    assert ranks(2).run(on_a_cpu) == [(True, True)] * 2
