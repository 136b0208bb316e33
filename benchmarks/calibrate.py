"""Fits the constants of pipeline/planner/hardware.py to published runs: `python benchmarks/calibrate.py`

Needs scipy. Least squares of the logarithm of predicted over published seconds; many runs of one source count
less each, and so do large errors; every constant is held to what it can be. `--leave-out` fits without each
source in turn (ten minutes), and says how far that one is off: what to expect of software not seen yet.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from math import exp, log

import numpy as np
from published import KERNELS, Speed, error, load, rates_for
from scipy.optimize import least_squares

from pipeline.planner.hardware import Kernels, Rates

# What a constant can be, and by which factor it may well be another one. Shares of a peak: of kernels
# alone, as their makers publish. Bytes: of the tensors that go in and out, by hand.
BELIEVED = {
    "products A100": (0.82, 1.1),
    "products H100": (0.72, 1.1),
    "attention A100": (0.45, 1.3),
    "attention H100": (0.30, 1.3),
    "attention A100, mpt": (0.3, 1.6),
    "attention H100, mpt": (0.2, 1.6),
    "attention H100, fused": (0.5, 1.3),
    "stream": (150, 1.35),
    "stream, eager": (600, 1.35),
    "stream, mpt": (300, 1.35),
    "stream, rms": (300, 1.6),
    "stream, fused": (100, 1.35),
    "entries": (30, 1.6),
    "launch": (1e-3, 2),
    "replicated": (0.4, 1.6),
    "waiting": (1.5, 1.35),
    "waiting, fused": (0.2, 1.6),
    "disturbance": (0.6, 1.15),
    "straggling": (0.01, 2.7),
}
Constants = dict[str, float]


def kernels_of(c: Constants) -> dict[str, Kernels]:
    """Every software's, with these constants."""
    compiled = replace(
        KERNELS["compiled"],
        products=(c["products A100"], c["products H100"]),
        attention=(c["attention A100"], c["attention H100"]),
        stream=c["stream"],
        entries=c["entries"],
        launch=c["launch"],
        replicated=c["replicated"],
        waiting=c["waiting"],
    )
    eager = replace(compiled, stream=c["stream, eager"], floor=KERNELS["eager"].floor)
    attention = (c["attention A100, mpt"], c["attention H100, mpt"])
    of_fused = (c["attention A100"], c["attention H100, fused"])
    return {
        "compiled": compiled,
        "eager": eager,
        "mpt": replace(eager, attention=attention, stream=c["stream, mpt"]),
        "megatron": eager,
        "megatron-rms": replace(eager, stream=c["stream, rms"]),
        "fused": replace(
            compiled, attention=of_fused, stream=c["stream, fused"], waiting=c["waiting, fused"]
        ),
    }


def rates_with(speed: Speed, kernels: dict[str, Kernels], c: Constants) -> Rates:
    return replace(
        rates_for(speed, kernels), disturbance=min(1.0, c["disturbance"]), straggling=c["straggling"]
    )


def fit(speeds: list[Speed]) -> Constants:
    """The constants that these runs and what is believed of them agree on."""
    runs = Counter(speed.group for speed in speeds)
    weights = np.array([3 / runs[speed.group] ** 0.25 / 0.05 for speed in speeds])
    centres = np.log([value for value, _ in BELIEVED.values()])
    spread = np.log([factor for _, factor in BELIEVED.values()])

    def residuals(logs: np.ndarray) -> np.ndarray:
        c = dict(zip(BELIEVED, np.exp(logs), strict=True))
        kernels = kernels_of(c)
        errors = weights * [log(1 + error(s, rates_with(s, kernels, c))) for s in speeds]
        huber = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([huber, (logs - centres) / spread])

    found = least_squares(residuals, centres, max_nfev=40)
    return {name: exp(value) for name, value in zip(BELIEVED, found.x, strict=True)}


def leave_out(speeds: list[Speed]) -> None:
    """Prints each source's errors under the constants that the others lead to."""
    for source in dict.fromkeys(speed.source for speed in speeds):
        c = fit([speed for speed in speeds if speed.source != source])
        kernels = kernels_of(c)
        errors = [error(s, rates_with(s, kernels, c)) for s in speeds if s.source == source]
        print(f"{source:16} {len(errors):4} runs: mean error {np.mean(np.abs(errors)):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--leave-out", action="store_true", help="each source in turn, of all runs")
    arguments = parser.parse_args()
    # Qwen's are of so few tokens that the host sets the pace: HOOKS and EAGER.floor are read off them.
    whole = [speed for speed in load() if speed.job.weight_gradients and speed.source != "Qwen"]
    if arguments.leave_out:
        leave_out(whole)
        return
    for name, value in fit([speed for speed in whole if speed.use == "fit"]).items():
        print(f"{name:24} {value:.3g}")


if __name__ == "__main__":
    main()
