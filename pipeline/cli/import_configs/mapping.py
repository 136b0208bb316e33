"""Shared parts of the readers of other trainers' configurations: tables of keys, the draft, derived numbers.

A section records which of its keys were read. What nothing read is named in the list of what was not taken.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pipeline.config.loading import ConfigFile
from pipeline.config.objective_schema import ObjectiveConfig
from pipeline.errors import ConfigError
from pipeline.files import is_path

NEAR = 0.88  # similarity of two names from which one is taken for a slip of the other
OFF: tuple[Any, ...] = (False, 0, "none", "no", "", [], {})
FILL_IN = "FILL-IN"


class NotTakenError(Exception):
    """Says why a value has no counterpart here."""


@dataclass(frozen=True)
class Key:
    """What a key of theirs becomes."""

    ours: str
    """Dotted key of the recipe, or several with commas between them; `JSON: ...` of the DeepSpeed JSON."""
    convert: Callable[[Any], Any] | None = None
    """Their value -> ours; may raise NotTakenError or TypeError. None: the tool's `settle` reads the key."""


@dataclass(frozen=True)
class Tool:
    """A trainer whose configurations are read."""

    title: str
    keys: Mapping[str, Key]
    without: Mapping[str, str]
    """Keys without a counterpart, and why. One that is switched off means the same here."""
    marks: str
    """Words: keys that its files have, and those of the others do not."""
    defaults: Mapping[str, Any]
    """What holds there where a file says nothing, of keys that change the curve."""
    settle: Callable[[Draft], None]


