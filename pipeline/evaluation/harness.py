"""Runs tasks of lm-evaluation-harness on an engine with any split.

HarnessModel inherits tokens, truncation and post-processing from lm-eval's class HFLM, so each score is that
of `lm_eval --model hf` on the exported model. Every rank runs lm-eval on all documents, as if it were alone;
only the model's work is divided over ranks. Import this module only where tasks are asked for: it needs the
extra `tasks`.
"""

from __future__ import annotations

import difflib
import logging
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import lm_eval.api.metrics
import lm_eval.api.model
import lm_eval.api.task
import lm_eval.evaluator
import lm_eval.tasks
import lm_eval.utils
import numpy as np
import torch
import xxhash
import yaml
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import get_aggregation, get_metric, metric_registry
from lm_eval.models import huggingface
from lm_eval.models import utils as model_utils
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind, TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.hub import go_offline_without_hub
from pipeline.config.import_paths import errors_in_one_line
from pipeline.config.recipe import NO_IMPORT_PATHS
from pipeline.data.random_numbers import isolate_random_numbers
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import find_phase
from pipeline.errors import ConfigError, DataError, ModelError, summarize_error
from pipeline.evaluation.scoring import generate_over_ranks, score_continuations
from pipeline.evaluation.task_results import (
    AGGREGATIONS,
    Scores,
    TaskMetric,
    TaskResult,
    TaskResults,
    TaskSample,
    compute_stderr,
)
from pipeline.files import MAX_CONFIGURATION_BYTES, read_regular_file
from pipeline.models.generation import GenerationSettings, number_samples
from pipeline.objectives.model_call import ModelCall
from pipeline.redaction import redact_text

