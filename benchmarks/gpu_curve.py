"""Compares loss curves of this device with fp32 on a CPU: `python benchmarks/gpu_curve.py --output FILE`.

It trains small models for 20 steps with the defaults of this device, under plain PyTorch, ZeRO 2 and ZeRO 3.
On a GPU these are compiled blocks, attention by document and the fused loss. Loss and gradient norm of each
step must stay close to curve_reference.json, which --write-reference computes in fp32 on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import curve_inputs
import torch
import transformers
import yaml
from report import append_line, device_name
from torch import nn
from torch._dynamo.utils import counters
from workload import JSON_FILES, REPOSITORY

from pipeline.config.settings import load_settings
from pipeline.data import prepare_data
from pipeline.data.random_numbers import seed_step
from pipeline.distributed.process_group import Job, describe_device, start_job
from pipeline.distributed.ranks import read_ranks
from pipeline.engine.interface import mean_loss
from pipeline.engine.schedule import learning_rate_multiplier
from pipeline.models import build_model
from pipeline.models.sharding import NoSharding, build_model_request
from pipeline.objectives import build_objective
from pipeline.training.assemble import build_engine, build_loader

REFERENCE = Path(__file__).with_name("curve_reference.json")
STEPS = 20
# Largest relative difference of loss and gradient norm from the reference in any step. The values for bf16
# are about 2.5 times the differences on a CPU. Under ZeRO the loss differs more, because parameters are bf16;
# autocast keeps them in fp32.
TOLERANCES = {
    ("fp32", "plain"): (1e-5, 1e-4),
    ("fp32", "zero"): (1e-5, 1e-4),
    ("bf16", "plain"): (5e-4, 8e-3),
    ("bf16", "zero"): (2e-3, 8e-3),
}
SPLITS = {"plain": None, **{stage: JSON_FILES[stage] for stage in ("2", "3")}}
SIZES: dict[str, dict[str, int]] = {
    # The vocabulary is not a multiple of 64, so that the loss on a GPU has to pad it.
    "full": {"hidden_size": 256, "length": 256, "vocab_size": 1003, "micro_batch_size": 2},
    "tiny": {"hidden_size": 64, "length": 64, "vocab_size": 203, "micro_batch_size": 4},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"extra": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}},
    "llama": {"num_key_value_heads": 2},
}


@dataclass(frozen=True)
class Curve:
    """Model and rows of a loss curve that has a reference."""

    architecture: str
    packed: bool = False
    lora: bool = False

    @property
    def name(self) -> str:
        """Name of the curve, also its key in the reference."""
        return f"{self.architecture}{' packed' * self.packed}{', lora' * self.lora}"


CURVES = {
    curve.name: curve
    for curve in (
        Curve("gpt2"),
        Curve("gpt2", packed=True),
        Curve("llama"),
        Curve("llama", packed=True),
        Curve("llama", packed=True, lora=True),
    )
}


@dataclass
class TrainedCurve:
    """Losses and gradient norms of one case, and the way they were computed."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    inputs: str = ""
    """Checksum of the rows and the first weights."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Number of compiled blocks and graphs, and the pipeline's log lines about compilation and attention."""


@contextmanager
def capture_notes() -> Iterator[list[str]]:
    """Collect the pipeline's log lines about compilation and attention."""
    log = logging.getLogger("pipeline")
    handler = logging.Handler()
    lines: list[str] = []
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: record.getMessage().startswith(("compile:", "attention:")))
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def recipe(curve: Curve, size: dict[str, int], weights: Path) -> dict[str, Any]:
    """Return the recipe of a curve."""
    model = {
        "kind": "causal_lm",
        "architecture": curve.architecture,
        "num_layers": 4,
        "num_heads": 4,
        "hidden_size": size["hidden_size"],
        "intermediate_size": size["hidden_size"] * 8 // 3,
        "max_sequence_length": size["length"],
        "weights": str(weights),
        **MODELS[curve.architecture],
    }
    rate = 2e-3 if curve.lora else 1e-3
    rows = {"length": size["length"], "vocab_size": size["vocab_size"], "packed": curve.packed}
    tree: dict[str, Any] = {
        "max_steps": STEPS,
        "model": model,
        "data": {"kind": "curve_inputs:rows", "args": {"num_samples": 64, **rows}},
        "batch": {"micro_batch_size": size["micro_batch_size"], "gradient_accumulation_steps": 2},
        "optimizer": {"learning_rate": rate, "max_grad_norm": 1.0},
        "schedule": {"kind": "cosine", "warmup": 2},
        "wandb": {"mode": "disabled"},
    }
    if curve.lora:
        tree["adapter"] = {"kind": "lora", "rank": 8}
    return tree


