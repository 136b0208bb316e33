"""Weights out: a folder that transformers opens with the run's loss; all of it or nothing; memory bounded."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity.measure import ALONE
from parity.splits import LLAMA
from plain_engine import PlainEngine
from safetensors import safe_open
from safetensors.torch import load_file
from support.checkpoint_stores import make_store
from support.checkpoints import write_checkpoint
from support.resume_across_splits import (
    SPLITS,
    GatheredShards,
    Run,
    assemble_tensors,
    copy_shards,
    make_recipe,
)
from support.tiny import resolve, token_bundle
from support.weights import assert_same, small
from torch import nn
from transformers import AutoModelForCausalLM

from pipeline.checkpoint.catalog import read_complete_manifest
from pipeline.checkpoint.export import export
from pipeline.checkpoint.manifest import MANIFEST
from pipeline.checkpoint.shards import Region, Shard
from pipeline.engine.torch_engine import TorchEngine
from pipeline.errors import CheckpointError
from pipeline.evaluation.held_out import evaluate
from pipeline.models.transformers_facts import write_model_description
from pipeline.objectives import CausalLM
from pipeline.training.assemble import build_eval_loader

pytestmark = pytest.mark.slow

PLAIN = {"torch": {"parallel": "single"}}
TIED = LLAMA | {"extra": {"tie_word_embeddings": True}}
GPT2 = {"kind": "causal_lm", "architecture": "gpt2", "num_layers": 2, "num_heads": 2, "hidden_size": 16}


def eval_loss(run) -> float:
    config, resolved = resolve(run.tree, run.split, run.job.ranks.world_size)
    loader = build_eval_loader(config, resolved.batch_plan, token_bundle(), run.engine)
    return evaluate(run.engine, CausalLM(), loader, run.job)["eval/loss"]


def made_run(job, model, split, folder):
    """A run directory after two steps; (its evaluation loss, this rank's shards). Collective."""
    folder = Path(folder)
    run = Run(job, make_recipe(model), split)
    run.tree = make_recipe(model)
    run.split = split
    run.train(0, 2)
    loss = eval_loss(run)
    make_store(folder / "checkpoints", job).save_final(
        run.engine, {"global_step": 2, "tokens_seen": 1234.0, "eval_loss": loss}
    )
    if job.ranks.is_main_process:
        write_model_description(run.engine.module, None, folder / "model")
        (folder / "recipe.yaml").write_text("max_steps: 2\n")
    return loss, copy_shards(run.engine)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(model)`: (run directory, its evaluation loss), trained once."""
    runs = {}

    def run_of(model):
        key = json.dumps(model)
        if key not in runs:
            folder = tmp_path_factory.mktemp("run") / "my-run"
            runs[key] = folder, made_run(ALONE, model, PLAIN, folder)[0]
        return runs[key]

    return run_of


def exported(run: Path, out: Path, dtype="fp32", advance=lambda count: None, **options):
    checkpoint = run / "checkpoints" / "step-00000002"
    return export(checkpoint, out, dtype=dtype, advance=advance, **options)


def loss_of(folder: Path) -> float:
    """The evaluation loss of the folder's model: a run's, that starts from it."""
    model = {"kind": "causal_lm", "pretrained": str(folder)}
    run = Run(ALONE, make_recipe(model), PLAIN)
    run.tree = make_recipe(model)
    run.split = PLAIN
    return eval_loss(run)


@pytest.mark.daily("tied", "gpt2")
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(TIED, id="tied"),
        pytest.param(LLAMA, id="llama"),
        pytest.param(GPT2, id="gpt2"),
    ],
)
def test_transformers_opens_it_and_the_loss_is_the_runs_bit_for_bit(model, saved, tmp_path):
    run, loss = saved(model)
    counts = []
    done = exported(run, tmp_path / "out", advance=counts.append)
    assert done.auto_class == "AutoModelForCausalLM"
    assert done.files == [tmp_path / "out" / "model.safetensors"]
    assert done.num_bytes == done.files[0].stat().st_size
    opened, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert opened.dtype == torch.float32
    assert sum(counts) == 2 * sum(p.nbytes for p in opened.parameters())
    assert loss_of(tmp_path / "out") == loss
    tied = model in (TIED, GPT2)
    assert ("lm_head.weight" in load_file(done.files[0])) != tied
    assert (opened.lm_head.weight is opened.get_input_embeddings().weight) == tied
    assert not list(tmp_path.glob("*exporting*"))


@pytest.mark.parametrize(("dtype", "of"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_in_half_precision(dtype, of, saved, tmp_path):
    run, loss = saved(LLAMA)
    whole = load_file(exported(run, tmp_path / "whole").files[0])
    half = load_file(exported(run, tmp_path / "half", dtype).files[0])
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "half"), half)
    assert half.keys() == whole.keys()
    for name, values in whole.items():
        assert torch.equal(half[name], values.to(of)), name
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == str(of).removeprefix(
        "torch."
    )
    assert loss_of(tmp_path / "half") == pytest.approx(loss, rel=1e-3)


def test_in_several_files(saved, tmp_path):
    run, loss = saved(LLAMA)
    whole = load_file(exported(run, tmp_path / "whole").files[0])
    done = exported(run, tmp_path / "out", max_file_bytes=20_000)
    assert len(done.files) > 2
    parts = [load_file(file) for file in done.files]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        name: file.name for file, part in zip(done.files, parts, strict=True) for name in part
    }
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    for part in parts:
        assert sum(value.nbytes for value in part.values()) <= 20_000 or len(part) == 1
    together = {name: value for part in parts for name, value in part.items()}
    assert together.keys() == whole.keys()
    assert all(torch.equal(together[name], whole[name]) for name in whole)
    assert loss_of(tmp_path / "out") == loss


def with_buffers(seed: int) -> nn.Module:
    module = small(seed)
    module.register_buffer("exact", torch.rand(5, dtype=torch.float64))
    module.register_buffer("turns", torch.rand(2, 3, dtype=torch.complex64))
    module.register_buffer("rounded", torch.rand(4).bfloat16())
    return module


@pytest.fixture
def plain_run(tmp_path):
    """(run directory, its module): no transformers model, with buffers that must not be rounded."""
    module = with_buffers(seed=0)
    config, resolved = resolve(make_recipe(LLAMA), PLAIN, 1)
    engine = TorchEngine(module, config.optimizer, config.engine, resolved.split, ALONE)
    store = make_store(tmp_path / "run" / "checkpoints", ALONE)
    store.save_final(engine, {"global_step": 2})
    other = TorchEngine(with_buffers(seed=1), config.optimizer, config.engine, resolved.split, ALONE)
    store.resume(other)
    assert_same(other.module, module.state_dict())
    return tmp_path / "run", module


def test_a_plain_module_is_one_file(plain_run, tmp_path):
    run, module = plain_run
    done = exported(run, tmp_path / "out", max_file_bytes=16)
    assert done.auto_class is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.safetensors"]
    fresh = with_buffers(seed=1)
    fresh.load_state_dict(load_file(done.files[0]))
    assert_same(fresh, module.state_dict())
    half = load_file(exported(run, tmp_path / "half", "bf16").files[0])
    assert half["first.weight"].dtype == torch.bfloat16
    for name, buffer in module.named_buffers():
        assert torch.equal(half[name], buffer)
        assert half[name].dtype == buffer.dtype


def test_the_card_has_the_runs_numbers(saved, tmp_path):
    run, loss = saved(LLAMA)
    exported(run, tmp_path / "out", "bf16")
    card = (tmp_path / "out" / "README.md").read_text()
    for words in (
        "# my-run",
        "| steps | 2 |",
        "1,234",
        f"{loss:.4f}",
        "1 rank |",
        "| bf16 |",
        "max_steps: 2",
    ):
        assert words in card


def refused(run: Path, out: Path, *arguments, **options) -> str:
    """The one line; nothing is left of it."""
    beside = {path: path.stat().st_mtime_ns for path in out.parent.rglob("*")}
    with pytest.raises(CheckpointError) as caught:
        exported(run, out, *arguments, **options)
    assert {path: path.stat().st_mtime_ns for path in out.parent.rglob("*")} == beside
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_with_something_in_it_is_left_alone(saved, tmp_path):
    run, _ = saved(LLAMA)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    assert "out exists and is not empty" in refused(run, tmp_path / "out")
    (tmp_path / "file").write_text("precious")
    assert "file exists" in refused(run, tmp_path / "file")
    (tmp_path / "out" / "mine").unlink()
    assert exported(run, tmp_path / "out").files[0].is_file()


def test_a_write_that_fails_leaves_nothing(saved, tmp_path):
    run, _ = saved(LLAMA)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        message = refused(run, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "out cannot be written: File too large; choose another folder" in message


def test_room_is_looked_for_first(saved, small_disk):
    run, _ = saved(LLAMA)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 40_000))
    counts = []
    message = refused(run, small_disk / "out", advance=counts.append)
    assert "KiB are needed and" in message
    verified = sum(counts)
    exported(run, run.parent / "elsewhere", advance=counts.append)
    assert sum(counts) == 3 * verified


def test_killed_half_way_there_is_no_folder(saved, tmp_path):
    run, loss = saved(LLAMA)
    done = []
    exported(run, tmp_path / "whole", advance=done.append)
    at = 3 * len(done) // 4  # of the second half, which is written

    def advance(count: int, calls: list[int]) -> None:
        calls.append(count)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        calls: list[int] = []
        exported(run, tmp_path / "out", advance=lambda count: advance(count, calls))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.exporting" / "model.safetensors").stat().st_size > 0
    exported(run, tmp_path / "out")
    assert not (tmp_path / "out.exporting").exists()
    assert loss_of(tmp_path / "out") == loss


def damaged(run: Path, to: Path, kind: str) -> str:
    """A copy of the run with one bit flipped in a tensor of a kind; its title."""
    subprocess.run(["cp", "-r", run, to], check=True)
    checkpoint = to / "checkpoints" / "step-00000002"
    manifest = read_complete_manifest(checkpoint)
    file = manifest.files[0]
    piece, offset = next(
        (piece, offset)
        for piece, offset in zip(manifest.shards_of(file), manifest.layout_of(file).offsets, strict=True)
        if piece.kind == kind
    )
    content = bytearray((checkpoint / file.name).read_bytes())
    content[offset + 5] ^= 1
    (checkpoint / file.name).write_bytes(content)
    return piece.title


def test_a_flipped_bit_is_found_and_nothing_is_written(saved, tmp_path):
    run, _ = saved(LLAMA)
    title = damaged(run, tmp_path / "run", "weight")
    message = refused(tmp_path / "run", tmp_path / "out")
    assert (
        f"rank-00000.safetensors: the content is damaged: its checksum differs ({title}); written on"
        in message
    )
    assert "nothing is exported; choose another step with --step" in message


def test_adams_moments_are_not_read(saved, tmp_path):
    run, loss = saved(LLAMA)
    damaged(run, tmp_path / "run", "exp_avg")
    exported(tmp_path / "run", tmp_path / "out")
    assert loss_of(tmp_path / "out") == loss


def test_values_beyond_fp16_are_refused(plain_run, tmp_path):
    _, module = plain_run
    with torch.no_grad():
        module.first.weight[0, 0] = 1e6
    config, resolved = resolve(make_recipe(LLAMA), PLAIN, 1)
    engine = TorchEngine(module, config.optimizer, config.engine, resolved.split, ALONE)
    make_store(tmp_path / "big" / "checkpoints", ALONE).save_final(engine, {"global_step": 2})
    assert "first.weight has values outside of the range of fp16" in refused(
        tmp_path / "big", tmp_path / "out", "fp16"
    )


def without_the_file_of_rank_1(run: Path, engines: list[PlainEngine]) -> Path:
    """Return a checkpoint of two machines that share no file system, as the first of them has it."""
    checkpoint = run / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    manifest = write_checkpoint(checkpoint, engines)
    files = tuple(file.model_copy(update={"place": file.rank}) for file in manifest.files)
    (checkpoint / MANIFEST).write_bytes(manifest.model_copy(update={"files": files}).encode())
    (checkpoint / "rank-00001.safetensors").unlink()
    return checkpoint


def test_a_file_of_another_machine_is_needed_only_for_weights(tmp_path):
    engines = [PlainEngine(0, 1), PlainEngine(0, 1)]
    for rank, engine in enumerate(engines):
        engine.rank = rank
        engine.held = [each for each in engine.held if (each[0][1] not in ("weight", "buffer")) == rank]
    export(without_the_file_of_rank_1(tmp_path / "run", engines), tmp_path / "out")
    weights = {name: values for (name, kind), _, values in engines[0].held if kind == "weight"}
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[name].flatten(), values) for name, values in weights.items())


def test_a_file_of_another_machine_is_named(tmp_path):
    engines = [PlainEngine(rank, 2) for rank in range(2)]
    checkpoint = without_the_file_of_rank_1(tmp_path / "run", engines)
    with pytest.raises(CheckpointError, match=r"1.safetensors is missing: rank 1 wrote it on node1; copy"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.daily("zero3", "pipeline-zero1")
@pytest.mark.parametrize("split", ["zero3", "tensor-zero1", "pipeline-zero1"])
def test_from_every_split_the_same_folder(split, ranks, tmp_path):
    results = ranks(2).run(
        made_run, TIED if "pipeline" in split else LLAMA, SPLITS[split].json, str(tmp_path)
    )
    whole = assemble_tensors(GatheredShards({}, [piece for _, shards in results for piece in shards]))
    done = exported(tmp_path, tmp_path / "out")
    weights = load_file(done.files[0])
    assert weights.keys() == {name for name, kind in whole if kind == "weight"}
    for name, values in weights.items():
        assert torch.equal(values.reshape(-1), torch.from_numpy(whole[name, "weight"])), name
    # Sums run in another order where the model is cut.
    assert loss_of(tmp_path / "out") == pytest.approx(results[0][0], rel=2e-6)


MEBIBYTE = 1 << 20
LIMIT = 416 * MEBIBYTE  # of which the imports take 230, and a thread of torch's may take 64 for its heap
LAYERS = 10
VALUES = 16 * MEBIBYTE
LIMITED = """
import resource, sys
from pipeline.__main__ import main

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if sys.argv[2] == "allocate":
    bytearray(limit)
sys.exit(main(sys.argv[2:]))
"""


def limited(*arguments) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(LIMIT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Large:
    """Layers of random values, of which memory holds one."""

    def __init__(self):
        self.values = torch.rand(VALUES)

    def shards(self):
        for layer in range(LAYERS):
            region = Region((VALUES // 1024, 1024), None, 0, VALUES)
            yield Shard.of(f"layers.{layer}.weight", "weight", region, self.values)

    def scalars(self):
        return {}


def test_a_model_larger_than_the_memory_limit(tmp_path):
    """Export keeps to RLIMIT_DATA, the memory that a process may allocate.

    Address space (ulimit -v) would also count torch's libraries, which are larger than that.
    """
    assert 4 * VALUES * LAYERS > 1.5 * LIMIT
    engine = Large()
    make_store(tmp_path / "run" / "checkpoints", ALONE).save_final(engine, {"global_step": 2})
    assert "MemoryError" in limited("allocate").stderr
    done = limited("export", tmp_path / "run", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert len(opened.keys()) == LAYERS
        assert torch.equal(opened.get_tensor("layers.7.weight").view(-1), engine.values)
    for folder in ("run", "out"):  # over a GB, which pytest would leave there for three more runs
        shutil.rmtree(tmp_path / folder)
