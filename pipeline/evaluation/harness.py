"""Runs tasks of lm-evaluation-harness on an engine with any split.

HarnessModel gives lm-eval the tokens, truncation and post-processing of its class HFLM, so each score is that
of `lm_eval --model hf` on the exported model. Every rank runs lm-eval on all documents, as if it were alone;
only the model's work is divided over ranks. Import this module only where tasks are asked for: it needs the
extra `tasks`.
"""

from __future__ import annotations

import difflib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import jinja2
import lm_eval.api.metrics
import lm_eval.api.task
import lm_eval.evaluator
import lm_eval.tasks
import lm_eval.tasks._yaml_loader as yaml_loader
import lm_eval.utils
import numpy as np
import torch
import yaml
from jinja2.sandbox import SandboxedEnvironment
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import metric_registry
from lm_eval.models import utils as model_utils
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind

from pipeline.config.hub import go_offline_without_hub
from pipeline.config.import_paths import errors_in_one_line
from pipeline.config.recipe import NO_IMPORT_PATHS
from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError, DataError, ModelError, PipelineError, summarize_error
from pipeline.evaluation.scoring import generate_over_ranks, score_continuations
from pipeline.evaluation.task_results import (
    AGGREGATIONS,
    OTHER,
    ScoredDocument,
    TaskMetric,
    TaskResult,
    TaskResults,
    TaskSample,
    compute_stderr,
)
from pipeline.files import MAX_CONFIGURATION_BYTES, read_regular_file
from pipeline.models.generation import GenerationSettings
from pipeline.objectives.model_call import ModelCall

SHIPPED_TASKS = Path(__file__).with_name("tasks")
"""Folder of the tasks that need no network."""
LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).resolve().parent
"""Folder of lm-eval's own tasks."""
ALLOW_UNSAFE_TASKS = "--allow-unsafe-tasks"
"""Option that allows tasks which run code that the model has written."""
SEED = 1234  # of few-shot examples, numpy and torch: lm-eval's default
MAX_GENERATED_TOKENS = 256  # of a task that gives no number, as in HFLM
SAMPLING_DEFAULTS = {"temperature": 0.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # of transformers
NEUTRAL_OPTIONS = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "use_cache": True}
"""Options of a task's generation_kwargs -> value that changes nothing. Other values are refused."""

_get_metric = lm_eval.api.task.get_metric
_import_function = yaml_loader._import_func_in_yml
# A task's prompts are Jinja templates, which lm-eval would run outside of a sandbox.
_sandbox = SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
_sandbox.filters |= lm_eval.utils.env.filters
lm_eval.utils.env = _sandbox
lm_eval.api.task.tqdm = lambda items, **_: items  # its bar would break up the console's lines