def train(
    job: Job,
    curve: Curve,
    split: str,
    precision: str,
    *,
    size: str = "full",
    steps: int = STEPS,
    compiled: str = "auto",
    overrides: Sequence[str] = (),
) -> TrainedCurve:
    """Train one case as a run does, and return its curve.

    Args:
        job: Job with a process group, which plain PyTorch does not use.
        curve: Model and data.
        split: Key of SPLITS.
        precision: `fp32` or `bf16`.
        size: Key of SIZES.
        steps: Number of steps, at most STEPS. The schedule always spans STEPS.
        compiled: Value of the setting that compiles blocks: `auto`, `true` or `false`.
        overrides: Further overrides `key=value` of the recipe.
    """
    with ExitStack() as cleanup:
        cleanup.callback(_release)
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="curve-")))
        weights = folder / "model.safetensors"
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe(curve, SIZES[size], weights)))
        file = SPLITS[split]
        words = [f"engine.precision={precision}", f"engine.compile={compiled}"]
        if file is not None:
            is_half = str(precision == "bf16").lower()
            words = [f"ds.bf16.enabled={is_half}", "ds.fp16.enabled=false", f"ds.compile.enabled={compiled}"]
        else:
            job = Job(job.ranks, job.device)
        json_path = None if file is None else REPOSITORY / "ds_configs" / file
        settings = load_settings(path, json_path, [*words, *overrides])
        config = settings.config
        data = prepare_data(config.data)
        skeleton = build_model(
            config.model, build_model_request(config, data, NoSharding(), draws=False), config.seed
        )
        curve_inputs.write_weights(skeleton, weights)
        resolved = settings.resolve(job.ranks.world_size, describe_device(job.device))
        notes = cleanup.enter_context(capture_notes())
        engine = build_engine(config, resolved, job, data)
        cleanup.callback(engine.close)
        objective = build_objective(config, resolved.compile)
        loader = build_loader(config, resolved.batch_plan, data, engine)
        cleanup.callback(loader.close)
        results = []
        for step in range(steps):
            seed_step(config.seed, step, engine.seed_rank)
            assert config.optimizer.learning_rate is not None
            rate = config.optimizer.learning_rate * learning_rate_multiplier(config.schedule, step, STEPS)
            results.append(engine.train_step(loader.next_group(), objective, rate, 0))
        trained = TrainedCurve(inputs=curve_inputs.checksum(data.train, weights))
        for result in results:  # read after the last step, because each read waits for the device
            trained.losses.append(float(mean_loss(result.loss_sum, result.global_count)))
            trained.norms.append(math.nan if result.grad_norm is None else float(result.grad_norm))
        trained.facts = {
            "compiled": compiled_blocks(engine.module),
            "compilations": counters["stats"]["unique_graphs"],
            "notes": notes,
        }
        return trained


def _release() -> None:
    """Free the memory of the finished case, and discard its compiled code."""
    gc.collect()
    torch._dynamo.reset()
    counters.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compiled_blocks(model: nn.Module) -> int:
    """Return the number of blocks that run a compiled function; 0 after a failed compilation."""
    shared = [
        getattr(getattr(vars(module).get("forward"), "__func__", None), "of_blocks", None)
        for module in model.modules()
    ]
    return sum(bool(each is not None and each._compiled) for each in shared)


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float | None:
    """Return the largest relative difference of all steps; `None` if no value is finite."""
    pairs = zip(found, expected[: len(found)], strict=True)
    return max((abs(a - b) / abs(b) for a, b in pairs if math.isfinite(a)), default=None)


def reference_of(curve: Curve, size: str) -> dict[str, Any]:
    """Return losses, norms and the checksum of the inputs from the reference file."""
    reference: dict[str, Any] = json.loads(REFERENCE.read_text())["curves"][size][curve.name]
    return reference


def judge(trained: TrainedCurve, reference: dict[str, Any], precision: str, split: str) -> dict[str, Any]:
    """Compare a curve with its reference.

    Raises:
        ValueError: The reference was computed from other rows or first weights.
    """
    if trained.inputs != reference["inputs"]:
        raise ValueError(
            f"rows and first weights have checksum {trained.inputs}, expected {reference['inputs']} as in "
            f"{REFERENCE.name}; if that is intended, run with --write-reference"
        )
    nonfinite = sum(not math.isfinite(value) for value in (*trained.losses, *trained.norms))
    differences = (
        largest_difference(trained.losses, reference["losses"]),
        largest_difference(trained.norms, reference["norms"]),
    )
    allowed = TOLERANCES[precision, "plain" if split == "plain" else "zero"]
    within = [d is not None and d <= limit for d, limit in zip(differences, allowed, strict=True)]
    return {
        "largest_loss_difference": differences[0],
        "largest_norm_difference": differences[1],
        "allowed": list(allowed),
        "holds": nonfinite == 0 and all(within),
        "nan": nonfinite,
    }


