"""Evaluates a model on tasks of lm-evaluation-harness while it is trained. Needs the extra `tasks`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.catalog import folder_name
from pipeline.config.batch_plan import BatchPlan
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Settings
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.distributed.stopping import STOP_FLAG, FlagReader, StopOnSignal
from pipeline.engine.interface import Engine
from pipeline.errors import ConfigError, DataError, PipelineError
from pipeline.evaluation.harness import HarnessModel, LoadedTasks, load_tasks, run_tasks
from pipeline.evaluation.task_results import TaskResults
from pipeline.monitoring.events import TASKS_FOLDER, TaskTable
from pipeline.objectives.model_call import ModelCall

log = logging.getLogger(__name__)

DEFAULT_ROW_TOKENS = 1024  # if the data has no sequence length
NUM_SAMPLES = 20  # documents of a task that the results have as text


@tag_errors(Phase.DATA)
def load_training_tasks(settings: Settings) -> LoadedTasks:
    """Load the tasks of a recipe with their data, before the process group exists.

    Every rank calls this. Where data is downloaded, the libraries `datasets` and `huggingface_hub` lock their
    caches: one rank downloads, and the others wait without a limit.

    Raises:
        ConfigError: A name is unknown, or a task is not allowed.
        DataError: A task or its data cannot be read or downloaded.
    """
    section = settings.config.eval
    with _name_key():
        return load_tasks(section.tasks, section.tasks_limit, import_paths=settings.import_paths)


@contextmanager
def _name_key() -> Iterator[None]:
    """Begin the message of an error about a task with the key of the recipe."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"eval.tasks: {error}") from None


class _StoppedError(PipelineError):
    """Raised on all ranks together if a signal asks the run to stop."""


class _StoppableModel(HarnessModel):
    """Model that raises _StoppedError between two batches of scores, and before texts are generated.

    Args:
        engine: See HarnessModel.
        call: See HarnessModel.
        job: See HarnessModel.
        tokenizer: See HarnessModel.
        stop: Receiver of signals.
        sizes: Sizes of a batch, see HarnessModel.
    """

    def __init__(
        self, engine: Engine, call: ModelCall, job: Job, tokenizer: Any, stop: StopOnSignal, **sizes: int
    ):
        super().__init__(engine, call, job, tokenizer, on_progress=self._check_between_batches, **sizes)
        self._stop = stop
        self._device = engine.device
        self._flag_reader = FlagReader(engine.device)

    def _sum_flags(self) -> torch.Tensor:
        flag = float(STOP_FLAG * self._stop.requested)
        return self.job.all_reduce_sum(torch.full((), flag, dtype=torch.float64, device=self._device))

    def _check_between_batches(self, done: int, total: int) -> None:
        if self._flag_reader.read(self._sum_flags()).stop:
            raise _StoppedError
        if done == total:
            self.job.progress.start_activity("tasks")  # lm-eval computes metrics, or the next kind follows

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """See HarnessModel."""
        if self._sum_flags() > 0:
            raise _StoppedError
        self._on_progress = None  # ranks without a prompt would not call it
        texts = super().generate_until(requests, disable_tqdm)
        self._on_progress = self._check_between_batches
        self.job.progress.start_activity("tasks")
        return texts


class TrainingTasks:
    """Evaluates the model of a run on its tasks. All calls are collective.

    Args:
        loaded: Tasks of the run, from `load_training_tasks`.
        config: Recipe of the run.
        plan: Division of the batch. A batch of a task has as many tokens as a micro-batch.
        job: Ranks of the job.
        engine: Engine of the run.
        tokenizer: Tokenizer of the run.
        directory: Run directory.
        show: Receives the documents that a person can read; see Trackers.show.

    Raises:
        ConfigError: The run has no tokenizer, or the tokenizer has no chat template for the prompts.
    """

    def __init__(
        self,
        loaded: LoadedTasks,
        config: RunConfig,
        plan: BatchPlan,
        *,
        job: Job,
        engine: Engine,
        tokenizer: Any,
        directory: Path,
        show: Callable[[TaskTable], None],
    ):
        if tokenizer is None:
            raise ConfigError(
                "eval.tasks: data of your own has no tokenizer for the text of tasks; remove eval.tasks"
            )
        if config.eval.tasks_chat_template and not tokenizer.chat_template:
            raise ConfigError("eval.tasks_chat_template: the tokenizer has no chat template; remove the key")
        self._loaded = loaded
        self._config = config
        self._rows_per_batch = plan.micro_batch_size
        self._job = job
        self._engine = engine
        self._tokenizer = tokenizer
        self._directory = directory
        self._show = show
        self._results: TaskResults | None = None

    @tag_errors(Phase.EVALUATION)
    def evaluate(self, step: int, stop: StopOnSignal) -> dict[str, float] | None:
        """Evaluate the current weights, and return the metrics by their names in a row.

        Random numbers of the host are afterwards as before. The next step sets the model's mode.

        Args:
            step: Number of optimizer steps completed.
            stop: Receiver of signals, which end the evaluation early.

        Returns:
            The metrics; `None` if a signal on any rank ended the evaluation early.

        Raises:
            ConfigError, DataError: A task's prompt or data cannot be used.
        """
        self._results = None
        self._job.progress.start_activity("tasks")  # lm-eval first builds all prompts
        model = _StoppableModel(
            self._engine,
            ModelCall(self._config.model.inputs),
            self._job,
            self._tokenizer,
            stop,
            tokens_per_batch=self._rows_per_batch * (self._config.data.tokens_per_row or DEFAULT_ROW_TOKENS),
            rows_per_batch=self._rows_per_batch,
        )
        settings = {"model": self._directory.name, "step": step, "precision": self._engine.precision}
        with _name_key():
            try:
                self._results = run_tasks(
                    self._loaded,
                    model,
                    apply_chat_template=self._config.eval.tasks_chat_template,
                    num_samples=NUM_SAMPLES,
                    settings=settings,
                )
            except _StoppedError:
                return None
        return self._results.as_row()

    def report(self, step: int) -> None:
        """Write the results of the last evaluation to the run directory, and show samples in trackers.

        `evaluate --compare` reads the file. Does nothing on ranks other than 0.
        """
        if self._results is None or not self._job.ranks.is_main_process:
            return
        path = self._directory / TASKS_FOLDER / f"{folder_name(step)}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            self._results.write(path)
        except OSError as error:
            log.warning("%s cannot be written (%s); the run continues without it", path, error.strerror)
        self._show(TaskTable(step, list(_iterate_rows(self._results))))


def _iterate_rows(results: TaskResults) -> Iterator[tuple[str, int, str, str, str, float]]:
    """Yield the rows of a TaskTable. The score is that of a task's first metric; NaN if it has none."""
    for name, result in results.tasks.items():
        metric = next(iter(result.metrics), "")
        for document, sample in zip(result.documents, result.samples, strict=False):
            score, count = document.scores.get(metric, (math.nan, 1.0))
            yield name, document.id, sample.prompt, sample.target, sample.answer, score / (count or math.nan)
