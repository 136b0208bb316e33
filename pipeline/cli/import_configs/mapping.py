"""Maps another trainer's configuration to a draft of a recipe and a DeepSpeed JSON, by the trainer's table.

Each key of the imported file, at any depth, gets one of three results: it is imported, it is reported as
without effect, or it is left open with a line on what to do. Nothing is guessed: a setting is left open if it
would change a single token of the training here.

In names and comments of this folder, "theirs" are the imported file and its keys, "ours" are the recipe's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pipeline.cli.import_configs.conversions import Conversion, KeyMapping, LeftOpenError, to_names, to_text
from pipeline.cli.import_configs.unmapped_keys import NO_EFFECT, NO_EXACT_COUNTERPART
from pipeline.config.loading import ConfigFile
from pipeline.config.model_schema import AdapterConfig
from pipeline.config.objective_schema import ObjectiveConfig
from pipeline.config.recipe import FILL_IN
from pipeline.errors import ConfigError
from pipeline.files import is_path

TYPO_SIMILARITY = 0.88
"""Similarity by difflib, 0 to 1, from which an unknown key is taken for a typo of a known one."""
OFF_VALUES: tuple[Any, ...] = (False, 0, "none", "no", "", [], {})
"""Values that switch a feature off."""
DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md")
"""Suffixes by which a name is taken for a file, and not for a data set on the hub."""
DATASET_FIELDS = ("path", "name", "split", "data_files", "revision")
"""Arguments of `datasets.load_dataset` that an entry in a list of data sets may have."""
UNUSED = "a run of this kind does not use it"
"""Reason for which a key has no effect."""
Source = dict[str, Any]
"""An entry of data.sources in the recipe."""


@dataclass(frozen=True)
class TrainerTable:
    """Table of another trainer's keys. Keys are dotted, and `*` stands for an index of a list."""

    title: str
    """Name of the trainer, for messages."""
    rows: Mapping[str, KeyMapping]
    """Key of the trainer -> keys here."""
    import_values: Callable[[ImportDraft], None]
    """Function that imports the keys whose rows have no conversion, once all others are imported."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key -> default value of that trainer, for keys that change the loss curve."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a key in transformers or TRL -> name in this trainer, if they differ."""


