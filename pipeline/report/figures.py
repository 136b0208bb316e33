"""Curves as PNG and SVG, for papers: what the page draws, by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.report.page import Panel, panels_of
from pipeline.report.record import HOURS, STEP, TOKENS, VALUE
from pipeline.report.runs import RunView

COLUMNS = {"step": STEP, "tokens": TOKENS, "hours": HOURS}


def draw_figures(runs: Sequence[RunView], folder: Path, x: str = "step") -> list[Path]:
    """A PNG and an SVG of each plot but those of a single further column.

    Args:
        x: step, tokens or hours.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for panel in panels_of(runs):
        if panel.title not in panel.keys:
            name = re.sub(r"\W+", "-", panel.title.lower())
            drawn += [folder / f"{name}.png", folder / f"{name}.svg"]
            _draw(runs, panel, x, drawn[-2:])
    return drawn


def _draw(runs: Sequence[RunView], panel: Panel, x: str, paths: Sequence[Path]) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9, "text.parse_math": False}):
        figure = Figure(figsize=(5.0, 3.1), layout="constrained", dpi=300)
        axes = figure.subplots()
        for number, run in enumerate(runs):
            for place, key in enumerate(panel.keys):
                if (curve := run.record.curves.get(key)) is None:
                    continue
                points = curve.points.copy()
                points[~np.isfinite(points[:, VALUE]), VALUE] = np.nan  # a gap
                axes.plot(
                    points[:, COLUMNS[x]],
                    points[:, VALUE],
                    label=f"{run.path.absolute().name} {key}" if len(runs) > 1 else key,
                    color=f"C{number if len(runs) > 1 else place}",
                    linestyle=("-", "--", ":")[place] if len(runs) > 1 else "-",
                    linewidth=1.1,
                    marker="o" if len(points) < 40 else "",
                    markersize=2.5,
                )
        axes.set_xlabel(x)
        axes.set_ylabel(f"{panel.title} ({panel.unit})" if panel.unit else panel.title)
        axes.grid(color="#dddddd", lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        if len(runs) > 1 or len(panel.keys) > 1:
            axes.legend(frameon=False, fontsize=8)
        for path in paths:
            figure.savefig(path)
