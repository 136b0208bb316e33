"""The recipe: every key that a user may set, with its unit and range. An unknown key is an error.

The docstring of a field is its documentation: docs/write_reference.py writes it into
docs/reference/configuration.md.
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
    """Your own tracker for the rows of the run: a class by import path (docs/how-to/watching.md)."""

    kind: str = Field(pattern=IMPORT_PATH)
    """Import path `package.module:class`. The class is called as `class(run_dir, start_step, run_config,
    **args)`, in the main process only. The key runs that code; `--no-import-paths` refuses it."""
    args: dict[str, Any] = Field({})
    """Further keyword arguments of the class. recipe.yaml stores them, so they must not be secrets."""


class CallbackConfig(RecipeSection):
    """Your own callback: a subclass of `pipeline.Callback` (docs/how-to/extending.md).

    An import path alone is a short form of a section with `kind`.
    """

    kind: str = Field(pattern=IMPORT_PATH)
    """Import path `package.module:Class`. Rank 0 calls it as `Class(**args)`. The key runs that code;
    `--no-import-paths` refuses it."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the class. recipe.yaml stores them, so they must not be secrets."""

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class EarlyStoppingConfig(RecipeSection):
    """Ends the run when `eval.best_metric` no longer improves, with a checkpoint and a summary.

    A run in `run_dir` can be continued with a higher `patience`.
    """

    patience: int = Field(gt=0)
    """Number of evaluations in a row without an improvement that ends the run. The evaluation before the
    first step counts as well."""
    min_delta: float = Field(0.0, ge=0)
    """Smallest change of the metric that counts as an improvement."""


class NotifyConfig(RecipeSection):
    """Alerts to your own command or webhook, besides the console, metrics.jsonl and W&B.

    At most one alert of each name is sent in a minute. Training never waits for the command or the webhook.
    """

    command: str | None = None
    """Program with arguments, as on a command line, that is started for each alert, without a shell and for
    at most 10 s. It gets the alert as JSON on its standard input, and its parts in the environment variables
    PIPELINE_RUN, PIPELINE_STEP, PIPELINE_EVENT, PIPELINE_LEVEL, PIPELINE_MESSAGE and PIPELINE_ADVICE.
    recipe.yaml stores the command, so it must not contain secrets. `--no-import-paths` refuses it."""
    # A webhook's address is a secret. Given by the name of a variable, it stays out of recipe.yaml, W&B and
    # errors.
    webhook_env: str | None = None
    """Name of the environment variable that holds the address of a webhook. Each alert is posted there as
    JSON with the keys that Slack, Mattermost and Discord read. multi_node.sh passes `PIPELINE_WEBHOOK` to
    the nodes. No file and no message contains the address."""
    level: Literal["info", "warning", "error"] = "warning"
    """Minimum severity of the alerts to send. A run that fails is an `error`."""

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: str | None) -> str | None:
        if command is None:
            return None
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"cannot be split into words ({error}), given {command!r}") from None
        if not words:
            raise ValueError("is empty; name a program, or remove the key")
        return command

    @field_validator("webhook_env")
    @classmethod
    def _check_variable_name(cls, name: str | None) -> str | None:
        if name is not None and not (name.isascii() and name.isidentifier()):
            # The message does not quote the value, which may be the address.
            raise ValueError(
                "is not the name of an environment variable; put the address into one (export "
                "PIPELINE_WEBHOOK=...) and write its name here: webhook_env: PIPELINE_WEBHOOK"
            )
        return name


class ProfileConfig(RecipeSection):
    """torch's profiler on some steps of the main rank, and a snapshot of GPU memory when it runs out.

    The files are written to `profile/` of the run (docs/how-to/watching.md). Profiled steps are slower.
    """

    start_step: int | None = Field(None, gt=0, le=10**12)
    """First step that is profiled; the step before it warms the profiler up. Default: no step is profiled,
    at no cost."""
    num_steps: int = Field(3, gt=0, le=1000)
    """Number of profiled steps. A step of a large model writes up to hundreds of MB of trace."""