@dataclass
class Section:
    """Keys of theirs at one place of their file.

    Attributes:
        file: Their file, for messages.
        tree: The keys and values of this place.
        at: Dotted place in the file, with a dot behind it; empty for the whole.
        not_taken: Dotted key -> why, of the whole file.
        defaults: Values that hold where the section says nothing.
        read: Keys that were read.
        below: Sections within this one that were opened.
    """

    file: ConfigFile
    tree: dict[str, Any]
    at: str = ""
    not_taken: dict[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    below: list[Section] = field(default_factory=list)

    def given(self, key: str, convert: Callable[[Any], Any] | None = None) -> Any:
        """Return their value or the default, and record that the key was read; None: neither.

        Raises:
            ConfigError: The value is of another type than `convert` takes.
        """
        self.read.add(key)
        value = self.tree.get(key)
        value = self.defaults.get(key) if value is None else value
        return value if value is None or convert is None else self.converted(key, convert, value)

    def converted(self, key: str, convert: Callable[[Any], Any], value: Any) -> Any:
        """Return the value as `convert` gives it, or raise a ConfigError that names the key."""
        try:
            return convert(value)
        except TypeError as error:
            raise self.refused(key, f"expected {error}, given {value!r}") from None

    def refused(self, key: str, why: str) -> ConfigError:
        """Return the error that refuses the import because of a key."""
        return ConfigError(f"{self.file.at(self.at + key)}: {why}")

    def drop(self, key: str, why: str) -> None:
        """Name a key as not taken, if the file has it."""
        self.read.add(key)
        if self.tree.get(key) is not None:
            self.not_taken[self.at + key] = why

    def sections(self, key: str) -> list[Section]:
        """Open the sections of a list (or a single one) of mappings; a plain name is a mapping of its `path`.

        Raises:
            ConfigError: An entry is neither.
        """
        given = self.given(key) or []
        is_list = isinstance(given, list)
        opened = []
        for number, each in enumerate(given if is_list else [given]):
            entry = {"path": each} if isinstance(each, str) else each
            if not isinstance(entry, dict) or not all(isinstance(name, str) for name in entry):
                raise self.refused(key, f"expected a mapping of keys to values, given {each!r}")
            place = f"{self.at}{key}.{f'{number}.' if is_list else ''}"
            opened.append(Section(self.file, entry, place, self.not_taken))
        self.below += opened
        return opened

    def unread(self) -> Iterator[tuple[Section, str]]:
        """Yield the keys with a value that nothing has read, those of opened sections included."""
        for key, value in self.tree.items():
            if key not in self.read and value is not None:
                yield self, key
        for section in self.below:
            yield from section.unread()


@dataclass
class Draft:
    """The recipe as far as it is known."""

    file: ConfigFile
    tool: Tool
    gpus: int
    folder: Path
    """Where recipe and JSON will be."""
    kind: str | None = None
    """Which of the tool's trainers was named on the command line."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """By dotted key, of two parts at most."""
    remarks: dict[str, str] = field(default_factory=dict)
    """What was decided, by dotted key."""
    fill_in: list[str] = field(default_factory=list)
    """What is left to the user."""
    json: dict[str, Any] = field(default_factory=dict)
    """For the JSON: `bf16`, `fp16` (true, false, "auto"), `tf32`, `compile`, `theirs`, `split`."""
    files: dict[Path, str] = field(default_factory=dict)
    """Further files to write, by path."""
    has_recipe: bool = True
    """Whether their file says what is trained, not only how the work is split."""

    def __post_init__(self) -> None:
        self.top = Section(self.file, self.file.tree, defaults=self.tool.defaults)
        self.not_taken = self.top.not_taken
        self.given, self.drop = self.top.given, self.top.drop

    def put(self, ours: str, value: Any, remark: str = "") -> None:
        """Set a key of the recipe."""
        self.recipe[ours] = value
        if remark:
            self.remarks[ours] = remark

    def found(self, name: str) -> Path | None:
        """Return a file that theirs names, relative to this folder or to theirs."""
        places = (Path(name).expanduser(), self.file.path.parent / name)
        return next((path.absolute() for path in places if path.exists()), None)

    def fill(self) -> None:
        """Take their keys, the table's own conversions first, then what several keys make.

        Raises:
            ConfigError: A key looks like a slip of a known one, or has a value that cannot be imported.
        """
        for key in self.file.tree:
            if not isinstance(key, str):
                raise ConfigError(f"{self.file.path}: {key!r} is no name of a key")
        for key, row in self.tool.keys.items():
            if row.convert is not None and self.given(key) not in (None, ""):
                try:
                    self.put(row.ours, self.given(key, row.convert))
                except NotTakenError as reason:
                    self.drop(key, str(reason))
        self.tool.settle(self)
        for section, key in list(self.top.unread()):
            self._name(section, key)

    def _name(self, section: Section, key: str) -> None:
        """Name a key that nothing has read, unless it is switched off and means the same here."""
        if section is not self.top:
            section.drop(key, f"{self.tool.title}'s key has no counterpart here")
        elif key in self.tool.without:
            if section.tree[key] not in OFF or self.tool.without[key].startswith("not off: "):
                section.drop(key, self.tool.without[key].removeprefix("not off: "))
        elif key in self.tool.keys:
            if section.tree[key] not in OFF:
                section.drop(key, f"nothing in such a run reads it ({self.tool.keys[key].ours})")
        elif slip := meant(key, self.tool):
            raise section.refused(key, f'unknown to {self.tool.title} (did you mean "{slip}"?)')
        else:
            section.drop(key, f"not known to the tables of {self.tool.title}; read docs/configuration.md")


def meant(key: str, tool: Tool) -> str | None:
    """Return the key of the tool of which this one is a slip."""
    known = {*tool.keys, *tool.without}
    if key.removeprefix("no_") in known:  # how a command line switches off
        return None
    near = difflib.get_close_matches(key, known, n=1, cutoff=NEAR)
    return near[0] if near else None


def number(value: Any) -> float | int:
    """Return a number, also one that YAML reads as a text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise TypeError("a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number")
    return value


def numbers(value: Any) -> list[float]:
    """Return a list of numbers."""
    if not isinstance(value, list):
        raise TypeError("a list of numbers")
    return [float(number(each)) for each in value]


def whole(value: Any) -> int:
    """Return a whole number."""
    if number(value) not in (float("inf"), float("-inf")) and number(value) == int(number(value)):
        return int(number(value))
    raise TypeError("a whole number")


def flag(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise TypeError("a text")
    return value


def names(value: Any) -> list[str]:
    """Return a list of names, or names with commas between them."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError("names")
    return value


def reasons(table: str) -> dict[str, str]:
    """Read their key -> why it has no counterpart from lines `why: key key`; an indented line goes on."""
    found: dict[str, str] = {}
    for line in table.strip().replace("\n  ", " ").splitlines():
        why, _, keys = line.rpartition(": ")
        found |= dict.fromkeys(keys.split(), why)
    return found


def keys(table: str) -> dict[str, Key]:
    """Read the keys that `settle` takes from lines `ours: theirs theirs`."""
    return {key: Key(ours) for key, ours in reasons(table).items()}


def as_markdown(tool: Tool) -> str:
    """Return what becomes of a tool's keys, as two tables."""
    ours: dict[str, list[str]] = {}
    for key, row in tool.keys.items():
        ours.setdefault(row.ours, []).append(f"`{key}`")
    why: dict[str, list[str]] = {}
    for key, reason in tool.without.items():
        why.setdefault(reason.removeprefix("not off: "), []).append(f"`{key}`")
    lines = ["| theirs | ours |", "|---|---|"]
    lines += [f"| {', '.join(theirs)} | {_quoted(mine)} |" for mine, theirs in ours.items()]
    lines += ["", "| no counterpart | why |", "|---|---|"]
    lines += [f"| {', '.join(theirs)} | {reason} |" for reason, theirs in why.items()]
    return "\n".join(lines)


def _quoted(ours: str) -> str:
    start = "JSON: " if ours.startswith("JSON: ") else ""
    return start + ", ".join(f"`{key}`" for key in ours.removeprefix("JSON: ").split(", "))


def listed(tools: Iterable[Tool]) -> str:
    """Return `LLaMA-Factory, Axolotl or TRL`."""
    *first, last = [tool.title for tool in tools]
    return f"{', '.join(first)} or {last}"


SCHEDULES = {
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "cosine_with_min_lr": ("cosine", 0.0),
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
    "warmup_stable_decay": ("wsd", 0.0),
}
"""transformers' schedules -> ours, and the share of the rate that is left at the end."""


def optimizer(value: Any) -> str:
    """Return the recipe's kind for transformers' name."""
    name = text(value).lower()
    if name in ("adafactor", "sgd"):
        return name
    if re.fullmatch(r"adamw(_torch|_torch_fused|_hf|_apex_fused|_anyprecision)?", name):
        return "adamw"
    if re.fullmatch(
        r"(paged_|ao_|optimi_)?adamw(_bnb)?(_8bit|_4bit|_32bit|_torch_8bit|_torch_4bit|_fp8)?", name
    ):
        raise NotTakenError(f"{name} is AdamW with states of fewer bits; the recipe has AdamW in fp32")
    raise NotTakenError(f"{name} is not built here; the recipe has AdamW")


def run_name(value: Any) -> str:
    """Return a name that a run can have."""
    return re.sub(r"[^\w.-]+", "-", text(value))[:128]


def settle_batch(draft: Draft, micro: str, accumulation: str) -> None:
    """Put the samples of a step; theirs are those of a device."""
    size, steps = draft.given(micro, whole), draft.given(accumulation, whole)
    told = f"{size} (a GPU) x {steps} (accumulated) x {draft.gpus} (GPUs, --gpus)"
    if min(size, steps) < 1:
        raise draft.top.refused(micro, f"{told} is no number of samples")
    finds = draft.given("auto_find_batch_size", flag)
    draft.put("batch.micro_batch_size", "auto" if finds else size, "the largest that fits" if finds else "")
    draft.put("batch.global_batch_size", size * steps * draft.gpus, told)


def settle_length(draft: Draft, epochs: str) -> None:
    """Put the steps of the run, or its epochs."""
    steps, passes = draft.given("max_steps", whole), draft.given(epochs, number)
    if steps is not None and steps > 0:
        draft.put("max_steps", steps)
    else:
        draft.put("max_epochs", passes)


def share_of_run(draft: Draft, share: float) -> int | str:
    """Return a share of the run's steps as steps or as epochs, whichever the run is measured in."""
    if "max_steps" in draft.recipe:
        return math.ceil(share * draft.recipe["max_steps"])
    return in_epochs(share * draft.recipe["max_epochs"])


def in_epochs(count: float) -> str:
    """Return a number of epochs as the recipe writes it."""
    return f"{count:.12g} epochs"


def settle_schedule(draft: Draft, kind: str) -> None:
    """Put the shape of the rate and its warm-up."""
    given = draft.given(kind, text)
    [more] = draft.top.sections("lr_scheduler_kwargs") or [Section(draft.file, {})]
    shape, last = SCHEDULES.get(given, (None, None))
    if shape == "wsd" and more.given("decay_type") != "linear":
        shape = None
    if shape is None:
        draft.drop(kind, f"{given} is no shape of schedule.kind; the recipe's default holds")
    else:
        draft.put("schedule.kind", shape, "" if given in draft.file.tree.values() else "their default")
        if shape == "wsd" and (steps := more.given("num_decay_steps", whole)):
            draft.put("schedule.decay_steps", steps)
    if last is not None:
        ratios = (draft.given("cosine_min_lr_ratio", number), *(more.given(key, number) for key in MINIMA))
        last = next((ratio for ratio in ratios if ratio), last)
        if floor := more.given("min_lr", number):
            last = floor / draft.given("learning_rate", number)
        draft.put("schedule.min_learning_rate_ratio", float(last))
    if given == "constant":
        for key in ("warmup_steps", "warmup_ratio"):
            draft.drop(key, "transformers' constant schedule has no warm-up")
        draft.put("schedule.warmup", 0)
        return
    steps, share = draft.given("warmup_steps", number), draft.given("warmup_ratio", number)
    if steps is not None and draft.file.tree.get("warmup_ratio") is None:
        share = None
    if steps and steps >= 1:
        draft.put("schedule.warmup", whole(steps))
    else:  # transformers 5 has the share in warmup_steps
        draft.put("schedule.warmup", float(steps or share or 0.0) or 0)


MINIMA = ("min_lr_rate", "min_lr_ratio")


def settle_cadence(draft: Draft, has_eval: bool) -> None:
    """Put when a checkpoint is written and when an evaluation runs."""
    for ours, what, default in (("checkpoint.every", "save", "steps"), ("eval.every", "eval", "no")):
        of_kind = (f"{what}_strategy", f"{what}_steps", f"{what}s_per_epoch")
        _, every, parts = (draft.given(key) for key in of_kind)
        if what == "eval" and not has_eval:
            for key in of_kind:
                draft.drop(key, "nothing is held out to evaluate on")
            continue
        strategy = draft.file.tree.get(of_kind[0])
        if strategy is None:
            strategy = "steps" if every else draft.tool.defaults.get(of_kind[0], default)
        if parts:
            per_run = draft.top.converted(of_kind[2], number, parts) * draft.given("num_epochs", number)
            draft.put(ours, share_of_run(draft, 1 / per_run))
        elif strategy == "epoch":
            draft.put(ours, in_epochs(1))
        elif strategy in (False, "no"):
            draft.put(ours, 0)
        elif strategy == "steps" and every is not None:
            steps = draft.top.converted(of_kind[1], number, every)
            draft.put(ours, share_of_run(draft, steps) if 0 < steps < 1 else whole(steps))
        elif strategy != "steps":
            draft.drop(of_kind[0], f"{strategy} is no cadence here")
    best = draft.given("load_best_model_at_end", flag)
    if best and draft.recipe.get("eval.every") and _is_by_loss(draft):
        if draft.recipe["checkpoint.every"] == draft.recipe["eval.every"]:
            draft.put("checkpoint.keep_best", True)
        else:
            draft.drop("load_best_model_at_end", "give checkpoint.every and eval.every one cadence for it")
    elif best:
        draft.drop("load_best_model_at_end", "it needs evaluations, and their loss as the measure")


def _is_by_loss(draft: Draft) -> bool:
    metric, greater = draft.given("metric_for_best_model"), draft.given("greater_is_better")
    if metric in (None, "loss", "eval_loss") and not greater:
        return True
    draft.drop("metric_for_best_model", "set eval.best_metric to the name that the metric has here")
    draft.drop("greater_is_better", "set eval.best_mode")
    return False


def settle_adapter(
    draft: Draft,
    *,
    rank: str,
    alpha: float | None,
    targets: list[str] | None,
    weights: str | None = None,
    flags: tuple[str, str] = ("use_rslora", "use_dora"),
    to_save: str = "lora_modules_to_save",
    told_of_alpha: str = "",
) -> None:
    """Put the section of a low-rank adapter; `flags`: their keys of rsLoRA and DoRA."""
    width = draft.given(rank, whole)
    rs, dora = (draft.given(key, flag) for key in flags)
    if weights is not None:
        draft.put("adapter.weights", weights, "brings its rank, alpha and targets")
    elif alpha is not None:
        if dora and rs:  # alpha / sqrt(rank), said in the words of alpha / rank
            alpha, told_of_alpha = alpha * math.sqrt(width), f"{alpha:g} x sqrt(rank), for {flags[0]}"
        draft.put("adapter.rank", width)
        draft.put("adapter.alpha", float(alpha), told_of_alpha)
        if targets:
            draft.put("adapter.targets", targets)
    draft.put("adapter.kind", "dora" if dora else "rslora" if rs else "lora")
    draft.put("adapter.dropout", float(draft.given("lora_dropout", number) or 0.0))
    if saved := draft.given(to_save, names):
        draft.put("adapter.modules_to_save", saved)
    if ratio := draft.given("loraplus_lr_ratio", number):
        group = {"patterns": ["*.lora_B.*"], "learning_rate_factor": float(ratio)}
        draft.put("optimizer.groups", [group], "LoRA+")


def settle_bits(draft: Draft, key: str, bits: int | None) -> None:
    """Put in how many bits the base is held."""
    if bits == 4:
        draft.put("adapter.quantize", "nf4")
    elif bits:
        draft.drop(key, f"{bits} bits: a base is held in the precision of the run, or in 4 bits")


def settle_reports(draft: Draft, key: str = "report_to") -> None:
    """Put where numbers go besides metrics.jsonl."""
    where = set(draft.given(key, names) or [])
    draft.put("wandb.mode", "auto" if where & {"wandb", "all"} else "disabled")
    if where & {"tensorboard", "all"}:
        draft.put("log.tensorboard", True)
    if others := sorted(where - {"wandb", "all", "tensorboard", "none"}):
        draft.drop(key, f"{', '.join(others)}: a tracker of your own (docs/your-own-tracker.md)")


def settle_resume(draft: Draft) -> None:
    """Put whether a run resumes; checkpoints of another trainer cannot be resumed."""
    given = draft.given("resume_from_checkpoint")
    if isinstance(given, str):
        draft.drop("resume_from_checkpoint", "start from its weights: adapter.weights, model.weights")
    elif given:
        draft.put("checkpoint.resume", "auto")


def settle_precision(draft: Draft, default: Any = False) -> None:
    """Note what the JSON needs of the keys: precision, their JSON, and how the work is split without it."""
    bf16, fp16 = draft.given("bf16"), draft.given("fp16") is True
    draft.json["bf16"] = bf16 if bf16 in (True, False, "auto") else False if fp16 else default
    if bf16 is not None and bf16 not in (True, False, "auto"):
        draft.drop("bf16", f"{bf16!r}: true, false or auto")
    draft.json["fp16"] = fp16
    for key, ours in (("tf32", "tf32"), ("torch_compile", "compile")):
        if (value := draft.given(key)) in (True, "auto"):
            draft.json[ours] = value
    draft.json["theirs"] = draft.given("deepspeed")
    shards = draft.given("fsdp")
    fsdp = draft.given("fsdp_config")
    draft.json["split"] = "zero3" if shards or fsdp else "zero2"
    if draft.json["split"] == "zero3" and not draft.json["theirs"]:
        for key in ("fsdp", "fsdp_config"):
            draft.drop(key, "the weights are cut by ZeRO 3; its JSON says the rest")


def settle_recomputing(draft: Draft, default: bool, key: str = "gradient_checkpointing") -> None:
    """Put activation checkpointing."""
    given = draft.given(key)
    is_on = default if given is None else given
    if is_on is True:
        draft.put("model.activation_checkpointing", "full", "" if given else "their default")
    elif is_on == "offload":
        draft.put("model.activation_checkpointing", "full")
        draft.put("model.activation_offload", True)
    elif is_on is not False:
        draft.drop(
            key, "full recomputation, with or without offload, is there: model.activation_checkpointing"
        )


def settle_terms(draft: Draft, kind: str, terms: dict[str, str], defaults: dict[str, float]) -> None:
    """Put the numbers of an objective that its kind has: their key -> its key; `defaults`: by their key."""
    draft.put("objective.kind", kind)
    for key, name in terms.items():
        value = draft.given(key, number)
        value = defaults.get(key) if value is None else value
        if value is not None and _has_term(kind, name):
            draft.put(f"objective.{name}", float(value))
        elif value:
            draft.drop(key, f"objective.kind {kind} has no such term")


def _has_term(kind: str, name: str) -> bool:
    of_kind = {tag.tag: section for section, tag in map(get_args, get_args(get_args(ObjectiveConfig)[0]))}
    return name in of_kind[kind].model_fields


def settle_betas(draft: Draft) -> None:
    """Put both of Adam's betas."""
    draft.put("optimizer.betas", [float(draft.given(key, number)) for key in ("adam_beta1", "adam_beta2")])


TABLES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md")
LOADERS = ("json", "csv", "parquet", "text", "arrow")  # of `datasets`, in place of a name
Source = dict[str, Any]  # keys of a source of the recipe


def find_source(draft: Draft, entry: Section) -> Source:
    """Return the source that `datasets.load_dataset` would read: a hub name or a path, with its files."""
    name, subset = entry.given("path", text), entry.given("name", text)
    split, files = entry.given("split", text), entry.given("data_files", names) or []
    if not name:
        raise entry.refused("path", "expected the path or the name of a data set")
    if not files and (is_path(name) or Path(name).suffix in TABLES or draft.found(name)):
        files = [name]
    revision = entry.given("revision", text)
    if not files:
        given = {"dataset": name, "subset": subset, "split": split, "revision": revision}
        return {key: value for key, value in given.items() if value and value != "train"}
    if name not in (*files, *LOADERS) and not is_path(name):
        draft.fill_in.append(f"data.paths: the files {', '.join(files)} of {name}, on this machine")
    if any((Path(name) / saved).is_file() for saved in ("state.json", "dataset_dict.json")):
        return {"dataset": str(Path(name).absolute())}
    for key, value in (("split", split), ("name", subset)):
        if value and value != "train":
            entry.drop(key, f"all of {', '.join(files)} is read")
    return {"paths": [str(local(draft, each)) for each in files]}


def local(draft: Draft, name: str | Path) -> Path:
    """Return where a file is; one that is not there is left to the user."""
    found = draft.found(str(name))
    if found is None:
        draft.fill_in.append(f"data.paths: {name} is not there")
    return found or Path(name)


def put_sources(draft: Draft, kind: str, sources: list[Source]) -> None:
    """Put the kind of data and where they come from."""
    draft.put("data.kind", kind)
    if not sources:
        sources = [{"paths": [f"{FILL_IN}.jsonl"]}]
        draft.fill_in.append("data.paths: the files to learn from; theirs names none")
    if all(set(source) == {"paths"} for source in sources):
        draft.put("data.paths", [path for source in sources for path in source["paths"]])
    else:
        draft.put("data.sources", sources)


def put_eval_sets(draft: Draft, sources: dict[str, Source]) -> None:
    """Put further sets to evaluate on."""
    if sources:
        draft.put("data.eval_sets", {source_name(name): each for name, each in sources.items()})


def source_name(name: str) -> str:
    """Return what a source can be called."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name).lstrip("-_.") or "eval"


def held_out(draft: Draft, key: str, value: float | None) -> bool:
    """Put the share that is held out, and return whether anything is."""
    share = value or 0.0
    if share >= 1:
        draft.drop(key, "a number of rows; write their share as data.eval_fraction")
    draft.put("data.eval_fraction", float(share) if share < 1 else 0.0)
    return 0 < share < 1 or "data.eval_sets" in draft.recipe


def rows_of(source: Source) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSON files that are at hand, up to the first that is none."""
    for path in map(Path, source.get("paths", [])):
        try:
            with path.open(encoding="utf-8") as file:
                lines = map(json.loads, filter(str.strip, file))
                rows = json.load(file) if path.suffix == ".json" else lines
                yield from (row for row in rows if isinstance(row, dict))
        except (OSError, ValueError, RecursionError, TypeError):
            return


def put_preferences(draft: Draft, length: int) -> None:
    """Put what all preference data have: an example is a sample, whole in a sequence."""
    draft.put("data.sequence_length", 2 * length, f"two answers, each of {length} tokens with its prompt")
    draft.put("data.answer_length", length)
    draft.put("data.packing", "none", "a sample is an example, as there")


def tell_of_long_rows(draft: Draft, key: str, theirs: str = "cut off") -> None:
    """Name what happens to rows that are longer than a sequence."""
    draft.not_taken[f"{key} of longer rows"] = f"a row that does not fit is left out here, and {theirs} there"


TEMPLATE = "template.jinja"
DIVIDE = "{{ divide }}"
PLACEHOLDER = re.compile(r"\{(\w*)\}")


def literal(text: str) -> str:
    """Return Jinja that writes a text as it is."""
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""


def column(name: str) -> str:
    """Return the Jinja expression of a field of the row."""
    return f"row[{json.dumps(name, ensure_ascii=False)}]"


def require(expression: str) -> str:
    """Return Jinja that refuses a row in which a field is missing, which would be written as nothing."""
    return choose(f"{expression} is not defined", refusal(f"the row has no {expression}"))


def filled(form: str, expressions: Mapping[str, str]) -> str:
    """Return Jinja for a text with `{name}` in it, each replaced by what its expression gives.

    Raises:
        KeyError: A name has no expression, or a brace is doubled.
    """
    if "{{" in form or "}}" in form:
        raise KeyError("{")
    pieces = PLACEHOLDER.split(form)
    return "".join(
        "{{ " + expressions[piece] + " }}" if at % 2 else literal(piece) for at, piece in enumerate(pieces)
    )


def choose(condition: str, yes: str, no: str = "") -> str:
    """Return Jinja that writes one or the other."""
    return f"{{% if {condition} %}}{yes}{f'{{% else %}}{no}' if no else ''}{{% endif %}}"


def refusal(why: str) -> str:
    """Return Jinja that refuses the row."""
    return f"{{{{ raise_exception({json.dumps(why)}) }}}}"


def learned(body: str) -> str:
    """Return Jinja whose text counts in the loss."""
    return f"{{% generation %}}{body}{{% endgeneration %}}"


def with_tokens(expression: str) -> str:
    """Return Jinja that writes what a row says, special tokens in it as tokens."""
    return f"{{{{ {expression}.replace('\\ud800', '').replace('\\ud801', '') }}}}"


def of_row(body: str) -> str:
    """Return the template of a row that is written at once."""
    return f"{{% for turn in messages %}}{{% set row = turn.row %}}{body}{{% endfor %}}"


def of_answers(prompt: str, answer: str) -> str:
    """Return the template of a prompt and a judged answer; `turn.content` is the answer's side."""
    return of_row(choose("turn.role == 'user'", prompt, learned(answer)))


def put_row_template(draft: Draft, template: str, told: str) -> None:
    """Write the template beside the recipe, and let it read the rows."""
    path = draft.folder.absolute() / TEMPLATE
    draft.files[path] = template + "\n"
    draft.put("data.layout", "row", told)
    draft.put("data.chat_template", str(path))
    draft.put("data.append_eos", False)
