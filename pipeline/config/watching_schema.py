"""The recipe's sections on who else is told of a run, what is profiled and what is watched. See schema.py."""

from __future__ import annotations

import shlex
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.model_schema import IMPORT_PATH, Closed


class SinkConfig(Closed):
    """A place of your own for the rows of the run: a class by import path (docs/your-own-sink.md)."""

    kind: str = Field(pattern=IMPORT_PATH)
    """Import path `package.module:class`. It runs that code; `--no-import-paths` refuses it. The class is
    called as `class(run_dir, start_step, run_config, **args)`, in the main process alone."""
    args: dict[str, Any] = Field({})
    """Further keyword arguments of the class. They are kept in recipe.yaml: no secrets."""


class CallbackConfig(Closed):
    """Your own code at named moments of the run: a subclass of `pipeline.Callback` (docs/extending.md). An
    import path alone is short for a section with `kind`."""

    kind: str = Field(pattern=IMPORT_PATH)
    """Import path `package.module:Class`. It runs that code; `--no-import-paths` refuses it. Rank 0 calls it
    as `Class(**args)`."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the class. recipe.yaml keeps them: no secrets."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class EarlyStoppingConfig(Closed):
    """Ends the run when `eval.best_metric` no longer improves: with a checkpoint and a summary, as the last
    step does. A run in `run_dir` goes on with a higher `patience`."""

    patience: int = Field(gt=0)
    """Evaluations in a row without an improvement that end the run. The one before the first step counts."""
    min_delta: float = Field(0.0, ge=0)
    """Smallest change of the metric that counts as an improvement."""


class NotifyConfig(Closed):
    """Alerts to a command or a webhook of yours, besides the console, metrics.jsonl and W&B. Of each name at
    most one a minute; training never waits for it."""

    command: str | None = None
    """A program and its arguments, as on a command line, started without a shell for each alert, for 10 s at
    the most: the alert as JSON on its standard input, and in PIPELINE_RUN, PIPELINE_STEP, PIPELINE_EVENT,
    PIPELINE_LEVEL, PIPELINE_MESSAGE and PIPELINE_ADVICE. `--no-import-paths` refuses it. No secrets in it:
    recipe.yaml keeps it."""
    webhook_env: str | None = None
    """Name of the environment variable that holds the address (`PIPELINE_WEBHOOK` reaches the nodes of
    multi_node.sh by itself): each alert is posted there as JSON, with the keys that Slack, Mattermost and
    Discord read. The address itself is written nowhere."""
    level: Literal["info", "warning", "error"] = "warning"
    """What is told: this and what is worse. A run that fails is an `error`."""

    @field_validator("command")
    @classmethod
    def _can_be_split(cls, command: str | None) -> str | None:
        try:
            words = shlex.split(command or "none")
        except ValueError as error:
            raise ValueError(f"cannot be split into words ({error}), given {command!r}") from None
        if not words:
            raise ValueError("is empty; name a program, or leave it out")
        return command

    @field_validator("webhook_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not (name.isascii() and name.isidentifier()):
            # What was given is not repeated: it may be the address.
            raise ValueError(
                "is no name of an environment variable; put the address into one (export "
                "PIPELINE_WEBHOOK=...) and write its name here: webhook_env: PIPELINE_WEBHOOK"
            )
        return name


class ProfileConfig(Closed):
    """torch's profiler on some steps of the main rank, what DeepSpeed counts of the step behind them, and,
    from the start on, what a GPU's memory holds when it runs out: to `profile/` of the run (docs/how-to.md).
    Those steps are slower."""

    start_step: int | None = Field(None, gt=0, le=10**12)
    """The first step that is profiled; the one before it warms the profiler up. Default: nothing is profiled,
    at no cost."""
    num_steps: int = Field(3, gt=0, le=1000)
    """How many. A step of a large model is up to hundreds of MB of trace."""


class WatchConfig(Closed):
    """What is told of a run that goes wrong, and what is done about it: docs/alerts.md. Each case is an event
    in metrics.jsonl."""

    alerts: bool = True
    """Tell of spikes, a loss that rises from the start on, steps without a finite gradient, slow steps and
    ranks, missing data, growing memory, evaluation that leaves training, and parameters that never move."""
    on_nonfinite: Literal["log", "skip", "rollback", "stop"] = "log"
    """A step whose gradient is infinite or NaN: it changes no parameter, whatever stands here. `log`: it
    counts as a step. `skip`: it does not, so that all that follows is as if the data had never held its
    samples. `rollback`: back to the newest checkpoint before it, and on without its samples. `stop`: the run
    ends. In fp16 such a step of a finite loss finds the loss scale while that can fall, and counts; `skip` is
    of all others, and `rollback` and `stop` are refused."""
    on_spike: Literal["log", "skip", "rollback", "stop"] = "log"
    """The same of a step whose loss or gradient norm lies far above those of the steps before it. `skip`:
    it changes nothing; each step then waits for the device."""
    on_corruption: Literal["log", "stop", "leave"] = "stop"
    """Ranks that hold the same weights do not have the same bits. `stop`: the run ends without a further
    checkpoint, with exit code 14, and those that may hold what is wrong are set aside: started again, it goes
    on from one that all ranks agreed on. `leave`: so it does without the machine of the rank that differs,
    under `launch/torchrun.sh --nnodes MIN:MAX`; where that cannot be, as `stop`."""
    compare_every: int = Field(25, ge=0)
    """Steps between two comparisons of replicas: under `ddp` and ZeRO 0 weights, reduced gradients and
    optimizer state, at ZeRO 1 and 2 the weights of all steps since the last one. 0: none."""
    rollback_steps: int = Field(8, gt=0, le=10**6)
    """Steps up to the bad one whose samples a rollback leaves out. It goes back to a checkpoint before
    them."""
