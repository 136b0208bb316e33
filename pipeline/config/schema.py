"""The recipe: every field a user may set, with its unit and range. Closed: an unknown key is an error.

The text under a field is its documentation; docs/configuration.md is generated from it.
"""

from __future__ import annotations

import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from pipeline.config.data_schema import DataConfig, DocumentsConfig
from pipeline.config.interval import Every, StepsOrEpochs
from pipeline.config.model_schema import IMPORT_PATH, AdapterConfig, ModelConfig, RecipeSection
from pipeline.config.objective_schema import AutoObjectiveConfig, ObjectiveConfig
from pipeline.config.optimizer_schema import OptimizerConfig, ScheduleConfig


class TrackerConfig(RecipeSection):
    """A place of your own for the rows of the run: a class by import path (docs/your-own-tracker.md)."""

    kind: str = Field(pattern=IMPORT_PATH)
    """Import path `package.module:class`. It runs that code; `--no-import-paths` refuses it. The class is
    called as `class(run_dir, start_step, run_config, **args)`, in the main process alone."""
    args: dict[str, Any] = Field({})
    """Further keyword arguments of the class. They are kept in recipe.yaml: no secrets."""


class CallbackConfig(RecipeSection):
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


class EarlyStoppingConfig(RecipeSection):
    """Ends the run when `eval.best_metric` no longer improves: with a checkpoint and a summary, as the last
    step does. A run in `run_dir` goes on with a higher `patience`."""

    patience: int = Field(gt=0)
    """Evaluations in a row without an improvement that end the run. The one before the first step counts."""
    min_delta: float = Field(0.0, ge=0)
    """Smallest change of the metric that counts as an improvement."""


class NotifyConfig(RecipeSection):
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


class ProfileConfig(RecipeSection):
    """torch's profiler on some steps of the main rank, and, from the start on, what a GPU's memory holds when
    it runs out: to `profile/` of the run (docs/how-to.md). Those steps are slower."""

    start_step: int | None = Field(None, gt=0, le=10**12)
    """The first step that is profiled; the one before it warms the profiler up. Default: nothing is profiled,
    at no cost."""
    num_steps: int = Field(3, gt=0, le=1000)
    """How many. A step of a large model is up to hundreds of MB of trace."""


class WatchConfig(RecipeSection):
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
    on_corruption: Literal["log", "stop"] = "stop"
    """Ranks that hold the same weights do not have the same bits. `stop`: the run ends without a further
    checkpoint, with exit code 14, and those that may hold what is wrong are set aside: started again, it goes
    on from one that all ranks agreed on."""
    compare_every: int = Field(25, ge=0)
    """Steps between two comparisons of replicas: under `ddp` and ZeRO 0 weights, reduced gradients and
    optimizer state, at ZeRO 1 and 2 the weights of all steps since the last one. 0: none."""
    rollback_steps: int = Field(8, gt=0, le=10**6)
    """Steps up to the bad one whose samples a rollback leaves out. It goes back to a checkpoint before
    them."""


LogLevel = Literal["debug", "info", "warning", "error"]
RUN_NAME = r"^[\w.-]+$"
MAX_MICRO_BATCH_SIZE = MAX_ACCUMULATION_STEPS = 2**24
MAX_GLOBAL_BATCH_SIZE = 2**40
BEST_MODES = {"loss": "min", "perplexity": "min", "accuracy": "max"}
"""Which value of a metric is the best, by the last part of its name."""


Position = Annotated[int, Field(ge=0, le=2**62)]