def run_case(job: Job, curve: Curve, split: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one case and return its record; a case that fails has a record too."""
    size = "tiny" if arguments.tiny else "full"
    record: dict[str, Any] = {
        "curve": curve.name,
        "split": split,
        "precision": arguments.precision,
        "size": size,
        "device": device_name() if job.device.type == "cuda" else f"CPU, {platform.machine()}",
    }
    start = time.perf_counter()
    try:
        trained = train(job, curve, split, arguments.precision, size=size)
        record |= judge(trained, reference_of(curve, size), arguments.precision, split)
        record |= {**trained.facts, "losses": trained.losses, "norms": trained.norms}
    except Exception as error:  # a failed case must not stop the others
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        record |= {"holds": False, "failed": f"{type(error).__name__}: {lines[0]}"}
    return {**record, "seconds": round(time.perf_counter() - start, 1)}


def write_reference(job: Job) -> None:
    """Compute every curve in fp32 on the CPU, without a split or compilation, and write REFERENCE."""
    curves: dict[str, dict[str, Any]] = {}
    for size in SIZES:
        for name, curve in CURVES.items():
            trained = train(job, curve, "plain", "fp32", size=size, compiled="false")
            print(f"{size} {name}: loss {trained.losses[0]:.4f} to {trained.losses[-1]:.4f}", flush=True)
            values = {"inputs": trained.inputs, "losses": trained.losses, "norms": trained.norms}
            curves.setdefault(size, {})[name] = values
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    REFERENCE.write_text(json.dumps({**versions, "curves": curves}, indent=1) + "\n")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `words` in its place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, help="append each case's record to this file of JSON lines as soon as it ends")
    add("--precision", choices=["fp32", "bf16"], default="bf16")
    names = f"curves to train, by default all: {', '.join(map(repr, CURVES))}"
    add("--cases", nargs="+", choices=list(CURVES), default=list(CURVES), metavar="NAME", help=names)
    add("--tiny", action="store_true", help="train smaller models, which have a separate reference")
    add("--write-reference", action="store_true", help=f"compute {REFERENCE.name} on this CPU")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Train the chosen curves, or write the reference, and return the exit code."""
    arguments = parse_arguments(words)
    records: list[dict[str, Any]] = []
    job = start_job(read_ranks(os.environ), distributed=True)
    try:
        if arguments.write_reference:
            if job.device.type != "cpu":
                print("--write-reference: set DS_ACCELERATOR=cpu to compute on the CPU", file=sys.stderr)
                return 2
            write_reference(job)
            return 0
        for split in SPLITS:  # plain first, so that a run that is interrupted has trained every model
            for name in arguments.cases:
                record = run_case(job, CURVES[name], split, arguments)
                append_line(arguments.output, record)
                print(summary_line(record), flush=True)
                records.append(record)
    except KeyboardInterrupt:
        print("interrupted: the cases that follow were not trained", file=sys.stderr)
    finally:
        job.close()
    num_holding = sum(record["holds"] for record in records)
    num_cases = len(arguments.cases) * len(SPLITS)
    print(f"{num_holding} of {num_cases} curves hold")
    return 0 if num_holding == num_cases else 1


def summary_line(record: dict[str, Any]) -> str:
    """Return a record as one line for the console."""
    split = record["split"] if record["split"] == "plain" else f"ZeRO {record['split']}"
    case = f"{record['curve']}, {split}, {record['precision']}"
    if "failed" in record:
        return f"FAILED   {case}: {record['failed']} ({record['seconds']} s)"
    differences = record["largest_loss_difference"], record["largest_norm_difference"]
    loss, norm = ("none" if each is None else f"{each:.1e}" for each in differences)
    shown = {key: record[key] for key in ("compiled", "compilations", "notes")}
    return (
        f"{'holds   ' if record['holds'] else 'DIFFERS '} {case}: loss {loss}, norm {norm}, "
        f"{record['nan']} not finite ({record['seconds']} s) {json.dumps(shown)}"
    )


if __name__ == "__main__":
    sys.exit(main())
