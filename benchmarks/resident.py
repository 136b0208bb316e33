"""Runs small trainings on a CPU and holds the most that their processes had in memory to what was expected.

Each is launch/train.py on Python's standard library: four steps, a checkpoint written beside them. What it
expected and what it took is the event `plan` of its metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
NO_DROPOUT = "model.extra.resid_pdrop=0.0 model.extra.embd_pdrop=0.0 model.extra.attn_pdrop=0.0"
GROUPED = "model.num_key_value_heads=4"
FAMILIES = {
    "llama": f"model.architecture=llama {GROUPED}",
    "mistral": f"model.architecture=mistral {GROUPED}",
    "gpt2": f"model.architecture=gpt2 {NO_DROPOUT}",
    "qwen2": f"model.architecture=qwen2 {GROUPED}",
    "qwen3": f"model.architecture=qwen3 {GROUPED}",
    "olmo2": "model.architecture=olmo2",
    "phi3": "model.architecture=phi3 model.extra.pad_token_id=0",
}
WHOLE = "data.separate_documents=false"
FULL, SOME = "model.activation_checkpointing=full", "model.activation_checkpointing=selective"
BF16, FP32 = "ds.bf16.enabled=true", "ds.bf16.enabled=false"
# Family, layers, hidden, intermediate, rows, length, split, words. None has set a constant of the planner.
RUNS = (
    ("llama", 5, 320, 864, 8, 320, "single", FP32),
    ("llama", 10, 256, 512, 8, 384, "single", f"{FP32} {FULL}"),
    ("llama", 3, 640, 1728, 6, 256, "single", f"{FP32} {WHOLE}"),
    ("llama", 6, 256, 688, 24, 192, "single", f"{FP32} {SOME}"),
    ("llama", 4, 384, 1024, 4, 320, "zero2", FP32),
    ("mistral", 7, 320, 896, 10, 256, "single", f"{FP32} {WHOLE}"),
    ("gpt2", 6, 320, 1280, 8, 320, "single", FP32),
    ("gpt2", 4, 512, 2048, 8, 192, "single", f"{FP32} {FULL} {WHOLE}"),
    ("gpt2", 5, 256, 1024, 6, 256, "zero3", FP32),
    ("qwen2", 8, 320, 864, 6, 384, "single", f"{FP32} {FULL}"),
    ("qwen2", 5, 448, 1216, 8, 256, "single", f"{FP32} {WHOLE}"),
    ("qwen3", 6, 320, 864, 8, 256, "single", FP32),
    ("olmo2", 5, 384, 1024, 6, 384, "single", f"{FP32} {FULL}"),
    ("phi3", 4, 384, 1024, 8, 256, "single", FP32),
    ("llama", 4, 256, 688, 4, 256, "single", f"{BF16} adapter.kind=lora"),
    ("qwen2", 4, 320, 864, 2, 256, "single", f"{BF16} batch.gradient_accumulation_steps=3"),
)
Run = tuple[str, int, int, int, int, int, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", help="of the runs, by number, these")
    given = parser.parse_args()
    errors = []
    print("| model | rows x tokens | split | words | expected, MiB | measured | |")
    print("|---|---|---|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(RUNS):
            if given.only and number not in given.only:
                continue
            expected, measured = took(run, Path(folder) / str(number))
            errors.append(expected / measured - 1)
            name, layers, hidden, inner, rows, length, split, words = run
            row = (f"{name} {layers} x {hidden} x {inner}", f"{rows} x {length}", split, words)
            sizes = (f"{expected * 1024:,.0f}", f"{measured * 1024:,.0f}", f"{errors[-1]:+.1%}")
            print(f"| {' | '.join((*row, *sizes))} |", flush=True)
    far = sorted(map(abs, errors))
    near = f"{sum(e <= 0.05 for e in far)} of {len(far)} within 5 %"
    print(f"median {median(far):.1%}, worst {far[-1]:.1%}; {near}")


def took(run: Run, folder: Path) -> tuple[float, float]:
    """GiB expected and measured."""
    family, layers, hidden, inner, rows, length, split, words = run
    given = f"{FAMILIES[family]} model.num_layers={layers} model.hidden_size={hidden} {words}"
    given += f" model.intermediate_size={inner} model.max_sequence_length={length} max_steps=4"
    given += f" data.sequence_length={length} batch.micro_batch_size={rows} checkpoint.every=2 log.every=1"
    given += f" eval.max_samples=8 sample.max_new_tokens=1 schedule.warmup=1 run_dir={folder}"
    command = (sys.executable, "launch/train.py", "--deepspeed", f"ds_configs/{split}.json", *given.split())
    (folder.parent / "plans.jsonl").unlink(missing_ok=True)  # what was measured would correct the next
    done = subprocess.run(
        (*command, f"data.cache_dir={folder.parent}"),
        cwd=ROOT,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    event = next(row for row in map(json.loads, lines) if row.get("event") == "plan")
    return event["memory_expected_gib"], event["memory_measured_gib"]


if __name__ == "__main__":
    main()