class LoaderConfig(RecipeSection):
    """How samples reach the device."""

    num_workers: int = Field(0, ge=0, le=1024)
    """Worker processes that fetch ahead. 0 fetches in the training process: right for tokenised text,
    which is read from memory; images that must be decoded want a few."""
    leave_out: list[tuple[Position, Position]] = Field([])
    """Stretches of the run's order that no step takes, `[first, last)` each, counted as `train/samples_seen`
    counts: what an alert named. The steps before and after them stay the same."""

    @field_validator("leave_out", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        if isinstance(value, list):  # YAML and JSON have no tuples
            return [tuple(pair) if isinstance(pair, list) else pair for pair in value]
        return value

    @field_validator("leave_out")
    @classmethod
    def _in_order(cls, value: list[tuple[int, int]]) -> list[tuple[int, int]]:
        for first, last in value:
            if first >= last:
                raise ValueError(f"[{first}, {last}] is empty: expected [first, last) with first < last")
        return value


class BatchConfig(RecipeSection):
    """Any two of the three numbers; the third follows for the world size of the run. Without this section:
    `micro_batch_size: 8`."""

    micro_batch_size: Annotated[int, Field(gt=0, le=MAX_MICRO_BATCH_SIZE)] | Literal["auto"] | None = None
    """Samples one rank takes through the model at once. `auto`, beside `global_batch_size`: the largest that
    fits, found at the start by steps that do not count. The global batch, and so the curve, stays."""
    gradient_accumulation_steps: int | None = Field(None, gt=0, le=MAX_ACCUMULATION_STEPS)
    """Micro-batches a rank adds up before the optimizer steps. Default where nothing else decides it: 1."""
    global_batch_size: int | None = Field(None, gt=0, le=MAX_GLOBAL_BATCH_SIZE)
    """Samples an optimizer step sees: micro x accumulation x data-parallel size."""

    @field_validator("micro_batch_size", mode="wrap")
    @classmethod
    def _number_or_auto(cls, value: Any, validated: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, float) and value.is_integer():  # 1e1
            value = int(value)
        try:
            return validated(value)
        except ValidationError as error:  # one line for the two that it might be
            message = error.errors()[0]["msg"]
            raise ValueError(f"{message[0].lower()}{message[1:]}, or auto; given {value!r}") from None


class EngineConfig(RecipeSection):
    """Plain PyTorch. A split file says the same in its `torch` section; with a DeepSpeed JSON this must be
    absent."""

    parallel: Literal["auto", "single", "dp", "ddp"] = "auto"
    """`single`: one process, one device. `dp`: nn.DataParallel, one process and all visible GPUs. `ddp`:
    DistributedDataParallel, one process a device. `auto`: `ddp` where a launcher started several ranks."""
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """`bf16` computes under autocast; parameters stay in fp32. `auto`: bf16 where that is faster."""
    tf32: bool = False
    """Let a GPU multiply fp32 matrices in TF32 (10 bits of mantissa): faster, and no longer fp32's digits."""
    compile: bool | Literal["auto"] = "auto"
    """Have torch.compile fuse what a model's repeated blocks do, and the loss of logits where a model needs
    them: a minute at the start, then faster steps. `auto`: on a GPU, but for `dp`."""
    bucket_cap_mb: float = Field(25.0, gt=0, le=2**20)
    """MiB of gradients `ddp` sends at once."""
    find_unused_parameters: bool = False
    """`ddp`: look each step for parameters that took no part. Without it they are an
    error that names them."""


class LogConfig(RecipeSection):
    """When and where the numbers of the run are written."""

    every: Every = 1
    """Steps (`10`, `10 steps`) or epochs (`0.25`, `2 epochs`) between two rows of metrics.jsonl."""
    console: LogLevel = "info"
    """What the console shows; on the command line `--log-level`, or `--quiet` for `warning`. Above `info` it
    shows neither rows nor evaluations. The run's files have all from `info` on."""
    tensorboard: bool = False
    """Also write TensorBoard event files (needs the `tensorboard` extra)."""
    trackers: list[TrackerConfig] = Field([])
    """Further places by import path, as MLflow. One that fails or blocks is dropped with a line."""
    price_per_device_hour: float | None = Field(None, ge=0)
    """What a GPU costs an hour (on a CPU: a rank), in any currency: rows then have `perf/cost`, of the whole
    run so far."""

    @field_validator("every")
    @classmethod
    def _is_due(cls, value: int | float | str) -> int | float | str:
        if not StepsOrEpochs.parse(value).number:
            raise ValueError(f"expected a number above 0, given {value!r}")
        return value

    @property
    def shows_rows(self) -> bool:
        """Whether the console has more than warnings."""
        return self.console in ("debug", "info")


class WandbConfig(RecipeSection):
    """Weights & Biases. Rank 0 of the job logs; nobody else opens a run. Where a key is left out, W&B's own
    variable is used; one that the recipe overrides is named in one line."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: as `WANDB_MODE` says; without it online where there is an API key, offline otherwise."""
    project: str | None = None
    """Project the run is filed under. Default: `WANDB_PROJECT`, else `deepspeed-pipeline`."""
    entity: str | None = None
    """User or team. Default: `WANDB_ENTITY`, else the key's own."""
    group: str | None = None
    """Group of runs shown together. Default: `WANDB_RUN_GROUP`, else the run's name."""
    tags: list[str] = Field([])
    """Labels of the run. Default: `WANDB_TAGS`, with commas between them."""
    notes: str | None = None
    """What to know about the run, in a few sentences. Default: `WANDB_NOTES`."""
    job_type: str | None = None
    """Kind of run within its group, as `train`. Default: `WANDB_JOB_TYPE`."""
    x_axis: Literal["global_step", "tokens_seen"] = "global_step"
    """What curves are drawn over. `tokens_seen`: of language models."""
    checkpoints: bool = False
    """Log each checkpoint as an artifact that says where its files lie; none of them is uploaded."""
    histograms_every: int = Field(0, ge=0)
    """Steps between histograms of each parameter and its gradient; 0: none. A multiple of `log.every`."""


class EvalConfig(RecipeSection):
    """Evaluation on the held-out split: the exact mean over its tokens, the same on any number of ranks."""

    every: Every = 0
    """Steps (`500`, `500 steps`) or epochs (`0.25`, `2 epochs`) between evaluations, rounded to whole steps;
    0: only before the first and after the last step."""
    max_samples: int | None = Field(None, gt=0)
    """Samples at the most, the first ones of the split. Default: the whole split."""
    best_metric: str = Field("loss", min_length=1)
    """Metric that decides which evaluation is the best, by its name without `eval/`: `loss`, `perplexity`,
    `accuracy`, `NAME/loss` of one data set, or a metric of your own objective."""
    best_mode: Literal["min", "max"] | None = None
    """Whether the lowest or the highest `best_metric` is the best. Default: `min` for a loss and a
    perplexity, `max` for an accuracy; other metrics need it."""

    @property
    def best_is_lowest(self) -> bool:
        """Whether the lowest value of `best_metric` is the best."""
        return (self.best_mode or BEST_MODES.get(self.best_metric.rpartition("/")[2])) == "min"

    @model_validator(mode="after")
    def _has_best_mode(self) -> EvalConfig:
        name = self.best_metric.rpartition("/")[2]
        if self.best_mode is None and name not in BEST_MODES:
            near = get_close_matches(name, BEST_MODES, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise ValueError(f"best_metric is {self.best_metric}{hint}: write best_mode too, min or max")
        return self


class CheckpointConfig(RecipeSection):
    """When a checkpoint is written and how many stay."""

    every: Every = 0
    """Steps (`500`, `500 steps`) or epochs (`0.25`, `2 epochs`) between checkpoints, rounded to whole steps;
    0: only at the end and when told to stop."""
    every_minutes: float = Field(0, ge=0)
    """Minutes between checkpoints, by rank 0's clock, besides those of `every`; 0: none."""
    grace_seconds: float | None = Field(None, gt=0)
    """Seconds between a signal to stop (SIGTERM, SIGUSR1, Ctrl-C) and the kill, as the scheduler has it: a
    last checkpoint that would take longer is not begun. Default: it is always begun."""
    keep_last: int = Field(2, gt=0)
    """Newest checkpoints that stay on disk."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints of steps that are a multiple of it stay for ever; 0: none."""
    keep_best: bool = False
    """Keep the checkpoint with the best `eval.best_metric` as well. `every` is a multiple of `eval.every`."""
    resume: Literal["auto", "never", "required"] = "auto"
    """`auto`: go on with the newest unfinished run of this recipe, if any, however its work was split.
    `never`: start a new run. `required`: an error where there is nothing to go on with."""


class SampleConfig(RecipeSection):
    """Text the trained language model writes at the end of the run."""

    prompt: str | None = None
    """Text that the model continues; a question in the chat template, where `data.kind` is `chat` or
    `preference`. Default: `def `; with those kinds the first held-out prompt."""
    max_new_tokens: int = Field(48, ge=0, le=2**20)
    """Tokens it writes; 0: none."""
    every_eval: bool = False
    """Also after each evaluation: an event `sample` in metrics.jsonl, a table in Weights & Biases. The curve
    stays the same."""


class DistributedConfig(RecipeSection):
    """Several ranks: how long they wait for each other, and what is said of one that hangs, is lost or is
    slow."""

    timeout_seconds: float = Field(1800, gt=0, le=10**7)
    """Seconds that a collective waits for the other ranks, in every process group. Also the watchdog's limit
    while a run starts, resumes, saves or ends, and for its first step, which may compile."""
    hang_seconds: float | None = Field(None, gt=0, le=10**7)
    """Seconds without a step after which the watchdog writes down where every rank stands, names those that
    are behind, and ends the job with code 124. Default: ten times the recent median step, at least 60."""
    straggler_share: float = Field(0.15, gt=0)
    """A rank whose own part of a step (reading data, computing) takes longer by this share than the median
    rank's, or a pipeline stage's than before, is named, with what takes it longer."""
    bind_cores: bool | None = None
    """Bind each rank to its share of the cores that it may use, those next to its GPU first. Default: where
    several ranks may use the same ones, and neither the launcher nor OMP_PROC_BIND or the like bound them."""


class RunConfig(RecipeSection):
    """A whole run. How the work is split, and the precision, stand in the DeepSpeed JSON instead."""

    name: str = Field("run", pattern=RUN_NAME, max_length=128)
    """Name of the run; its directory is `<runs_dir>/<name>-<time>`."""
    runs_dir: str = "runs"
    """Where run directories are made."""
    run_dir: str | None = None
    """One fixed directory for this run instead (made if missing). A run in it goes on, also a finished one
    with a higher `max_steps`, another `optimizer` or `schedule`."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Fixes initial weights, data order and dropout."""
    max_steps: int | None = Field(None, gt=0, le=10**12)
    """Optimizer steps of the run. Exactly one of this and `max_epochs`; the one on the command line takes the
    place of the other in the recipe."""
    max_epochs: float | None = Field(None, gt=0, le=1e9)
    """Passes over the training data."""
    model: ModelConfig
    adapter: AdapterConfig | None = None
    """Train low-rank adapters in place of the model's own weights: `lora`, or a section."""
    data: DataConfig
    loader: LoaderConfig = LoaderConfig()
    objective: ObjectiveConfig = AutoObjectiveConfig()
    batch: BatchConfig = BatchConfig(micro_batch_size=8)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    engine: EngineConfig = EngineConfig()
    log: LogConfig = LogConfig()
    wandb: WandbConfig = WandbConfig()
    watch: WatchConfig = WatchConfig()
    notify: NotifyConfig = NotifyConfig()
    eval: EvalConfig = EvalConfig()
    early_stopping: EarlyStoppingConfig | None = None
    callbacks: list[CallbackConfig] = Field([])
    """Your own code at named moments of the run, by import path: it can alert, evaluate, save and stop."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    distributed: DistributedConfig = DistributedConfig()
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="before")
    @classmethod
    def _rate_of_an_adapter(cls, recipe: Any) -> Any:
        """Leave an adapter's learning rate open if the recipe does not say it: it follows from the model."""
        if isinstance(recipe, dict) and recipe.get("adapter") is not None:
            optimizer = recipe.get("optimizer", {})
            if isinstance(optimizer, dict) and "learning_rate" not in optimizer:
                return recipe | {"optimizer": optimizer | {"learning_rate": None}}
        return recipe

    @model_validator(mode="after")
    def _has_rate(self) -> RunConfig:
        if self.adapter is None and self.optimizer.learning_rate is None:
            raise ValueError("optimizer.learning_rate: expected a number above 0, given null")
        return self


def get_cache_folder(config: RunConfig) -> Path:
    """Return the folder for what a recipe's runs can make again: that of its prepared data, if it has any."""
    documents = config.data.documents
    default = DocumentsConfig.model_fields["cache_dir"].default
    return Path(default if documents is None else documents.cache_dir).expanduser()