class WatchConfig(RecipeSection):
    """Alerts about a run that goes wrong, and the action for each (docs/how-to/watching.md).

    Each alert is an event in metrics.jsonl; docs/reference/metrics-and-alerts.md has all of them.
    """

    alerts: bool = True
    """Whether to alert about spikes, a loss that rises from the start, and steps without a finite gradient;
    about slow steps and ranks, missing data and growing memory; about evaluation that diverges from
    training, and parameters that never change."""
    on_nonfinite: Literal["log", "skip", "rollback", "stop"] = "log"
    """Action after a step whose gradient is infinite or NaN. Such a step never changes a parameter. `log`:
    it counts as a step. `skip`: it does not count, and the run continues as if the data did not contain the
    step's samples. `rollback`: the run returns to a checkpoint before the step, and leaves out samples (see
    `rollback_steps`). `stop`: the run ends. In fp16, a step with a finite loss and an infinite gradient
    lowers the loss scale while that is possible, and counts. `skip` applies to the other steps with an
    infinite or NaN gradient; `rollback` and `stop` are refused in fp16."""
    on_spike: Literal["log", "skip", "rollback", "stop"] = "log"
    """Action after a step whose loss or gradient norm is far above those of the steps before it, with the
    same choices. `skip`: the step changes nothing; to decide this, every step synchronizes with the
    device."""
    on_corruption: Literal["log", "stop"] = "stop"
    """Action if ranks that should hold equal weights hold different bits. `stop`: the run ends with exit
    code 14 and without a further checkpoint, and checkpoints that may be affected are set aside. The next
    start resumes from one on which all ranks agreed."""
    compare_every: int = Field(25, ge=0)
    """Number of steps between two comparisons of replicas; 0: none. Under `ddp` and ZeRO 0, weights,
    reduced gradients and optimizer state are compared; at ZeRO 1 and 2 only the weights, by a digest
    that every step updates."""
    rollback_steps: int = Field(8, gt=0, le=10**6)
    """Number of steps whose samples a rollback leaves out: the bad step and those just before it. The run
    returns to a checkpoint before them."""


LogLevel = Literal["debug", "info", "warning", "error"]
RUN_NAME = r"^[\w.-]+$"
"""Pattern of a run's name."""
MAX_MICRO_BATCH_SIZE = MAX_ACCUMULATION_STEPS = 2**24
MAX_GLOBAL_BATCH_SIZE = 2**40
BEST_MODES = {"loss": "min", "perplexity": "min", "bits_per_byte": "min", "accuracy": "max"}
"""Last part of a metric's name -> whether its lowest or highest value is the best."""


Position = Annotated[int, Field(ge=0, le=2**62)]
"""Position of a sample in the order of the run's samples, from 0 on."""


class LoaderConfig(RecipeSection):
    """The loader, which reads samples for the steps."""

    num_workers: int = Field(0, ge=0, le=1024)
    """Number of worker processes that read ahead. 0: the training process reads, which is right for
    tokenised text, since that is mapped into memory. Images, which must be decoded, need a few workers."""
    leave_out: list[tuple[Position, Position]] = Field([])
    """Ranges `[first, last)` of the run's sample order that no step uses, counted like
    `train/samples_seen`. An alert names the range of a bad step. Every other step keeps its samples."""

    @field_validator("leave_out", mode="before")
    @classmethod
    def _convert_to_tuples(cls, value: Any) -> Any:
        if isinstance(value, list):  # YAML and JSON have no tuples
            return [tuple(pair) if isinstance(pair, list) else pair for pair in value]
        return value

    @field_validator("leave_out")
    @classmethod
    def _check_order(cls, value: list[tuple[int, int]]) -> list[tuple[int, int]]:
        for first, last in value:
            if first >= last:
                raise ValueError(f"[{first}, {last}) is empty: expected [first, last) with first < last")
        return value


class BatchConfig(RecipeSection):
    """The batch. Give one or two of the three numbers; the rest follows from the number of ranks.

    Without this section: `micro_batch_size: 8`.
    """

    micro_batch_size: Annotated[int, Field(gt=0, le=MAX_MICRO_BATCH_SIZE)] | Literal["auto"] | None = None
    """Number of samples in one forward pass of a rank. `auto`, with `global_batch_size`: the largest that
    fits, found at the start by trial steps that do not count. The size that is found changes neither the
    global batch nor the curve."""
    gradient_accumulation_steps: int | None = Field(None, gt=0, le=MAX_ACCUMULATION_STEPS)
    """Number of micro-batches whose gradients a rank adds up for one optimizer step. Default: it follows
    from the other two numbers, else 1."""
    global_batch_size: int | None = Field(None, gt=0, le=MAX_GLOBAL_BATCH_SIZE)
    """Number of samples of an optimizer step: micro_batch_size x gradient_accumulation_steps x data-parallel
    ranks."""

    @field_validator("micro_batch_size", mode="wrap")
    @classmethod
    def _accept_number_or_auto(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, float) and value.is_integer():  # 1e1
            value = int(value)
        try:
            return validate(value)
        except ValidationError as error:  # pydantic has one error for each type; the user gets one for both
            message = error.errors()[0]["msg"]
            raise ValueError(f"{message[0].lower()}{message[1:]}, or auto; given {value!r}") from None


