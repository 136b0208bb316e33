"""The pictures of docs/: python benchmarks/figures.py benchmarks/results/cpu-2026-11-25.json ...

docs/speed.svg from results of throughput.py (one panel a model and kind of rows), docs/scaling.svg from
scaled_runs.py. The same input gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from scaled_runs import GPUS, compared, forecasts

DOCS = Path(__file__).resolve().parents[1] / "docs"
SAVED: dict[str, Any] = {"bbox_inches": "tight", "metadata": {"Date": None}}
FARTHEST = 20  # %, shown of an error
COLORS = {1: "#3b6fb6", 2: "#e08a2e", 4: "#5a9e5a"}


def main(files: list[Path]) -> int:
    plt.rcParams.update({"svg.hashsalt": "figures", "svg.fonttype": "none", "font.size": 9})
    if not files:
        print("figures.py: give files of results, such as benchmarks/results/cpu-2026-11-25.json")
        return 2
    pairs = [pair for path in files for pair in json.loads(path.read_text())["ratios"]]
    speed(pairs, DOCS / "speed.svg")
    scaling(DOCS / "scaling.svg")
    return 0


def panel_of(pair: dict[str, Any]) -> tuple[str, str]:
    """Model and kind of rows; files from before both were named measured the default model's."""
    rows = f"{pair.get('rows', 'unpacked')} rows{', adapter' * pair.get('adapter', False)}"
    return pair.get("model", "default"), rows


def speed(pairs: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second, ours over each peer: medians, with the smallest and the largest round."""
    panels = {key: list(each) for key, each in groupby(sorted(pairs, key=panel_of), panel_of)}
    peers = {key: list(dict.fromkeys(named(pair) for pair in each)) for key, each in panels.items()}
    heights = [len(names) for names in peers.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(7, 0.9 + 0.34 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, (key, found) in zip(axes[:, 0], panels.items(), strict=True):
        names, ranks = peers[key], sorted({pair["ranks"] for pair in found})
        for pair in found:
            offset = (ranks.index(pair["ranks"]) - (len(ranks) - 1) / 2) * 0.8 / len(ranks)
            around = [[pair["median"] - pair["min"]], [pair["max"] - pair["median"]]]
            place, color = names.index(named(pair)) + offset, COLORS.get(pair["ranks"], "gray")
            axis.barh(place, pair["median"], 0.75 / len(ranks), color=color, xerr=around, ecolor="#555")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_title(f"{key[0]} model, {key[1]}", loc="left")
        bars = [plt.Rectangle((0, 0), 1, 1, color=COLORS.get(count, "gray")) for count in ranks]
        labels = [f"{count} rank{'s' * (count > 1)}" for count in ranks]
        axis.legend(bars, labels, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(ranks), frameon=False)
    axes[-1, 0].set_xlabel("tokens per second, ours over theirs (1: level)")
    figure.savefig(path, **SAVED)
    plt.close(figure)


def named(pair: dict[str, Any]) -> str:
    """The peer; with the file of ours where that is not the peer's own."""
    own = pair["ours"].partition(" (")[2]
    return pair["peer"] + (f" ({own}" if own else "")


def scaling(path: Path) -> None:
    """Left: predicted efficiency by split. Right: published runs against what is predicted for them."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
    best = max(rates[0] for rates in forecasts().values())
    for name, rates in forecasts().items():
        left.plot(GPUS, [rate / best for rate in rates], marker="o", markersize=3, label=name)
    left.set_xscale("log", base=2)
    left.set_xticks(GPUS, [f"{count:,}" for count in GPUS])
    left.set_ylim(0, 1.05)
    left.set_xlabel("GPUs")
    left.set_title("Llama 3 8B on H100s: a GPU's tokens/s, predicted", loc="left")
    left.legend(fontsize=7, loc="lower left")
    runs = [each for each in compared() if not each.is_fit]
    names = [f"{each.series}: {each.job.gpus} GPUs" for each in runs]
    for place, each in enumerate(runs):
        right.barh(place, 100 * each.error, color="#3b6fb6" if each.job.tensor == 1 else "#e08a2e")
        at = min(100 * each.error, FARTHEST)
        right.annotate(f" {100 * each.error:+.1f} ", (max(at, 0), place), fontsize=7, va="center")
    right.set_yticks(range(len(names)), names, fontsize=7)
    right.invert_yaxis()
    right.set_xlim(-FARTHEST / 5, FARTHEST * 1.2)
    right.set_xlabel("predicted over published, %")
    right.set_title("published runs", loc="left")
    figure.tight_layout()
    figure.savefig(path, **SAVED)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
