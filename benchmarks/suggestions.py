"""What `plan --suggest` finds for Llamas of three sizes on five places: the table of docs/planning.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.config.loading import get_dotted  # noqa: E402
from pipeline.config.settings import load_settings  # noqa: E402
from pipeline.planner.place import place_of  # noqa: E402
from pipeline.planner.shapes import model_of  # noqa: E402
from pipeline.planner.suggest import Suggestion, offloaded, recomputed, suggest  # noqa: E402  # noqa: E402

GIB = 2**30
SIZES = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_layers": 32, "num_heads": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_layers": 40, "num_heads": 40},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80, "num_heads": 64}
    | {"num_key_value_heads": 8},
}
PLACES = {"1 x 24": (24, 1, 1), "1 x 80": (80, 1, 1), "8 x 80": (80, 8, 1), "2 x 8 x 80": (80, 8, 2)}
PLACES["64 x 80"] = (80, 8, 8)


def main() -> None:
    print(
        "| model | GPUs x GB | split | recomputation | micro-batch | GiB a GPU | host, GiB | s a step", end=""
    )
    print(" | tokens/s |")
    print("|---|---|---|---|--:|--:|--:|--:|--:|")
    for size in SIZES:
        for where, (gib, per_node, nodes) in PLACES.items():
            found = suggested(size, gib, per_node, nodes)
            print(f"| {size} | {where} | {row(found)} |", flush=True)


def write_recipe(path: Path, size: str) -> None:
    """Rows of 4,096 tokens, 128 a step."""
    recipe = {
        "max_steps": 100,
        "model": {"kind": "causal_lm", "architecture": "llama", "vocab_size": 32000, **SIZES[size]},
        "data": {"kind": "text", "paths": ["python_stdlib"], "sequence_length": 4096},
        "batch": {"global_batch_size": 128},
    }
    path.write_text(yaml.safe_dump(recipe))


def suggested(size: str, gib: float, per_node: int, nodes: int) -> Suggestion:
    """For a Llama of this size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        write_recipe(path, size)
        settings = load_settings(path)
    known = model_of(settings.config)
    assert known is not None
    return suggest(settings, known, place_of(None, gib, per_node, nodes, None, None))


def row(suggestion: Suggestion) -> str:
    """Its cells."""
    best, found = suggestion.best, suggestion.best.found
    time, split = found.time, found.resolved.split
    assert time is not None
    words = [f"ZeRO {split.zero_stage}"]
    degrees = {
        "tensor": split.tensor_parallel,
        "stages": split.pipeline_stages,
        "sequence": split.sequence_parallel,
    }
    words += [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if (hpz := get_dotted(best.json, "zero_optimization.zero_hpz_partition_size")) is not None:
        words.append(f"hpZ {hpz}")
    words += offloaded(best.json)
    cells = (
        ", ".join(words),
        recomputed(found.config),
        f"{found.resolved.plan.micro_batch_size}",
        f"{found.peak / GIB:.1f}",
        f"{found.host_bytes / GIB:,.0f}",
        f"{time.seconds:,.1f}",
        f"{time.tokens_per_second * time.gpus:,.0f}",
    )
    return " | ".join(cells)


if __name__ == "__main__":
    main()