class EngineConfig(RecipeSection):
    """Settings for plain PyTorch. With a DeepSpeed JSON this section must be absent.

    The file for --deepspeed can choose plain PyTorch, too: then it has a section `torch` with these keys.
    """

    parallel: Literal["auto", "single", "dp", "ddp"] = "auto"
    """Data parallelism. `single`: one process, one device. `dp`: nn.DataParallel, one process and all
    visible GPUs. `ddp`: DistributedDataParallel, one process for each device. `auto`: `ddp` if a launcher
    started several ranks, else `single`."""
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """Precision. `bf16`: computation under autocast, with parameters in fp32. `auto`: bf16 if the device is
    faster in bf16 than in fp32."""
    tf32: bool = False
    """Whether a GPU may multiply fp32 matrices in TF32 (10 bits of mantissa), which is faster and less
    exact."""
    compile: bool | Literal["auto"] = "auto"
    """Whether torch.compile compiles the model's repeated blocks, and the loss if it is computed from logits.
    Compilation takes about a minute at the start; steps are then faster. `auto`: on a GPU, except with
    `dp`."""
    bucket_cap_mb: float = Field(25.0, gt=0, le=2**20)
    """Size in MiB of the gradient buckets of `ddp`."""
    find_unused_parameters: bool = False
    """Whether `ddp` searches in each step for parameters that the forward pass did not use. `false`: an
    unused parameter is an error that names it."""


class LogConfig(RecipeSection):
    """The log: its interval, its levels and its trackers."""

    every: Every = 1
    """Steps (`10`, `10 steps`) or epochs (`0.25`, `2 epochs`) between two rows of metrics.jsonl."""
    console: LogLevel = "info"
    """Lowest level of lines on the console; on the command line `--log-level`, or `--quiet` for `warning`.
    Above `info` the console shows neither rows nor evaluations. The run's files have all lines from `info`
    on."""
    tensorboard: bool = False
    """Whether to write TensorBoard event files (needs the `tensorboard` extra)."""
    trackers: list[TrackerConfig] = Field([])
    """Your own trackers by import path, for example for MLflow. A tracker that fails or blocks is dropped
    with a message, and the run continues without it."""
    price_per_device_hour: float | None = Field(None, ge=0)
    """Price of a GPU for an hour (on a CPU: of a rank), in any currency. Rows then have `perf/cost`, the
    cost of the run so far."""

    @model_validator(mode="before")
    @classmethod
    def _accept_sinks(cls, value: Any) -> Any:
        """Read `sinks`, the name of `trackers` in the recipe.yaml of runs from before it was renamed."""
        if isinstance(value, dict) and "sinks" in value and "trackers" not in value:
            return {("trackers" if key == "sinks" else key): entry for key, entry in value.items()}
        return value

    @field_validator("every")
    @classmethod
    def _check_above_zero(cls, value: int | float | str) -> int | float | str:
        if not StepsOrEpochs.parse(value).number:
            raise ValueError(f"expected a number above 0, given {value!r}")
        return value

    @property
    def shows_rows(self) -> bool:
        """Return whether the console shows rows and evaluations, not only warnings and errors."""
        return self.console in ("debug", "info")


