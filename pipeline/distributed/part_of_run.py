"""Which part of a run a stack of frames is in, by the functions on the way: a step costs nothing for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from traceback import FrameSummary


class Part(StrEnum):
    """As it is told."""

    EVALUATION = "in an evaluation"
    GENERATION = "while text is generated"
    SAVING = "in a save"
    RESUMING = "while a checkpoint is read"
    BACKWARD = "in the backward"
    STEP = "in the optimizer's step"
    FORWARD = "in the forward"
    WEIGHTS = "while weights are read"
    OPTIMIZER = "while the optimizer is made"
    MODEL = "while the model is built"
    DATA = "while data are read"


LOADING = {Part.RESUMING, Part.WEIGHTS, Part.OPTIMIZER, Part.MODEL, Part.DATA}
"""Before there is anything of a batch on the device."""
_ROOT = str(Path(__file__).parents[2]) + "/"
# FILE:FUNCTION of a frame; the first rule that fits any frame. What is recomputed stands below a backward,
# and a forward is what else a step does.
_RULES = {
    Part.EVALUATION: r"^pipeline/(evaluation\.py:evaluate$|engine/\w+\.py:eval_step$)",
    Part.GENERATION: r"^pipeline/(sampling|models/generation)\.py|^pipeline/engine/\w+\.py:generate$",
    Part.SAVING: r"^pipeline/checkpoint/saving\.py",
    Part.RESUMING: r"^pipeline/(engine/\w+|checkpoint/store)\.py:restore$",
    Part.BACKWARD: r"torch/(_tensor|autograd/__init__)\.py:backward$|deepspeed/\S*:\w*backward\w*$",
    Part.STEP: r"torch/optim/\S*:step$|deepspeed/\S*:(step|_exec_optimizer_step)$|^pipeline/engine/guard\.py",
    Part.FORWARD: r"^pipeline/engine/\w+\.py:train_step$",
    Part.WEIGHTS: r"^pipeline/(models/(weight\w+|tensorwise)|checkpoint/\w+)\.py|:from_pretrained$",
    Part.OPTIMIZER: r"^pipeline/optim\.py|deepspeed/__init__\.py:initialize$",
    Part.MODEL: r"^pipeline/(models/|build_engine\.py)",
    Part.DATA: r"^pipeline/(data/|joining\.py)",
}


def part_of_run(frames: Sequence[FrameSummary]) -> Part | None:
    """None: none that has a name."""
    labels = [f"{frame.filename.removeprefix(_ROOT)}:{frame.name}" for frame in frames]
    for part, rule in _RULES.items():
        if any(re.search(rule, label) for label in labels):
            return part
    return None
