"""Evaluates a model on tasks of lm-evaluation-harness while it is trained. Needs the extra `tasks`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.catalog import folder_name
from pipeline.config.batch_plan import BatchPlan
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Settings
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.distributed.stopping import StopOnSignal
from pipeline.engine.interface import Engine
from pipeline.errors import ConfigError, DataError, PipelineError
from pipeline.evaluation.harness import HarnessModel, LoadedTasks, load_tasks, run_tasks
from pipeline.evaluation.task_results import TaskResults
from pipeline.monitoring.events import TASKS_FOLDER, TaskTable
from pipeline.objectives.model_call import ModelCall

log = logging.getLogger(__name__)

DEFAULT_ROW_TOKENS = 1024  # if the data has no sequence length


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


@dataclass
class TrainingTasks:
    """Evaluates the model of a run on its tasks. All calls are collective.

    Raises:
        ConfigError: The tokenizer has no chat template for the prompts.
    """

    loaded: LoadedTasks
    """Tasks of the run, from `load_training_tasks`."""
    config: RunConfig
    """Recipe of the run."""
    plan: BatchPlan
    """Division of the batch. A batch of a task has as many tokens as a micro-batch."""
    job: Job
    """Ranks of the job."""
    engine: Engine
    """Engine of the run."""
    tokenizer: Any
    """Tokenizer of the run."""
    directory: Path
    """Run directory."""
    show: Callable[[TaskTable], None]
    """Receives the documents that a person can read; see Trackers.show."""

    def __post_init__(self) -> None:
        if self.config.eval.tasks_chat_template and not self.tokenizer.chat_template:
            raise ConfigError("eval.tasks_chat_template: the tokenizer has no chat template; remove the key")
        self._results: TaskResults | None = None

    @tag_errors(Phase.EVALUATION)
    def evaluate(self, step: int, stop: StopOnSignal) -> dict[str, float] | None:
        """Evaluate the weights of a step, and return the metrics by their names in a row.

        Return `None` if a signal on any rank ended the evaluation early. The states of the host's random
        number generators do not change. The model stays in evaluation mode until the next step.

        Raises:
            DataError: A task's prompt or data cannot be used.
        """
        self._results = None

        def end_on_signal(done: int, total: int) -> None:
            self.job.progress.start_activity("tasks")
            flag = torch.tensor(float(stop.requested), device=self.engine.device)
            if self.job.all_reduce_sum(flag) > 0:
                raise _StoppedError

        self.job.progress.start_activity("tasks")  # lm-eval first builds all prompts
        row_tokens = self.config.data.tokens_per_row or DEFAULT_ROW_TOKENS
        model = HarnessModel(
            self.engine,
            ModelCall(self.config.model.inputs),
            self.job,
            self.tokenizer,
            tokens_per_batch=self.plan.micro_batch_size * row_tokens,
            rows_per_batch=self.plan.micro_batch_size,
            on_progress=end_on_signal,
        )
        settings = {"model": self.directory.name, "step": step, "precision": self.engine.precision}
        template = self.config.eval.tasks_chat_template
        try:
            with _name_key():
                self._results = run_tasks(self.loaded, model, apply_chat_template=template, settings=settings)
        except _StoppedError:
            return None
        return self._results.as_row()

    def report(self, step: int) -> None:
        """Write the results of the last evaluation to the run directory, and show samples in trackers.

        `evaluate --compare` reads the file. Does nothing on ranks other than 0.
        """
        if self._results is None or not self.job.ranks.is_main_process:
            return
        path = self.directory / TASKS_FOLDER / f"{folder_name(step)}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            self._results.write(path)
        except OSError as error:
            log.warning("%s cannot be written (%s); the run continues without it", path, error.strerror)
        self.show(TaskTable(step, list(_iterate_rows(self._results))))


def _iterate_rows(results: TaskResults) -> Iterator[tuple[str, int, str, str, str, float]]:
    """Yield the rows of a TaskTable. The score is that of a task's first metric; NaN if it has none."""
    for name, result in results.tasks.items():
        metric = next(iter(result.metrics), "")
        pairs = zip(result.samples, result.documents.values(), strict=False)
        for index, (sample, scores) in enumerate(pairs):
            score, count = scores.get(metric, (math.nan, 1.0))
            yield name, index, sample.prompt, sample.target, sample.answer, score / (count or math.nan)