class WandbConfig(RecipeSection):
    """Weights & Biases. Only rank 0 opens a W&B run.

    W&B's own environment variable replaces a key that is left out. A message names each variable that the
    recipe overrides.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Mode of W&B. `auto`: the value of `WANDB_MODE`; without it, online if there is an API key, else
    offline."""
    project: str | None = None
    """Project of the run. Default: `WANDB_PROJECT`, else `deepspeed-pipeline`."""
    entity: str | None = None
    """User or team. Default: `WANDB_ENTITY`, else the default entity of the API key."""
    group: str | None = None
    """Group of the run. Default: `WANDB_RUN_GROUP`, else the run's name."""
    tags: list[str] = Field([])
    """Tags of the run. Default: `WANDB_TAGS`, separated by commas."""
    notes: str | None = None
    """Notes about the run. Default: `WANDB_NOTES`."""
    job_type: str | None = None
    """Type of the run within its group, for example `train`. Default: `WANDB_JOB_TYPE`."""
    x_axis: Literal["global_step", "tokens_seen"] = "global_step"
    """Horizontal axis of the curves. `tokens_seen` is for language models."""
    checkpoints: bool = False
    """Whether to log each checkpoint as an artifact that references its files; no file is uploaded."""
    histograms_every: int = Field(0, ge=0)
    """Number of steps between histograms of each parameter and its gradient, a multiple of `log.every`; 0:
    none."""


