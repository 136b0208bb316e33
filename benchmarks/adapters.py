"""What the shipped LoRA recipe reaches: python benchmarks/adapters.py --output benchmarks/results/FILE.jsonl

Trains launch/recipes/sft.yaml, and from it lora.yaml as it is, with all weights at several rates, and over a
grid of rate x rank. The exit code says whether the recipe as it is has less than 0.98 of what training all
weights gains in evaluation loss, or a loss over 1 % above the best of the grid.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from report import append_line, machine

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "launch" / "recipes"
FULL_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
RATES, RANKS = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), (8, 16, 32, 64)
LEAST_GAIN, MOST_ABOVE = 0.98, 1.01


def run(folder: Path, name: str, *words: str) -> None:
    """A script in the folder, on one core.

    Raises:
        SystemExit: it failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")


def losses(folder: Path, recipe: str, name: str, *changes: str) -> list[float]:
    """Evaluation losses of a recipe, the first and the last among them."""
    train = [str(ROOT / "launch" / "train.py"), "--config", str(RECIPES / f"{recipe}.yaml")]
    run(folder, name, *train, f"run_dir=runs/{name}", "wandb.mode=disabled", *changes)
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row["eval/loss"] for row in map(json.loads, rows) if "eval/loss" in row]


def main() -> int:
    """Measures, prints, and holds the result to what is claimed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSONL file to write to")
    arguments = parser.parse_args()
    append_line(arguments.output, {"machine": machine(), "command": sys.argv[1:]})
    asked: dict[str, list[str]] = {"as it is": []}
    for rate in FULL_RATES:
        asked[f"all weights, rate {rate:g}"] = ["adapter=null", f"optimizer.learning_rate={rate}"]
    for rate in RATES:
        for rank in RANKS:
            changes = [f"optimizer.learning_rate={rate}", f"adapter.rank={rank}"]
            asked[f"rank {rank}, rate {rate:g}"] = changes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder, "data", str(RECIPES / "make_data.py"), "data")
        losses(folder, "sft", "sft")

        def measured(item: tuple[str, list[str]]) -> tuple[str, list[float]]:
            title, changes = item
            found = losses(folder, "lora", title.replace(" ", "-"), *changes)
            print(f"{title:<28} {found[0]:.4f} -> {found[-1]:.4f}", flush=True)
            append_line(arguments.output, {"run": title, "eval_losses": found})
            return title, found

        first = measured(next(iter(asked.items())))  # prepares the data for all
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = dict([first, *pool.map(measured, list(asked.items())[1:])])
    own = found["as it is"]
    best_full = min(its[-1] for title, its in found.items() if title.startswith("all"))
    best = min(its[-1] for title, its in found.items() if not title.startswith("all"))
    gain, above = (own[0] - own[-1]) / (own[0] - best_full), own[-1] / best
    print(f"share of the gain of all weights: {gain:.3f} (at least {LEAST_GAIN})")
    print(f"loss to the best of the grid:     {above:.4f} (at most {MOST_ABOVE})")
    append_line(arguments.output, {"share_of_gain": gain, "to_best_of_grid": above})
    return int(gain < LEAST_GAIN or above > MOST_ABOVE)


if __name__ == "__main__":
    sys.exit(main())