class HarnessModel(TemplateLM):
    """Answers lm-eval's requests with an engine's model. The methods are collective.

    Args:
        engine: Engine with a causal language model.
        call: The call of the model.
        job: Ranks of the job.
        tokenizer: Tokenizer of the model.
        tokens_per_batch: Largest number of tokens of a forward on one rank.
        rows_per_batch: Largest number of prompts that a rank continues together.
        on_progress: Called with the numbers of answered requests and of all; see score_continuations.

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
        on_progress: Callable[[int, int], None] | None = None,
    ):
        super().__init__()
        if tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer has no end token, which tasks need; set eos_token in its folder")
        self.job = job
        self.tokenizer = tokenizer
        self.max_length: int = model_utils.resolve_max_length(
            getattr(engine.module, "config", None), tokenizer
        )
        self.is_computing = False
        """Whether the engine computes. Then an exception is no mistake of a task."""
        self._engine = engine
        self._call = call
        self._tokens_per_batch = tokens_per_batch
        self._rows_per_batch = rows_per_batch
        self._on_progress = on_progress
        self._prefix = tokenizer.decode(self.prefix_token_id)

    @property
    def eot_token_id(self) -> int:
        """Return the id of the tokenizer's end token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the id that stands before a text without context."""
        begin: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Return the tokenizer's name. lm-eval asks for it together with a chat template."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text. A text that begins with the prefix token gets no special tokens."""
        if add_special_tokens is None and string.startswith(self._prefix):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text. If the template refuses it, the system's turn is left out.

        Raises:
            DataError: The template refuses the conversation without it, too.
        """
        for turns in (chat_history, [turn for turn in chat_history if turn["role"] != "system"]):
            try:
                text: str = self.tokenizer.apply_chat_template(
                    turns,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
                return text
            except jinja2.TemplateError as error:
                reason = summarize_error(error)
        raise DataError(f"the tokenizer's chat template refuses a task's prompt: {reason}")

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return each answer's log-probability, and whether each of its tokens is the likeliest.

        Raises:
            DataError: An answer is empty, or longer than the model's positions.
        """
        for request in requests:
            if not request.args[1]:
                raise DataError(
                    f"{_locate(request)}: the answer is empty; correct doc_to_target or doc_to_choice"
                )
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        for (_context, answer), _ids, ids in requests:
            if not 1 <= len(ids) <= self.max_length:
                raise DataError(
                    f"a task's answer has {len(ids):,} tokens, and the model reads 1 to {self.max_length:,} "
                    f"at a time; leave the document out with process_docs: {answer[:80]!r}"
                )
        return self._score([(context_ids, ids) for _, context_ids, ids in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return each text's log-probability. The model reads it in windows of its length."""
        windows: list[tuple[list[int], list[int]]] = []
        ends = [0]
        for request in requests:
            pairs = lm_eval.utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += map(lm_eval.utils.make_disjoint_window, pairs)
            ends.append(len(windows))
        logprobs = [logprob for logprob, _ in self._score(windows)]
        return [sum(logprobs[start:end]) for start, end in pairwise(ends)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return the text that the model generates after each prompt, up to a stop string.

        Raises:
            DataError: A task's generation_kwargs are not supported, or leave no room for a prompt.
        """
        end = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        prompts: list[list[int]] = []
        settings: list[GenerationSettings] = []
        stops: list[dict[str, int]] = []
        repeats: Counter[tuple[int, ...]] = Counter()
        for request in requests:
            text, arguments = request.args
            options = dict(model_utils.normalize_gen_kwargs(arguments, MAX_GENERATED_TOKENS))
            strings = model_utils.handle_stop_sequences(options.pop("until"), eos=end)
            # As in HFLM, two further tokens are searched: a stop string may consist of others than its own.
            stops.append({each: len(self.tok_encode(each, add_special_tokens=False)) + 2 for each in strings})
            max_new_tokens = options.pop("max_gen_toks")
            if max_new_tokens >= self.max_length:
                raise DataError(
                    f"{_locate(request)}: it generates {max_new_tokens:,} tokens, and the model takes "
                    f"{self.max_length:,} with the prompt; give a YAML file with `include:` of the task's, "
                    "and a lower generation_kwargs.max_gen_toks"
                )
            ids = self._encode_prompt(text)[-(self.max_length - max_new_tokens) :]
            sampling = self._read_sampling(_locate(request), options)
            sample = repeats[tuple(ids)]
            repeats[tuple(ids)] += 1
            prompts.append(ids)
            settings.append(GenerationSettings(max_new_tokens, seed=SEED, sample=sample, **sampling))
        num_started = 0

        def start_batch(indices: Sequence[int]) -> Callable[[int, Any], bool]:
            nonlocal num_started
            if self._on_progress is not None:
                self._on_progress(min(num_started, len(prompts)), len(prompts))
            num_started += len(indices) * self._engine.dp_world_size  # other ranks start about as many
            return self._make_stop_callback([stops[i] for i in indices])

        with self._computing():
            texts = generate_over_ranks(
                self._engine,
                self.job,
                prompts,
                settings,
                rows_per_batch=self._rows_per_batch,
                make_callback=start_batch,
            )
        decoded = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]
        pairs = zip(decoded, stops, strict=True)
        return [model_utils.postprocess_generated_text(text, [*strings], None) for text, strings in pairs]

    def _encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt. HFLM compares it with the BOS token here, not with the prefix token."""
        begin = self.tokenizer.bos_token
        options = {"add_special_tokens": False} if begin is not None and text.startswith(begin) else {}
        return self.tokenizer(text, **options)["input_ids"] or [self.prefix_token_id]

    def _read_sampling(self, where: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of the draws, from a task's generation_kwargs or the model's generation_config.

        Raises:
            DataError: An option is not supported.
        """
        does_sample = options.pop("do_sample")
        sampling = {}
        for key, default in SAMPLING_DEFAULTS.items():
            of_model = getattr(getattr(self._engine.module, "generation_config", None), key, None)
            value = options.pop(key, None)
            if value is None:
                value = default if key == "temperature" or of_model is None else of_model
            sampling[key] = type(default)(value)
        for key, value in options.items():
            if value is not None and value != NEUTRAL_OPTIONS.get(key):
                supported = ", ".join(["until", "max_gen_toks", "do_sample", *SAMPLING_DEFAULTS])
                raise DataError(f"{where}: generation_kwargs has {key}={value}, expected only {supported}")
        if does_sample and not sampling["temperature"] > 0:
            raise DataError(
                f"{where}: generation_kwargs has do_sample without a temperature above 0; give one"
            )
        return sampling if does_sample else {}

    def _make_stop_callback(self, stops: list[dict[str, int]]) -> Callable[[int, Any], bool]:
        """Return the callback that ends each text of a batch at a stop string.

        Args:
            stops: For each prompt of the batch, stop string -> number of last tokens to search.
        """
        texts: list[list[int]] = [[] for _ in stops]

        def has_ended(index: int, token: Any) -> bool:
            ids = texts[index]
            ids.append(token.id)
            return any(stop in self.tokenizer.decode(ids[-n:]) for stop, n in stops[index].items())

        return has_ended

    def _score(self, requests: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        with self._computing():
            scores = score_continuations(
                self._engine,
                self._call,
                self.job,
                requests,
                max_tokens=self.max_length,
                tokens_per_batch=self._tokens_per_batch,
                on_progress=self._on_progress,
            )
        return [(each.logprob, each.is_greedy) for each in scores]

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self.is_computing = True
        yield
        self.is_computing = False  # after an exception it stays


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their data, which can be run any number of times."""

    tasks: dict[str, Any]
    """lm-eval's tasks by name."""
    groups: dict[str, Any]
    """lm-eval's groups of tasks by name."""
    limit: float | None
    """Largest number of documents of a task, or a fraction of them below 1; `None`: all."""
    random_states: tuple[Any, ...]
    """States of the random number generators after loading. Each run begins with them, as in lm-eval."""


def load_tasks(
    names: Sequence[str],
    limit: float | None = None,
    num_fewshot: int | None = None,
    *,
    import_paths: bool = True,
    allow_unsafe: bool = False,
) -> LoadedTasks:
    """Load tasks and their data.

    Args:
        names: Names or patterns of tasks, groups and tags; paths of YAML files, or of folders (`my/tasks`).
        limit: See LoadedTasks.limit.
        num_fewshot: Number of solved examples before each document; `None`: the number that the task gives.
        import_paths: Whether a task of the user may name code to run.
        allow_unsafe: Whether a task may run code that the model has written.

    Raises:
        ConfigError: A name is unknown, or a task is not allowed or needs images or sound.
        DataError: A YAML file is not valid, or data cannot be read or downloaded.
    """
    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    with _random_states(None) as get_states, _quiet(), _guard_code(import_paths):
        specs, manager = _resolve_names(names)
        for spec in specs:
            entry = manager.task_index.get(spec)
            if entry is not None and (entry.cfg or {}).get("unsafe_code"):
                _check_unsafe(spec, allow_unsafe)  # before its code is imported
            is_shipped = entry is not None and SHIPPED_TASKS in (entry.yaml_path or Path()).parents
            with _explain_load_errors(spec), nullcontext() if is_shipped else go_offline_without_hub():
                loaded = manager.load([spec])
            for name in tasks.keys() & loaded["tasks"].keys():
                metadata = [each[name].get_config("metadata") or {} for each in (tasks, loaded["tasks"])]
                files = [str(each.get("config_source")) for each in metadata]
                if files[0] != files[1]:
                    raise ConfigError(f"--tasks: two tasks have the name {name}; rename one: {files}")
            tasks |= loaded["tasks"]
            groups |= loaded["groups"]
        for name, task in tasks.items():
            if getattr(task, "UNSAFE_CODE", False):
                _check_unsafe(name, allow_unsafe)
            if getattr(task, "MULTIMODAL", False):
                raise ConfigError(f"task {name}: it has images or sound; only tasks with text can be run")
            own = task.get_config("num_fewshot")
            if own is None or (num_fewshot is not None and own != 0):  # as in lm-eval, a task's 0 stays
                task.set_config(key="num_fewshot", value=num_fewshot or 0)
        return LoadedTasks(tasks, groups, limit, get_states())


def list_tasks(pattern: str | None) -> list[tuple[str, str]]:
    """Return name and description of all tasks that match a pattern; `None`: of the shipped tasks."""
    with _quiet():
        manager = TaskManager(include_path=str(SHIPPED_TASKS), include_defaults=pattern is not None)
    return [(name, _describe(manager.task_index[name])) for name in manager.match_tasks([pattern or "*"])]


def run_tasks(
    loaded: LoadedTasks,
    model: HarnessModel,
    *,
    apply_chat_template: bool = False,
    fewshot_as_multiturn: bool = True,
    system: str | None = None,
    num_samples: int = 5,
    settings: Mapping[str, Any] | None = None,
) -> TaskResults:
    """Evaluate the model on the tasks, and return rank 0's results on every rank. Collective.

    The states of the random number generators do not change.

    Args:
        loaded: Tasks, loaded alike on every rank.
        model: Model to evaluate.
        apply_chat_template: Whether prompts are written with the tokenizer's chat template.
        fewshot_as_multiturn: Whether the template gets few-shot examples as turns of their own.
        system: System instruction before each prompt.
        num_samples: Number of each task's first documents that the results have as text.
        settings: Description of the model for the results.

    Raises:
        DataError: A prompt, a function or a document of a task is wrong.
    """
    if apply_chat_template and not model.tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template; leave out --apply-chat-template")
    prompts = {"apply_chat_template": apply_chat_template, "fewshot_as_multiturn": fewshot_as_multiturn}
    with _random_states(loaded.random_states), _quiet():
        for task in loaded.tasks.values():
            task.set_fewshot_seed(seed=SEED)
        try:
            results = lm_eval.evaluator.evaluate(
                lm=model,
                task_dict={"tasks": loaded.tasks, "groups": loaded.groups},
                limit=loaded.limit,
                bootstrap_iters=0,  # it would fork this process once for each CPU
                system_instruction=system,
                confirm_run_unsafe_code=True,  # load_tasks has refused what is not allowed
                **prompts,
            )
        except Exception as error:
            if model.is_computing or isinstance(error, PipelineError):
                raise
            with errors_in_one_line(f"a task among {', '.join(loaded.tasks)}", DataError):
                raise
    found = {name: _read_task(name, task, results, num_samples) for name, task in loaded.tasks.items()}
    for name in loaded.groups:
        values = results["results"][name]
        metrics = _read_metrics(values, results["higher_is_better"].get(name, {}))
        metrics = {key.removesuffix(",none"): metric for key, metric in metrics.items()}
        found[name] = TaskResult(metrics, int(values.get("sample_len", 0)), 0, [], [])
    described = {**(settings or {}), "limit": loaded.limit, "system": system, **prompts}
    shared: TaskResults = model.job.broadcast_object(TaskResults(found, described))
    return shared


def _locate(request: Any) -> str:
    return f"task {request.task_name}, document {request.doc_id}"


def _describe(entry: Any) -> str:
    metadata = (entry.cfg or {}).get("metadata")
    about = metadata.get("about") if isinstance(metadata, dict) else None
    return str(about or entry.kind.name.lower().removeprefix("py_"))


def _resolve_names(names: Sequence[str]) -> tuple[list[str], TaskManager]:
    """Return names and paths of tasks, and a manager that knows them.

    lm-eval's own tasks, whose index takes ten seconds, are read only if a name or a group needs them.

    Raises:
        ConfigError: A name is unknown.
        DataError: A YAML file is not valid.
    """
    paths = {
        name: Path(name).expanduser() for name in names if "/" in name or name.endswith((".yaml", ".yml"))
    }
    groups: dict[Path, str] = {}
    for path in paths.values():
        for file in sorted(path.rglob("*.yaml")) if path.is_dir() else [path]:
            try:
                read_regular_file(file, MAX_CONFIGURATION_BYTES)
                if group := yaml_loader.load_yaml(file, resolve_func=False).get("group"):
                    groups[file] = str(group)
            except (OSError, ValueError, TypeError, yaml.YAMLError, RecursionError) as error:
                reason = getattr(error, "strerror", None) or summarize_error(error)
                raise DataError(f"{file}: {reason}; expected a YAML file of a task") from None
    folders = [str(path) for path in (SHIPPED_TASKS, *paths.values()) if path.is_dir()]
    manager = TaskManager(include_path=folders, include_defaults=bool(groups))
    if not groups and not all(manager.match_tasks([name]) for name in names if name not in paths):
        manager = TaskManager(include_path=folders)
    specs: list[str] = []
    for name in names:
        if name not in paths:
            found = manager.match_tasks([name])
        elif (path := paths[name]).is_dir():
            entries = [each for each in manager.task_index.values() if each.kind in (Kind.TASK, Kind.PY_TASK)]
            found = [each.name for each in entries if each.yaml_path.is_relative_to(path)]
        elif path in groups:  # lm-eval takes only tasks by their paths
            found = [groups[path]]
            manager.task_index[groups[path]] = Entry(groups[path], Kind.GROUP, path)
        else:
            found = [str(path)]
        if not found:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            if Path(name).is_dir():
                hint = f"; for the folder write ./{name}"
            raise ConfigError(f"--tasks: there is no task {name!r}{hint}; --tasks list shows what there is")
        specs += found
    return specs, manager


def _check_unsafe(name: str, allow_unsafe: bool) -> None:
    """Refuse a task that runs the model's code, unless it is allowed."""
    if not allow_unsafe:
        raise ConfigError(
            f"task {name}: it runs code that the model has written; allow it with {ALLOW_UNSAFE_TASKS}, in a "
            "container without network and secrets"
        )


@contextmanager
def _explain_load_errors(spec: str) -> Iterator[None]:
    """Turn any exception of loading a task into one line."""
    try:
        yield
    except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
        raise DataError(
            f"task {spec}: its data is not in the cache on this machine, and cannot be downloaded "
            f"({summarize_error(error)}); load it where there is a network, or use a task of --tasks list"
        ) from None
    except Exception:
        with errors_in_one_line(f"task {spec}", DataError):
            raise


@contextmanager
def _guard_code(import_paths: bool) -> Iterator[None]:
    """Refuse code that a user's task names if `import_paths` is false.

    Unknown metrics are always refused: lm-eval would run code of this name from the hub.
    """
    own_folders = (LM_EVAL_TASKS, SHIPPED_TASKS.resolve())

    def import_function(name: str, folder: Path) -> Any:
        if not import_paths and not any(folder.is_relative_to(each) for each in own_folders):
            raise ConfigError(
                f"{folder}: a task names code to run (!function {name}), refused: {NO_IMPORT_PATHS}"
            )
        return _import_function(name, folder)

    def get_metric(name: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric and not import_paths:
            raise ConfigError(
                f"metric {name} is code from the hub (hf_evaluate: true), refused: {NO_IMPORT_PATHS}"
            )
        if not hf_evaluate_metric and name not in metric_registry:
            near = difflib.get_close_matches(name, list(metric_registry), n=3) or sorted(metric_registry)
            raise DataError(f"metric_list has {name!r}, expected a metric such as {', '.join(near)}")
        return _get_metric(name, hf_evaluate_metric)

    yaml_loader._import_func_in_yml = import_function
    lm_eval.api.task.get_metric = get_metric
    try:
        yield
    finally:
        yaml_loader._import_func_in_yml = _import_function
        lm_eval.api.task.get_metric = _get_metric


@contextmanager
def _random_states(states: tuple[Any, ...] | None) -> Iterator[Callable[[], tuple[Any, ...]]]:
    """Set the states of the random number generators inside the context, and restore them afterwards.

    Yield the function that returns the present states.

    Args:
        states: States to set; `None`: those with which lm-eval begins.
    """

    def get() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    def set_to(states: tuple[Any, ...]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

    before = get()
    try:
        if states is None:
            random.seed(0)
            np.random.seed(SEED)
            torch.default_generator.manual_seed(SEED)  # torch.manual_seed would seed all GPUs
        else:
            set_to(states)
        yield get
    finally:
        set_to(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide lm-eval's messages below errors, and the progress bars of datasets."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    had_bars = datasets.utils.logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()


def _read_task(name: str, task: Any, results: Mapping[str, Any], num_samples: int) -> TaskResult:
    """Return the result of a task among lm-eval's results."""
    functions = {getattr(lm_eval.api.metrics, aggregation): aggregation for aggregation in AGGREGATIONS}
    aggregations = {metric: functions.get(function, OTHER) for metric, function in task.aggregation().items()}
    filters = [each.name for each in task._filters]
    documents: dict[int, ScoredDocument] = {}
    samples: list[TaskSample] = []
    for row in results["samples"][name]:
        document = documents.setdefault(row["doc_id"], ScoredDocument(row["doc_id"], row["doc_hash"], {}))
        for metric in row["metrics"]:
            if aggregations.setdefault(metric, "mean") != OTHER:  # lm-eval's default is the mean
                value = row[metric]
                pair = value if isinstance(value, (tuple, list)) else (value, 1)
                document.scores[f"{metric},{row['filter']}"] = float(pair[0]), float(pair[1])
        if row["filter"] == filters[0] and len(samples) < num_samples:
            samples.append(_read_sample(row, task.OUTPUT_TYPE))
    metrics = _read_metrics(
        results["results"][name], task.higher_is_better(), aggregations, [*documents.values()]
    )
    if len(filters) == 1:  # names without the filter
        metrics = {key.partition(",")[0]: metric for key, metric in metrics.items()}
        for document in documents.values():
            for key in list(document.scores):
                document.scores[key.partition(",")[0]] = document.scores.pop(key)
    num_fewshot = int(results["n-shot"].get(name) or 0)
    return TaskResult(metrics, len(documents), num_fewshot, [*documents.values()], samples)


def _read_metrics(
    values: Mapping[str, Any],
    higher_is_better: Mapping[str, bool],
    aggregations: Mapping[str, str] | None = None,
    documents: Sequence[ScoredDocument] = (),
) -> dict[str, TaskMetric]:
    """Return the metrics of a task or group by lm-eval's keys, `metric,filter`."""
    metrics = {}
    for key, value in values.items():
        metric, comma, _ = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float, np.number)):
            continue
        aggregation = (aggregations or {}).get(metric, OTHER)
        scores = [document.scores[key] for document in documents if key in document.scores]
        stderr = compute_stderr(np.array(scores), aggregation)
        metrics[key] = TaskMetric(float(value), stderr, higher_is_better.get(metric), aggregation)
    return metrics


def _read_sample(row: Mapping[str, Any], output_type: str) -> TaskSample:
    """Return a document of lm-eval's results as text."""
    target = str(row["target"])
    answer = row["filtered_resps"][0]
    if output_type == "multiple_choice":
        choices = [str(choice) for _, choice, *_ in row["arguments"]]
        answer = choices[int(np.argmax([logprob for logprob, _ in row["filtered_resps"]]))]
        if isinstance(row["target"], int) and row["target"] < len(choices):
            target = choices[row["target"]]
    elif output_type.startswith("loglikelihood"):
        answer = f"log-likelihood {np.ravel(answer)[0]:.3f}"
    return TaskSample(str(row["arguments"][0][0]), target, str(answer))