class EvalConfig(RecipeSection):
    """Evaluation on the held-out data: an exact mean over its tokens, the same on any number of ranks."""

    every: Every = 0
    """Steps (`500`, `500 steps`) or epochs (`0.25`, `2 epochs`) between evaluations, rounded to whole steps;
    0: only before the first and after the last step."""
    max_samples: int | None = Field(None, gt=0)
    """Largest number of samples to evaluate, from the first on. Default: all."""
    best_metric: str = Field("loss", min_length=1)
    """Metric that decides which evaluation is the best, by its name without `eval/`: `loss`, `perplexity`,
    `bits_per_byte`, `accuracy`, `NAME/loss` of one evaluation set, `tasks/NAME/METRIC` of a task, or a metric
    of your own objective."""
    best_mode: Literal["min", "max"] | None = None
    """Whether the lowest or the highest `best_metric` is the best. Default: `min` for a loss, a
    perplexity or `bits_per_byte`, `max` for an accuracy. Other metrics need this key."""

    tasks: list[str] = Field([])
    """Tasks of lm-evaluation-harness that are part of the evaluations: names, or paths of YAML files
    (docs/how-to/evaluate-and-serve.md). Their metrics are columns `eval/tasks/NAME/METRIC`. Needs the `tasks`
    extra."""
    tasks_every: int = Field(1, gt=0)
    """Number of evaluations from one with `tasks` to the next. Those before the first and after the last step
    always have them."""
    tasks_limit: int | None = Field(None, gt=0)
    """Largest number of documents of a task, from the first on. Default: all."""
    tasks_chat_template: bool = False
    """Whether prompts of tasks are questions in the tokenizer's chat template."""

    @property
    def is_best_of_task(self) -> bool:
        """Return whether `best_metric` is a metric of a task: tasks/NAME/METRIC."""
        return self.best_metric.startswith("tasks/") and self.best_metric.count("/") > 1

    @property
    def best_is_lowest(self) -> bool:
        """Return whether the lowest value of `best_metric` is the best."""
        return (self.best_mode or BEST_MODES.get(self.best_metric.rpartition("/")[2])) == "min"

    @model_validator(mode="after")
    def _require_best_mode(self) -> EvalConfig:
        name = self.best_metric.rpartition("/")[2]
        if self.best_mode is None and name not in BEST_MODES:
            near = get_close_matches(name, BEST_MODES, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise ValueError(f"best_metric is {self.best_metric}{hint}: write best_mode too, min or max")
        return self


class CheckpointConfig(RecipeSection):
    """The intervals between checkpoints, and how many of them are kept."""

    every: Every = 0
    """Steps (`500`, `500 steps`) or epochs (`0.25`, `2 epochs`) between checkpoints, rounded to whole steps;
    0: only at the end and at a signal to stop."""
    every_minutes: float = Field(0, ge=0)
    """Minutes between further checkpoints, by rank 0's clock; 0: none."""
    grace_seconds: float | None = Field(None, gt=0)
    """Seconds that the scheduler allows between a signal to stop (SIGTERM, SIGUSR1, Ctrl-C) and the kill. A
    last checkpoint that would take longer is not started. Default: it is always started."""
    keep_last: int = Field(2, gt=0)
    """Number of newest checkpoints that are kept."""
    keep_every: int = Field(0, ge=0)
    """Interval in steps between checkpoints that are never deleted: their step is a multiple of this number.
    0: none."""
    keep_best: bool = False
    """Whether to keep the checkpoint with the best `eval.best_metric` as well. `every` must then be a
    multiple of `eval.every`."""
    resume: Literal["auto", "never", "required"] = "auto"
    """`auto`: resume the newest unfinished run of this recipe, if any, whatever its split. `never`: start a
    new run. `required`: raise an error if there is no run to resume."""


class SampleConfig(RecipeSection):
    """Text that the trained language model generates at the end of the run."""

    prompt: str | None = None
    """Text that the model continues; a question in the chat template if `data.kind` is `chat` or
    `preference`. Default: `def `; with those kinds the first held-out prompt."""
    max_new_tokens: int = Field(48, ge=0, le=2**20)
    """Largest number of tokens to generate; 0: none."""
    every_eval: bool = False
    """Whether to generate text after each evaluation, too, as an event `sample` in metrics.jsonl and a
    table in Weights & Biases. The curve stays the same."""


class DistributedConfig(RecipeSection):
    """Timeouts between ranks, and the detection of ranks that hang, are lost or are slow."""

    timeout_seconds: float = Field(1800, gt=0, le=10**7)
    """Seconds that a collective waits for the other ranks, in every process group. The watchdog also allows
    this time for starting, resuming, saving, ending, and for the first step, which may compile."""
    hang_seconds: float | None = Field(None, gt=0, le=10**7)
    """Seconds without a step after which the watchdog ends the job with exit code 124. Before that, the
    watchdog writes the stack of every rank and names the ranks that are behind. Default: ten times the
    recent median step, at least 60."""
    straggler_share: float = Field(0.15, gt=0)
    """Threshold of the alert about slow ranks: the share by which a rank takes longer than the median rank
    for its own part of a step (reading data, computing). The alert names the rank and that part. A pipeline
    stage is compared with its own earlier time."""
    # torch's NUMA binding needs GPUs and the program numactl, and only torchrun applies it. This binding
    # works under every launcher, and on machines without GPUs.
    bind_cores: bool | None = None
    """Whether to bind each rank to a part of the CPU cores that it may use, those next to its GPU first.
    Default: yes if several ranks may use the same cores, and neither the launcher nor a variable such as
    OMP_PROC_BIND bound the ranks."""


class RunConfig(RecipeSection):
    """A whole run.

    The DeepSpeed JSON has the split of the work and the precision. Without one, `engine` has them.
    """

    name: str = Field("run", pattern=RUN_NAME, max_length=128)
    """Name of the run; its directory is `<runs_dir>/<name>-<time>`."""
    runs_dir: str = "runs"
    """Folder in which run directories are created."""
    run_dir: str | None = None
    """Fixed directory of this run, in place of a new one in `runs_dir`; created if missing. A run in that
    directory is resumed. A finished run continues with a higher `max_steps`, also with another `optimizer` or
    `schedule`."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of initial weights, data order and dropout."""
    max_steps: int | None = Field(None, gt=0, le=10**12)
    """Number of optimizer steps of the run. Give exactly one of this and `max_epochs`; one on the command
    line replaces the other in the recipe."""
    max_epochs: float | None = Field(None, gt=0, le=1e9)
    """Number of passes over the training data."""
    model: ModelConfig
    adapter: AdapterConfig | None = None
    """Low-rank adapters to train in place of the model's own weights: `lora`, or a section."""
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
    """Your own callbacks by import path. They run at named moments, and can alert, evaluate, save and
    stop."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    distributed: DistributedConfig = DistributedConfig()
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="before")
    @classmethod
    def _leave_adapter_rate_open(cls, recipe: Any) -> Any:
        """Set an adapter's learning rate to null unless the recipe states one; the model then decides it."""
        if isinstance(recipe, dict) and recipe.get("adapter") is not None:
            optimizer = recipe.get("optimizer", {})
            if isinstance(optimizer, dict) and "learning_rate" not in optimizer:
                return recipe | {"optimizer": optimizer | {"learning_rate": None}}
        return recipe

    @model_validator(mode="after")
    def _require_learning_rate(self) -> RunConfig:
        if self.adapter is None and self.optimizer.learning_rate is None:
            raise ValueError("optimizer.learning_rate: expected a number above 0, given null")
        return self


def get_cache_folder(config: RunConfig) -> Path:
    """Return the recipe's folder for prepared data, or the default folder for data of other kinds."""
    documents = config.data.documents
    default = DocumentsConfig.model_fields["cache_dir"].default
    return Path(default if documents is None else documents.cache_dir).expanduser()