@dataclass
class ImportDraft:
    """Recipe and DeepSpeed JSON while the keys of another trainer's file are imported.

    Attributes:
        theirs: Values of the imported file, by dotted key.
        keys_read: Keys of theirs that were read, including keys that only have a default.
    """

    file: ConfigFile
    """Imported file."""
    tool: TrainerTable
    """Table of the trainer to which the file belongs."""
    gpus: int
    """Number of GPUs that the other run used."""
    trainer: str = ""
    """Trainer of TRL that the command line names, such as `dpo`. It is not used for other tools."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Dotted key of the recipe, of two parts at most -> value."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Dotted key of the recipe -> reason for its value, which is written as a comment."""
    json: dict[str, Any] = field(default_factory=dict)
    """Dotted key of the JSON -> value that replaces the one in `base`."""
    base: str | dict[str, Any] = "zero2"
    """JSON to start from: a path that the imported file names, the JSON itself, or `zero2` or `zero3`."""
    has_recipe: bool = True
    """Whether the imported file says what is trained, and not only how the work is split."""
    fill_in: list[str] = field(default_factory=list)
    """Lines `key: what to write`, for keys of the recipe that the user has to write."""
    left_open: dict[str, str] = field(default_factory=dict)
    """Key of theirs without an exact counterpart -> what the user can do about it."""
    no_effect: dict[str, str] = field(default_factory=dict)
    """Key of theirs -> reason for which it changes nothing here."""

    def __post_init__(self) -> None:
        self.theirs = dict(_flatten(self.file, self.file.tree, self.tool))
        self.keys_read: set[str] = set()
        self._their_keys: dict[str, str] = {}  # key of the recipe -> key of theirs from which it was imported

    def get_stated(self, name: str) -> Any:
        """Return a value of the imported file, not a default. `None` if it has none, or an empty text.

        Args:
            name: Key of theirs, or its name in transformers or TRL.
        """
        value = self.theirs.get(self.tool.names.get(name, name))
        return None if value == "" else value

    def read_value(self, name: str, convert: Conversion | None = None) -> Any:
        """Return the converted value of a key or its default, and record that the key was read.

        A value that the conversion cannot carry over is recorded as left open.

        Args:
            name: Key of theirs, or its name in transformers or TRL.
            convert: Conversion of the value; `None` for none.

        Returns:
            `None` if there is neither a value nor a default, or if the value is left open.

        Raises:
            ConfigError: The value has another type than `convert` takes.
        """
        key = self.tool.names.get(name, name)
        self.keys_read.add(key)
        stated = self.get_stated(name)
        value = self.tool.defaults.get(key) if stated is None else stated
        if value is None or convert is None:
            return value
        try:
            return convert(value)
        except TypeError as error:
            raise self.make_error(key, f"expected {error}, given {value!r}") from None
        except LeftOpenError as reason:
            self.left_open[key] = f"{value}: {reason}"
            return None

    def make_error(self, name: str, reason: str) -> ConfigError:
        """Return the error that refuses the import because of a key of theirs."""
        return ConfigError(f"{self.file.describe_key(self.tool.names.get(name, name))}: {reason}")

    def leave_open(self, name: str, what_to_do: str) -> None:
        """Report a key of theirs as left open if the imported file has it."""
        if self.get_stated(name) is not None:
            self.left_open[self.tool.names.get(name, name)] = what_to_do

    def put(self, ours: str, value: Any, remark: str = "") -> None:
        """Set a key of the recipe, with an optional comment on it."""
        self.recipe[ours] = value
        if remark:
            self.remarks[ours] = remark

    def discard(self, ours: str, reason: str) -> None:
        """Remove a key from the recipe, and report the key of theirs as without effect if the file has it."""
        key = self._their_keys.get(ours, ours)
        if self.recipe.pop(ours, None) is not None and self.get_stated(key) is not None:
            self.no_effect[key] = reason

    def ask(self, ours: str, placeholder: Any, what_to_write: str) -> None:
        """Leave a key of the recipe to the user: set it to a placeholder, which a run refuses."""
        self.recipe[ours] = placeholder
        self.fill_in.append(f"{ours}: {what_to_write}")

    def list_entries(self, name: str) -> list[str]:
        """Return the dotted keys of the entries of a list in the imported file: `datasets.0`, ..."""
        matches = (re.match(rf"{name}\.\d+(?=\.)", key) for key in self.theirs)
        return list(dict.fromkeys(match[0] for match in matches if match))

    def find_path(self, name: str) -> Path | None:
        """Return the path of a file in the working directory or beside the imported file.

        `None` if it exists in neither.
        """
        candidates = (Path(name).expanduser(), self.file.path.parent / name)
        return next((path.absolute() for path in candidates if path.exists()), None)

    def import_keys(self) -> None:
        """Import or report every key of theirs, and the trainer's defaults.

        Keys with a conversion are imported first, then `import_values` is called, and then the keys that
        nothing has read are reported.

        Raises:
            ConfigError: A key looks like a typo of a known one, or a value is not supported.
        """
        for key in dict.fromkeys([*self.tool.defaults, *self.theirs]):
            row = self.tool.rows.get(_make_pattern(key))
            if row is None or row.convert is None:
                continue
            value = self.read_value(key, row.convert)
            if value is None:
                continue
            self._their_keys[row.ours] = key
            if row.ours.startswith("JSON: "):
                self.json[row.ours.removeprefix("JSON: ")] = value
            else:
                self.put(row.ours, value)
        self.tool.import_values(self)
        self._remove_unused_terms()
        for key in self.theirs:
            if key not in self.keys_read and self.get_stated(key) is not None:
                self._report_unread(key)

    def _remove_unused_terms(self) -> None:
        """Remove keys of `adapter` and `objective` that this run does not use.

        The key of theirs is left open if the run has such a section without this key, and without effect if
        the run has no such section.
        """
        kind = self.recipe.get("objective.kind")
        # ObjectiveConfig is a union of sections, each annotated with the tag of its kind.
        objectives = {
            tag.tag: section for section, tag in map(get_args, get_args(get_args(ObjectiveConfig)[0]))
        }
        fields = {
            "objective": objectives[kind].model_fields if kind else {},
            "adapter": AdapterConfig.model_fields if "adapter.kind" in self.recipe else {},
        }
        for ours in list(self.recipe):
            section, _, name = ours.partition(".")
            if section not in fields or name in fields[section]:
                continue
            if fields[section]:
                key = self._their_keys.get(ours, ours)
                self.leave_open(key, f"{section}.kind {self.recipe[f'{section}.kind']} has no such key")
                del self.recipe[ours]
            else:
                self.discard(ours, UNUSED)

    def _report_unread(self, key: str) -> None:
        """Report a key that nothing has read: as without effect, or as left open.

        Raises:
            ConfigError: The key looks like a typo of a known one.
        """
        pattern = _make_pattern(key)
        if pattern in self.tool.rows:
            self.no_effect[key] = UNUSED
        elif pattern in NO_EFFECT:
            self.no_effect[key] = NO_EFFECT[pattern]
        elif pattern in NO_EXACT_COUNTERPART and self.theirs[key] in OFF_VALUES:
            self.no_effect[key] = "its value switches it off, and it is off here"
        elif pattern in NO_EXACT_COUNTERPART:
            self.left_open[key] = NO_EXACT_COUNTERPART[pattern]
        elif slips := difflib.get_close_matches(
            key, [*self.tool.rows, *NO_EFFECT, *NO_EXACT_COUNTERPART], 1, TYPO_SIMILARITY
        ):
            raise self.make_error(key, f'unknown to {self.tool.title} (did you mean "{slips[0]}"?)')
        else:
            self.left_open[key] = "not in the import's table; the keys: docs/reference/configuration.md"


