"""Draws docs/images/one-curve.svg: one recipe trained under eight splits: `python docs/draw_one_curve.py`.

tests/parity/ holds the same in every precision; this picture is of one small run in fp32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).with_name("images") / "one-curve.svg"
STEPS = 60
ARGUMENTS = [
    f"max_steps={STEPS}",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.hidden_size=64",
    "model.intermediate_size=172",
    "data.sequence_length=128",
    "data.tokenizer.vocab_size=1024",
    "batch={micro_batch_size: 4, global_batch_size: 16}",
    "schedule.warmup=5",
    "eval.every=1000",
    "eval.max_samples=8",
    "log.every=1",
    "sample.max_new_tokens=0",
    "wandb.mode=disabled",
    "checkpoint.every=1000",
    "ds.bf16.enabled=false",
    "ds.fp16.enabled=false",
]
SPLITS = {  # label -> file of ds_configs/ and marker
    "one process, plain PyTorch": ("single", ""),
    "DDP": ("torch_ddp", "o"),
    "ZeRO 1": ("zero1", "s"),
    "ZeRO 2": ("zero2", "^"),
    "ZeRO 3": ("zero3", "v"),
    "ZeRO 3, offloaded": ("zero3_offload", "D"),
    "tensor parallel": ("tensor2", "P"),
    "pipeline stages": ("pipeline2", "X"),
    "sequence parallel": ("sequence2", "*"),
}


def train(split: str, directory: Path) -> list[float]:
    """Return the loss of each step of a run on two ranks, or on one under the split `single`."""
    launcher = (
        [] if split == "single" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    )
    command = [sys.executable, *launcher, str(ROOT / "launch" / "train.py"), "--quiet", "--deepspeed", split]
    subprocess.run(
        [*command, *ARGUMENTS, f"run_dir={directory}"],
        cwd=directory.parent,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=True,
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def draw(losses: dict[str, list[float]]) -> None:
    """Draw the curves, and below them their relative differences from that of one process."""
    plt.rcParams |= {"svg.hashsalt": "one-curve", "font.size": 10}
    figure, (curve, difference) = plt.subplots(
        2, 1, figsize=(8, 5.2), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, STEPS + 1)
    reference, *others = losses
    curve.plot(steps, losses[reference], color="0.6", linewidth=3, label=reference)
    for number, label in enumerate(others):
        # Markers of the splits stand at different steps, since all curves lie on each other.
        style = {"marker": SPLITS[label][1], "markersize": 6, "color": f"C{number}"}
        curve.plot(steps, losses[label], linewidth=0.6, markevery=(number, len(others)), label=label, **style)
        relative = [abs(a / b - 1) for a, b in zip(losses[label], losses[reference], strict=True)]
        difference.plot(steps, relative, linestyle="none", **style | {"markersize": 3})
    curve.set(ylabel="training loss")
    curve.legend(ncols=2, frameon=False)
    difference.set(xlabel="step", ylabel="relative\ndifference", yscale="log", ylim=(1e-8, 1e-5))
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Train under every split, and draw the curves."""
    with tempfile.TemporaryDirectory() as folder:
        losses = {label: train(split, Path(folder) / split) for label, (split, _) in SPLITS.items()}
    draw(losses)
    reference = losses[next(iter(SPLITS))]
    largest = max(abs(a / b - 1) for curve in losses.values() for a, b in zip(curve, reference, strict=True))
    print(f"{PICTURE.relative_to(ROOT)}: largest relative difference of a loss {largest:.1e}")


if __name__ == "__main__":
    main()