SHIPPED_TASKS = Path(__file__).with_name("tasks")
"""Folder of the tasks that need no network."""
LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent
"""Folder of lm-eval's own tasks."""
SEED = 1234  # of few-shot examples and numpy: lm-eval's default
NUM_SAMPLES = 20  # documents of a task that the results have as text
SAMPLING_DEFAULTS = {"temperature": 0.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # of transformers


def _get_metric(name: str, hf_evaluate_metric: bool = False) -> Any:
    """Return a metric's function. For an unknown name, lm-eval would run code of this name from the hub."""
    if not hf_evaluate_metric and name not in metric_registry:
        near = difflib.get_close_matches(name, list(metric_registry), n=3) or sorted(metric_registry)
        raise DataError(f"metric_list has {name!r}, expected a metric such as {', '.join(near)}")
    return get_metric(name, hf_evaluate_metric)


def _compute_exp(exponent: float) -> float:
    """Return the exponential, or infinity where math.exp would raise an error and end a training."""
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


lm_eval.api.metrics.math = SimpleNamespace(**vars(math) | {"exp": _compute_exp})
# A task's prompts are Jinja templates, which lm-eval would run outside of a sandbox.
_sandbox = SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
_sandbox.filters |= lm_eval.utils.env.filters
lm_eval.utils.env = _sandbox
lm_eval.api.task.get_metric = _get_metric
_tqdm = huggingface.tqdm
for _module in (lm_eval.api.model, lm_eval.api.task, huggingface):
    _module.tqdm = lambda *items, **_: _tqdm(*items, disable=True)  # bars would break up the console's lines
logging.getLogger("lm_eval").setLevel(logging.ERROR)


class HarnessModel(HFLM):
    """Answers lm-eval's requests as its class HFLM does, by an engine. The methods are collective.

    Args:
        engine: Engine with a causal language model.
        call: The call of the model.
        job: Ranks of the job.
        tokenizer: Tokenizer of the model.
        tokens_per_batch: Largest number of tokens of a forward on one rank; see score_continuations.
        rows_per_batch: Largest number of prompts that a rank continues together.
        on_progress: Called on all ranks together, with the numbers of answered requests and of all of a kind.

    Raises:
        ModelError: The tokenizer has no end token.
    """

    def __init__(
        self,
        engine: Any,
        call: ModelCall,
        job: Job,
        tokenizer: Any,
        *,
        tokens_per_batch: int = 8192,
        rows_per_batch: int = 32,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        TemplateLM.__init__(self)  # that of HFLM would load a model
        if tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer has no end token, which tasks need; set eos_token in its folder")
        self.job = job
        self._engine = engine
        self._call = call
        self._tokens_per_batch = tokens_per_batch
        self._rows_per_batch = rows_per_batch
        self._on_progress = on_progress
        # What the inherited methods read:
        self.tokenizer = model_utils.configure_pad_token(deepcopy(tokenizer))
        self._max_length = model_utils.resolve_max_length(getattr(engine.module, "config", None), tokenizer)
        self._device = torch.device("cpu")
        self.batch_size_per_gpu = sys.maxsize  # the engine's batches are chosen below
        self.truncation = False
        self.add_bos_token = None
        self.custom_prefix_token_id = None
        self.think_end_token = None
        self.enable_thinking = None
        self.chat_template_args: dict[str, Any] = {}

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        for pair, _context_ids, ids in requests:
            if not 1 <= len(ids) <= self.max_length:
                raise DataError(
                    f"a task's answer has {len(ids):,} tokens, and the model reads 1 to {self.max_length:,} "
                    f"at a time; correct the task, or leave the document out with process_docs: {pair}"
                )
        ids_of_pairs = [(context_ids, ids) for _, context_ids, ids in requests]
        self._check_equal_on_ranks(ids_of_pairs)
        scores = score_continuations(
            self._engine,
            self._call,
            self.job,
            ids_of_pairs,
            max_tokens=self.max_length,
            tokens_per_batch=self._tokens_per_batch,
            on_progress=self._on_progress,
        )
        return [(each.logprob, each.is_greedy) for each in scores]

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        mask = generation_kwargs.pop("attention_mask").bool()
        rows = zip(context, mask, strict=True)
        prompts = [ids[is_token].tolist() or [self.prefix_token_id] for ids, is_token in rows]
        sampling = self._read_sampling(generation_kwargs)
        max_new_tokens = max_length - context.shape[1]
        samples = number_samples(prompts)
        settings = [
            GenerationSettings(max_new_tokens, seed=SEED, sample=sample, **sampling) for sample in samples
        ]
        self._check_equal_on_ranks(zip(prompts, settings, strict=True))
        window = max(len(each.encode()) for each in stop)  # tokens; each has at least one byte

        def start_batch(indices: Sequence[int]) -> Callable[[int, Any], bool]:
            answers: list[list[int]] = [[] for _ in indices]

            def has_ended(index: int, token: Any) -> bool:
                answers[index].append(token.id)
                end = self.tokenizer.decode(answers[index][-window:])
                return any(each in end for each in stop)

            return has_ended

        new_ids = generate_over_ranks(
            self._engine,
            self.job,
            prompts,
            settings,
            rows_per_batch=self._rows_per_batch,
            make_callback=start_batch,
            on_progress=self._on_progress,
        )
        endings = [torch.tensor(ids, dtype=torch.int64) for ids in new_ids]
        return torch.cat([context, pad_sequence(endings, True, self.eot_token_id)], dim=1)

    def _check_equal_on_ranks(self, requests: Iterable[Any]) -> None:
        """Check that a task asks the same on every rank, since each answers a part. Collective.

        Raises:
            DataError: The requests differ; raised on every rank.
        """
        digest = xxhash.xxh3_64()
        for request in requests:  # one by one: the text of all is several times as large as their ids
            digest.update(repr(request).encode())
        if len(set(self.job.gather_object(digest.intdigest()))) > 1:
            raise DataError(
                "the documents or prompts differ between ranks; let the task's functions return the same in "
                "each process: sort what comes from a set, and seed random numbers"
            )

    def _read_sampling(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of the draws from a task's generation_kwargs and the model's generation_config.

        Raises:
            DataError: An option is not supported.
        """
        does_sample = options.pop("do_sample")
        of_task = {key: value for key, value in options.items() if (key, value) != ("num_beams", 1)}
        for key in of_task.keys() - SAMPLING_DEFAULTS.keys():
            supported = ", ".join(["until", "max_gen_toks", "do_sample", *SAMPLING_DEFAULTS])
            raise DataError(f"generation_kwargs has {key}={of_task[key]}, expected only {supported}")
        if not does_sample:
            return {}
        if not of_task.get("temperature"):
            raise DataError("generation_kwargs has do_sample without a temperature above 0; give one")
        config = getattr(self._engine.module, "generation_config", None)
        of_model = {key: getattr(config, key, None) for key in SAMPLING_DEFAULTS}
        of_model = {key: value for key, value in of_model.items() if value is not None}
        return SAMPLING_DEFAULTS | of_model | of_task


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their data, which can be run any number of times."""

    tasks: dict[str, Any]
    """lm-eval's tasks by name."""
    groups: dict[str, Any]
    """lm-eval's groups of tasks by name."""
    limit: float | None
    """Largest number of documents of a task, or a fraction of them below 1; `None`: all."""
    python_state: Any
    """State of Python's generator after loading. Each run begins with it, as in lm-eval."""
    numpy_state: Any
    """State of numpy's generator after loading."""


def load_tasks(
    names: Sequence[str],
    limit: float | None = None,
    num_fewshot: int | None = None,
    *,
    import_paths: bool = True,
) -> LoadedTasks:
    """Load tasks and their data.

    Args:
        names: Names or patterns of tasks, groups and tags; paths of YAML files, or of folders (`my/tasks`).
        limit: See LoadedTasks.limit.
        num_fewshot: Number of solved examples before each document; `None`: the number that the task gives.
        import_paths: Whether a task of the user may name code to run.

    Raises:
        ConfigError: A name is unknown, or a task may not or cannot be run.
        DataError: A YAML file is not valid, or data cannot be read or downloaded.
    """
    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    with isolate_random_numbers(SEED), go_offline_without_hub():
        random.seed(0)
        np.random.seed(SEED)
        manager, specs = _find_tasks(names, import_paths)
        for spec in specs:
            if (manager.task_index[spec].cfg or {}).get("unsafe_code"):
                _refuse_task(spec)  # before its code is imported
            with errors_in_one_line(f"task {spec}: loading it or its data", DataError):
                loaded = manager.load([spec])
            tasks |= loaded["tasks"]
            groups |= loaded["groups"]
        for name, task in tasks.items():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                _refuse_task(name)
            if not len(task.eval_docs):
                raise DataError(f"task {name}: it has no documents; correct its data, split or process_docs")
            of_task = task.get_config("num_fewshot")
            # As in lm-eval, a task's 0 stays.
            if of_task is None or (num_fewshot is not None and of_task != 0):
                task.set_config(key="num_fewshot", value=num_fewshot or 0)
        return LoadedTasks(tasks, groups, limit, random.getstate(), np.random.get_state())


def list_shipped_tasks() -> list[tuple[str, str]]:
    """Return names and descriptions of the tasks that need no network."""
    index = TaskManager(include_path=str(SHIPPED_TASKS), include_defaults=False).task_index
    return [(name, entry.cfg["metadata"]["about"]) for name, entry in sorted(index.items())]


def run_tasks(
    loaded: LoadedTasks,
    model: HarnessModel,
    *,
    apply_chat_template: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> TaskResults:
    """Evaluate the model on the tasks, and return rank 0's results on every rank. Collective.

    The states of the host's random number generators do not change.

    Args:
        loaded: Tasks, loaded alike on every rank.
        model: Model to evaluate.
        apply_chat_template: Whether prompts are written with the tokenizer's chat template.
        settings: Description of the model for the results.

    Raises:
        DataError: A prompt, a function or a document of a task is wrong.
    """
    if apply_chat_template and not model.tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template; leave out --apply-chat-template")
    with isolate_random_numbers(SEED):
        random.setstate(loaded.python_state)
        np.random.set_state(loaded.numpy_state)
        for task in loaded.tasks.values():
            task.set_fewshot_seed(seed=SEED)
        try:
            results = lm_eval.evaluator.evaluate(
                lm=model,
                task_dict={"tasks": loaded.tasks, "groups": loaded.groups},
                limit=loaded.limit,
                bootstrap_iters=0,  # it would fork this process once for each CPU
                apply_chat_template=apply_chat_template,
                fewshot_as_multiturn=True,
            )
        except Exception as error:
            if find_phase([error]) is not None:  # raised by the engine, not by a task
                raise
            with errors_in_one_line(f"a task among {', '.join(loaded.tasks)}", DataError):
                raise
    tasks_and_groups = loaded.tasks | loaded.groups
    by_name = {name: _read_result(name, task, results) for name, task in tasks_and_groups.items()}
    description = {**(settings or {}), "limit": loaded.limit, "apply_chat_template": apply_chat_template}
    shared: TaskResults = model.job.broadcast_object(TaskResults(by_name, description))
    return shared


def _find_tasks(names: Sequence[str], import_paths: bool) -> tuple[TaskManager, list[str]]:
    """Return a manager, and the names in its index of the tasks to load.

    lm-eval's own tasks, whose index takes ten seconds, are read only if a name or a group needs them.

    Raises:
        ConfigError: A name is unknown, or two tasks have the same one.
        DataError: A YAML file is not valid.
    """
    entries: dict[str, Entry] = {}  # of the user's files
    specs: list[str] = []
    indexed_names: list[str] = []
    for name in names:
        if "/" not in name and not name.endswith((".yaml", ".yml")):
            indexed_names.append(name)
            continue
        path = Path(name).expanduser().resolve()
        for file in sorted(path.rglob("*.yaml")) if path.is_dir() else [path]:
            entry = _read_file(file, import_paths)
            other = entries.setdefault(entry.name, entry)
            if other.yaml_path != file or entry.name in names:
                raise ConfigError(f"two tasks have the name {entry.name}; rename that of {file}")
            specs.append(entry.name)
    manager = TaskManager(include_path=str(SHIPPED_TASKS), include_defaults=False)
    has_group = any(entry.kind is Kind.GROUP for entry in entries.values())
    if has_group or not all(manager.match_tasks([name]) for name in indexed_names):
        manager = TaskManager(include_path=str(SHIPPED_TASKS))
    for name in indexed_names:
        matches = manager.match_tasks([name])
        if not matches:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            command = format_pipeline_command("evaluate", "--tasks", "list")
            raise ConfigError(f"there is no task {name!r}; {hint}to see the tasks: {command}")
        specs += matches
    manager.task_index.update(entries)
    return manager, list(dict.fromkeys(specs))


def _read_file(file: Path, import_paths: bool) -> Entry:
    """Return the task or group that a YAML file defines.

    Raises:
        ConfigError: The file names code to run, and `import_paths` is false.
        DataError: The file cannot be read, or is no YAML file of a task.
    """
    index: dict[str, Entry] = {}
    try:
        _check_file(file, import_paths)
        TaskIndex.process_cfg(load_yaml(file, resolve_func=False), file, index)
        return next(iter(index.values()))  # tags follow
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or summarize_error(error)
        raise DataError(f"{file}: {reason}; expected a YAML file of a task") from None


def _check_file(file: Path, import_paths: bool) -> None:
    """Check a YAML file and those that it includes. See _read_file."""
    for event in yaml.parse(read_regular_file(file, MAX_CONFIGURATION_BYTES)):
        value = getattr(event, "value", "")
        is_function = getattr(event, "tag", None) == "!function"
        if not import_paths and (is_function or value == "hf_evaluate"):  # a metric downloaded from the hub
            code = f"!function {value}" if is_function else value
            raise ConfigError(f"{file}: a task names code to run ({code}), refused: {NO_IMPORT_PATHS}")
    included = load_yaml(file, resolve_func=False, recursive=False).get("include", [])
    for name in included if isinstance(included, list) else [included]:
        _check_file(file.parent / name, import_paths)


def _refuse_task(name: str) -> None:
    """Raise the ConfigError for a task that is multimodal, or runs code that the model has written."""
    raise ConfigError(
        f"task {name}: it has images or sound, or runs code that the model has written; run it by lm_eval on "
        "the exported model, in a container without network and secrets"
    )


def _read_result(task_name: str, task: Any, results: Mapping[str, Any]) -> TaskResult:
    """Return the result of a task or group among lm-eval's results, whose metrics are `metric,filter`."""
    values = results["results"][task_name]
    rows = results["samples"].get(task_name, [])  # a group has none
    functions = task.aggregation() if rows else {}
    names = {get_aggregation(name): name for name in AGGREGATIONS}  # of functions
    metrics: dict[str, TaskMetric] = {}
    documents: dict[str, Scores] = {f"{row['doc_id']} {row['doc_hash']}": {} for row in rows}
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float, np.number)):
            continue
        name = key.removesuffix(",none")  # the filter's name if a task has none
        # lm-eval's default is the mean.
        aggregation = names.get(functions.get(metric, lm_eval.api.metrics.mean)) if rows else None
        pairs = []
        for row in rows:
            if aggregation is not None and row["filter"] == filter_name and metric in row["metrics"]:
                score = row[metric] if isinstance(row[metric], (tuple, list)) else (row[metric], 1)
                pairs.append((float(score[0]), float(score[1])))
                documents[f"{row['doc_id']} {row['doc_hash']}"][name] = pairs[-1]
        stderr = None if aggregation is None else compute_stderr(np.array(pairs), aggregation)
        metrics[name] = TaskMetric(float(value), stderr, aggregation)
    first_rows = [row for row in rows if row["filter"] == rows[0]["filter"]][:NUM_SAMPLES]
    return TaskResult(
        metrics=metrics,
        num_documents=int(values.get("sample_len", 0)),
        num_fewshot=int(results["n-shot"].get(task_name) or 0),
        documents=documents,
        samples=[_read_sample(row, task.OUTPUT_TYPE) for row in first_rows],
    )


def _read_sample(row: Mapping[str, Any], output_type: str) -> TaskSample:
    """Return a document of lm-eval's results as text."""
    target = row["target"]
    answer = row["filtered_resps"][0]
    if output_type == "multiple_choice":
        choices = [choice for _, choice, *_ in row["arguments"]]
        answer = choices[int(np.argmax([logprob for logprob, _ in row["filtered_resps"]]))]
        if isinstance(target, int) and target < len(choices):
            target = choices[target]
    elif output_type.startswith("loglikelihood"):
        answer = f"log-likelihood {np.ravel(answer)[0]:.3f}"
    return TaskSample(*(redact_text(str(text)) for text in (row["arguments"][0][0], target, answer)))