def _make_pattern(key: str) -> str:
    """Return the key as tables have it, with `*` in place of indices of lists."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", key)


def _flatten(
    file: ConfigFile, tree: Mapping[Any, Any], tool: TrainerTable, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a file, as deep as the tables have keys.

    A plain name in a list of data sets is the `path` of an entry.

    Args:
        file: Imported file.
        tree: The whole file, or a mapping within it.
        tool: Table of the trainer.
        prefix: Dotted key of `tree` in the file and a dot; empty for the whole file.

    Raises:
        ConfigError: A key is no text, or a value is no mapping although the tables have keys below it.
    """
    for key, value in tree.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"{file.path}: {prefix}{key!r}: expected a key that is a text; write it in quotes"
            )
        dotted = f"{prefix}{key}"
        pattern = _make_pattern(dotted)
        all_patterns = () if pattern in tool.rows else (*tool.rows, *NO_EXACT_COUNTERPART, *NO_EFFECT)
        patterns_below = [each for each in all_patterns if each.startswith(f"{pattern}.")]
        if value is None or not patterns_below:
            yield dotted, value
            continue
        is_list = patterns_below[0].startswith(f"{pattern}.*")
        entries = value if isinstance(value, list) else [value]
        for number, entry in enumerate(entries):
            mapping = {"path": entry} if isinstance(entry, str) and is_list else entry
            if not isinstance(mapping, dict):
                raise ConfigError(f"{file.describe_key(dotted)}: expected keys and values, given {entry!r}")
            yield from _flatten(file, mapping, tool, f"{dotted}.{number}." if is_list else f"{dotted}.")


def find_source(draft: ImportDraft, keys: Mapping[str, str]) -> Source:
    """Return the source of the recipe for the data that `datasets.load_dataset` would read.

    Files that do not exist are left to the user, and a subset, split or revision of files is left open.

    Args:
        draft: Draft whose imported file names the data.
        keys: Field of DATASET_FIELDS -> dotted key of theirs. It has at least `path`.

    Raises:
        ConfigError: The path is missing, or a value has the wrong type.
    """
    files = draft.read_value(keys["data_files"], to_names) if "data_files" in keys else None
    values = {name: draft.read_value(key, to_text) for name, key in keys.items() if name != "data_files"}
    path = values.pop("path")
    if not path:
        raise draft.make_error(keys["path"], "expected the path or the name of a data set")
    existing = draft.find_path(path)
    if existing is not None and _is_saved_dataset(existing):
        path = str(existing)
        files = None
    elif not files:
        is_file = existing is not None or is_path(path) or Path(path).suffix in DATA_SUFFIXES
        files = [path] if is_file else None
    selection = {name: value for name, value in values.items() if value and value != "train"}
    if not files:
        renamed = {"subset" if name == "name" else name: value for name, value in selection.items()}
        return {"dataset": path, **renamed}
    for name in selection:
        draft.leave_open(keys[name], f"not imported: all of {', '.join(files)} is read")
    return {"paths": [locate_file(draft, file) for file in files]}


def _is_saved_dataset(path: Path) -> bool:
    """Return whether a path is a folder that `datasets` has saved."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def locate_file(draft: ImportDraft, name: str) -> str:
    """Return the absolute path of a file. If it does not exist, return the name and leave it to the user."""
    path = draft.find_path(name)
    if path is None:
        draft.fill_in.append(f"data.paths: {name} does not exist here")
    return str(path or name)


def put_sources(draft: ImportDraft, kind: str, sources: list[Source]) -> None:
    """Set the kind of data and its sources. Without sources, leave the files to the user."""
    draft.put("data.kind", kind)
    if not sources:
        draft.ask("data.paths", [f"{FILL_IN}.jsonl"], "the files to train on; the imported file names none")
    elif all(set(source) == {"paths"} for source in sources):
        draft.put("data.paths", [path for source in sources for path in source["paths"]])
    else:
        draft.put("data.sources", sources)
