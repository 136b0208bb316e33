"""Compares loss curves of this device with fp32 on a CPU: `python benchmarks/gpu_curve.py --output FILE`.

Trains small models for 20 steps the way a run does by default on this device (on a GPU: compiled blocks,
attention by document, the fused loss), under plain PyTorch, ZeRO 2 and ZeRO 3. Loss and gradient norm of each
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
# Largest relative difference to the reference in any step: loss, gradient norm. In bf16 about 2.5 times what
# a CPU showed. Under ZeRO the loss differs more: parameters are bf16, while autocast keeps fp32 ones.
BANDS = {
    ("fp32", "plain"): (1e-5, 1e-4),
    ("fp32", "zero"): (1e-5, 1e-4),
    ("bf16", "plain"): (5e-4, 8e-3),
    ("bf16", "zero"): (2e-3, 8e-3),
}
SPLITS = {"plain": None, **{stage: JSON_FILES[stage] for stage in ("2", "3")}}
SIZES: dict[str, dict[str, int]] = {
    # No multiple of 64: on a GPU the loss fills the vocabulary up to one.
    "full": {"hidden_size": 256, "length": 256, "vocab_size": 1003, "micro_batch_size": 2},
    "tiny": {"hidden_size": 64, "length": 64, "vocab_size": 203, "micro_batch_size": 4},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"extra": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}},
    "llama": {"num_key_value_heads": 2},
}


@dataclass(frozen=True)
class Curve:
    """A model with its rows, which has a reference."""

    architecture: str
    packed: bool = False
    lora: bool = False

    @property
    def name(self) -> str:
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
class Trained:
    """The curve of one case, and how it was computed."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    inputs: str = ""
    """Checksum of the rows and the first weights."""
    facts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Collect the pipeline's lines of compilation and attention."""
    log, handler, lines = logging.getLogger("pipeline"), logging.Handler(), list[str]()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: record.getMessage().startswith(("compile:", "attention:")))
    log.setLevel(logging.INFO)
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
) -> Trained:
    """Train one case as a run does, and return its curve.

    Args:
        job: With a process group, which plain PyTorch does not use.
        curve: Model and data.
        split: Key of SPLITS.
        precision: `fp32` or `bf16`.
        size: Key of SIZES.
        steps: Number of steps, at most STEPS. The schedule is that of STEPS.
        compiled: Whether blocks are compiled: `auto`, `true` or `false`.
        overrides: Further `key=value` for the recipe.
    """
    with ExitStack() as cleanup:
        cleanup.callback(_release)
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="curve-")))
        weights, path = folder / "model.safetensors", folder / "recipe.yaml"
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
        config, data = settings.config, prepare_data(settings.config.data)
        skeleton = build_model(
            config.model, build_model_request(config, data, NoSharding(), draws=False), config.seed
        )
        curve_inputs.write_weights(skeleton, weights)
        resolved = settings.resolve(job.ranks.world_size, describe_device(job.device))
        notes = cleanup.enter_context(noted())
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
        trained = Trained(inputs=curve_inputs.checksum(data.train, weights))
        for result in results:  # read at the end: each read waits for the device
            trained.losses.append(float(mean_loss(result.loss_sum, result.global_count)))
            trained.norms.append(math.nan if result.grad_norm is None else float(result.grad_norm))
        trained.facts = {
            "compiled": compiled_blocks(engine.module),
            "compilations": counters["stats"]["unique_graphs"],
            "notes": notes,
        }
        return trained


def _release() -> None:
    """Free what the case before left, and forget what was compiled for it."""
    gc.collect()
    torch._dynamo.reset()
    counters.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compiled_blocks(model: nn.Module) -> int:
    """Return how many blocks compute by a compiled function; 0 after a compilation failed."""
    shared = [
        getattr(getattr(vars(module).get("forward"), "__func__", None), "of_blocks", None)
        for module in model.modules()
    ]
    return sum(bool(each is not None and each._compiled) for each in shared)


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float | None:
    """Return the largest relative difference of all steps; None if no value is finite."""
    pairs = zip(found, expected[: len(found)], strict=True)
    return max((abs(a - b) / abs(b) for a, b in pairs if math.isfinite(a)), default=None)


def reference_of(curve: Curve, size: str) -> dict[str, Any]:
    """Return losses, norms and the checksum of the inputs as --write-reference found them."""
    found: dict[str, Any] = json.loads(REFERENCE.read_text())["curves"][size][curve.name]
    return found


def judge(trained: Trained, reference: dict[str, Any], precision: str, split: str) -> dict[str, Any]:
    """Compare a curve with its reference.

    Raises:
        ValueError: the reference was computed from other rows or first weights.
    """
    if trained.inputs != reference["inputs"]:
        raise ValueError(
            f"rows and first weights have checksum {trained.inputs}, expected {reference['inputs']} as in "
            f"{REFERENCE.name}: write it again with --write-reference"
        )
    nonfinite = sum(not math.isfinite(value) for value in (*trained.losses, *trained.norms))
    differences = (
        largest_difference(trained.losses, reference["losses"]),
        largest_difference(trained.norms, reference["norms"]),
    )
    allowed = BANDS[precision, "plain" if split == "plain" else "zero"]
    within = [d is not None and d <= most for d, most in zip(differences, allowed, strict=True)]
    return {
        "largest_loss_difference": differences[0],
        "largest_norm_difference": differences[1],
        "allowed": list(allowed),
        "holds": nonfinite == 0 and all(within),
        "nan": nonfinite,
    }


def run_case(job: Job, curve: Curve, split: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one case and return its record, also where it fails."""
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
    except Exception as error:  # the other cases still tell something
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        record |= {"holds": False, "failed": f"{type(error).__name__}: {lines[0]}"}
    return {**record, "seconds": round(time.perf_counter() - start, 1)}


def write_reference(job: Job) -> None:
    """Compute every curve in fp32 on the CPU, without a split or compilation, and write REFERENCE."""
    curves: dict[str, dict[str, Any]] = {}
    for size in SIZES:
        for name, curve in CURVES.items():
            found = train(job, curve, "plain", "fp32", size=size, compiled="false")
            print(f"{size} {name}: loss {found.losses[0]:.4f} to {found.losses[-1]:.4f}", flush=True)
            values = {"inputs": found.inputs, "losses": found.losses, "norms": found.norms}
            curves.setdefault(size, {})[name] = values
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    REFERENCE.write_text(json.dumps({**versions, "curves": curves}, indent=1) + "\n")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, help="append each case's record to this file of JSON lines as soon as it ends")
    add("--precision", choices=["fp32", "bf16"], default="bf16")
    add("--cases", nargs="+", choices=list(CURVES), default=list(CURVES), metavar="NAME", help="of these")
    add("--tiny", action="store_true", help="smaller models, with a reference of their own")
    add("--write-reference", action="store_true", help=f"compute {REFERENCE.name} on this CPU")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
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
        for split in SPLITS:  # plain first: where time is short, each model has had its turn
            for name in arguments.cases:
                record = run_case(job, CURVES[name], split, arguments)
                append_line(arguments.output, record)
                print(summary_line(record), flush=True)
                records.append(record)
    except KeyboardInterrupt:
        print("interrupted: the cases that follow were not trained", file=sys.stderr)
    finally:
        job.close()
    held = sum(record["holds"] for record in records)
    wanted = len(arguments.cases) * len(SPLITS)
    print(f"{held} of {wanted} curves hold")
    return 0 if held == wanted else 1


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
