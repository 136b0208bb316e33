"""Maps another trainer's configuration to a draft of a recipe and a DeepSpeed JSON, by the trainer's table.

Every key of the imported file, at any depth, is carried over, reported as without effect, or left open by
name. Nothing is guessed: a setting that does not mean the same here, to the token, is left open.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pipeline.cli.import_configs.conversions import Conversion, KeyMapping, LeftOpenError, to_names, to_text
from pipeline.cli.import_configs.unmapped_keys import LEFT_OPEN, NO_EFFECT
from pipeline.config.loading import ConfigFile
from pipeline.config.model_schema import AdapterConfig
from pipeline.config.objective_schema import ObjectiveConfig
from pipeline.errors import ConfigError
from pipeline.files import is_path

NEAR = 0.88  # difflib's similarity from which an unknown key is taken for a typo of a known one
OFF: tuple[Any, ...] = (False, 0, "none", "no", "", [], {})
FILL_IN = "FILL-IN"
TABLES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md")
FILES = ("path", "name", "split", "data_files", "revision")  # fields of an entry in a list of data sets
Source = dict[str, Any]  # an entry of data.sources in the recipe


@dataclass(frozen=True)
class TrainerTable:
    """Table of another trainer's keys. Keys are dotted, and `*` stands for an index of a list."""

    title: str
    rows: Mapping[str, KeyMapping]
    import_values: Callable[[ImportDraft], None]
    """Function that imports the keys whose rows have no conversion."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values of that trainer, for keys that change the loss curve."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a key in transformers or TRL -> name in this trainer, if they differ."""


@dataclass
class ImportDraft:
    """Recipe and DeepSpeed JSON while the keys of another trainer's file are imported."""

    file: ConfigFile
    tool: TrainerTable
    gpus: int
    trainer: str = ""
    """Trainer of TRL that the command line names, such as `dpo`."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Values of the recipe by dotted key, of two parts at most."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Reasons for values of the recipe by dotted key, written as comments."""
    json: dict[str, Any] = field(default_factory=dict)
    """Values of the JSON by dotted key, set on top of `base`."""
    base: str | dict[str, Any] = "zero2"
    """JSON to start from: a file named by the imported file, the JSON itself, or a name in ds_configs/."""
    has_recipe: bool = True
    """Whether the imported file says what is trained, and not only how the work is split."""
    fill_in: list[str] = field(default_factory=list)
    """Keys of the recipe that the user has to write, with the reason."""
    left_open: dict[str, str] = field(default_factory=dict)
    """Imported key -> what the user can do about it, for keys without an exact counterpart."""
    no_effect: dict[str, str] = field(default_factory=dict)
    """Imported key -> reason for which it changes nothing here."""

    def __post_init__(self) -> None:
        self.theirs = dict(_flatten(self.file, self.file.tree, self.tool))
        self.keys_read: set[str] = set()
        self._origin: dict[str, str] = {}

    def stated(self, name: str) -> Any:
        """Return the value in the imported file, without defaults; `None` if it has none."""
        value = self.theirs.get(self.tool.names.get(name, name))
        return None if value == "" else value

    def read_value(self, name: str, convert: Conversion | None = None) -> Any:
        """Return the converted value of a key or its default, and record that the key was read.

        Returns:
            `None` if there is neither a value nor a default, or if the value is left open.

        Raises:
            ConfigError: The value has another type than `convert` takes.
        """
        key = self.tool.names.get(name, name)
        self.keys_read.add(key)
        value = self.stated(name)
        value = self.tool.defaults.get(key) if value is None else value
        if value is None or convert is None:
            return value
        try:
            return convert(value)
        except TypeError as error:
            raise self.make_error(key, f"expected {error}, given {value!r}") from None
        except LeftOpenError as reason:
            self.left_open[key] = f"{value}: {reason}"
            return None

    def make_error(self, name: str, why: str) -> ConfigError:
        """Return the error that refuses the import because of a key."""
        return ConfigError(f"{self.file.describe_key(self.tool.names.get(name, name))}: {why}")

    def leave_open(self, name: str, what_to_do: str) -> None:
        """Report a key as left open if the imported file has it."""
        if self.stated(name) is not None:
            self.left_open[self.tool.names.get(name, name)] = what_to_do

    def put(self, ours: str, value: Any, remark: str = "") -> None:
        """Set a key of the recipe, with an optional comment on it."""
        self.recipe[ours] = value
        if remark:
            self.remarks[ours] = remark

    def discard(self, ours: str, why: str) -> None:
        """Remove a key from the recipe, and report the imported key as without effect."""
        key = self._origin.get(ours, ours)
        if self.recipe.pop(ours, None) is not None and self.stated(key) is not None:
            self.no_effect[key] = why

    def ask(self, ours: str, placeholder: Any, what: str) -> None:
        """Leave a key of the recipe to the user. A run refuses the placeholder."""
        self.recipe[ours] = placeholder
        self.fill_in.append(f"{ours}: {what}")

    def list_entries(self, name: str) -> list[str]:
        """Return the dotted keys of the entries of a list in the imported file: `datasets.0`, ..."""
        found = (re.match(rf"{name}\.\d+(?=\.)", key) for key in self.theirs)
        return list(dict.fromkeys(match[0] for match in found if match))

    def find_path(self, name: str) -> Path | None:
        """Return the path of a file in the working directory or beside the imported file, if it exists."""
        places = (Path(name).expanduser(), self.file.path.parent / name)
        return next((path.absolute() for path in places if path.exists()), None)

    def import_keys(self) -> None:
        """Import every key: first those with a conversion, then `import_values`, then report the others.

        Raises:
            ConfigError: A key looks like a typo of a known one, or a value has the wrong type.
        """
        for key in dict.fromkeys([*self.tool.defaults, *self.theirs]):
            row = self.tool.rows.get(_pattern(key))
            value = self.read_value(key, row.convert) if row and row.convert else None
            if row is None or value is None:
                continue
            self._origin[row.ours] = key
            if row.ours.startswith("JSON: "):
                self.json[row.ours.removeprefix("JSON: ")] = value
            else:
                self.put(row.ours, value)
        self.tool.import_values(self)
        self._drop_unread_terms()
        for key in self.theirs:
            if key not in self.keys_read and self.stated(key) is not None:
                self._report_unread(key)

    def _drop_unread_terms(self) -> None:
        """Remove keys of `adapter` and `objective` that the kind of the run does not have."""
        kind = self.recipe.get("objective.kind")
        sections = {
            tag.tag: section for section, tag in map(get_args, get_args(get_args(ObjectiveConfig)[0]))
        }
        fields = {
            "objective": sections[kind].model_fields if kind else {},
            "adapter": AdapterConfig.model_fields if "adapter.kind" in self.recipe else {},
        }
        for ours in list(self.recipe):
            section, _, name = ours.partition(".")
            if section not in fields or name in fields[section]:
                continue
            if fields[section]:
                self.leave_open(self._origin.get(ours, ours), f"{section}.kind {kind} has no such term")
                del self.recipe[ours]
            else:
                self.discard(ours, "nothing in such a run reads it")

    def _report_unread(self, key: str) -> None:
        """Report a key that nothing has read: as without effect, left open, or a typo."""
        pattern = _pattern(key)
        if pattern in self.tool.rows:
            self.no_effect[key] = "nothing in such a run reads it"
        elif pattern in NO_EFFECT:
            self.no_effect[key] = NO_EFFECT[pattern]
        elif pattern in LEFT_OPEN and self.theirs[key] in OFF:
            self.no_effect[key] = "off, there and here"
        elif pattern in LEFT_OPEN:
            self.left_open[key] = LEFT_OPEN[pattern]
        elif slips := difflib.get_close_matches(key, [*self.tool.rows, *NO_EFFECT, *LEFT_OPEN], 1, NEAR):
            raise self.make_error(key, f'unknown to {self.tool.title} (did you mean "{slips[0]}"?)')
        else:
            self.left_open[key] = "not in the import's table; docs/configuration.md has the recipe's keys"


def _pattern(key: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", key)


def _flatten(
    file: ConfigFile, tree: Mapping[Any, Any], tool: TrainerTable, at: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value), as deep as the table has keys; a plain name in a list is its `path`."""
    for key, value in tree.items():
        if not isinstance(key, str):
            raise ConfigError(f"{file.path}: {at}{key!r}: expected a key that is a text; write it in quotes")
        place = f"{at}{key}"
        known = () if _pattern(place) in tool.rows else (*tool.rows, *LEFT_OPEN, *NO_EFFECT)
        within = [each for each in known if each.startswith(f"{_pattern(place)}.")]
        if value is None or not within:
            yield place, value
            continue
        is_list = within[0].startswith(f"{_pattern(place)}.*")
        entries = value if isinstance(value, list) else [value]
        for number, given in enumerate(entries):
            entry = {"path": given} if isinstance(given, str) and is_list else given
            if not isinstance(entry, dict):
                raise ConfigError(f"{file.describe_key(place)}: expected keys and values, given {given!r}")
            yield from _flatten(file, entry, tool, f"{place}.{number}." if is_list else f"{place}.")


def find_source(draft: ImportDraft, keys: Mapping[str, str]) -> Source:
    """Return the source of the recipe for the data that `datasets.load_dataset` would read.

    Args:
        draft: Draft whose imported file names the data.
        keys: Field of FILES -> dotted key in the imported file.
    """
    files = draft.read_value(keys["data_files"], to_names) if "data_files" in keys else None
    said = {name: draft.read_value(key, to_text) for name, key in keys.items() if name != "data_files"}
    path = said.pop("path")
    if not path:
        raise draft.make_error(keys["path"], "expected the path or the name of a data set")
    there = draft.find_path(path)
    if there is not None and any((there / saved).is_file() for saved in ("state.json", "dataset_dict.json")):
        path = str(there)
        files = None
    elif not files and (there is not None or is_path(path) or Path(path).suffix in TABLES):
        files = [path]
    chosen = {name: value for name, value in said.items() if value and value != "train"}
    if not files:
        return {"dataset": path} | {{"name": "subset"}.get(name, name): each for name, each in chosen.items()}
    for name in chosen:
        draft.leave_open(keys[name], f"all of {', '.join(files)} is read")
    return {"paths": [locate_file(draft, each) for each in files]}


def locate_file(draft: ImportDraft, name: str) -> str:
    """Return the path of a file; if it does not exist, leave it to the user."""
    found = draft.find_path(name)
    if found is None:
        draft.fill_in.append(f"data.paths: {name} does not exist here")
    return str(found or name)


def put_sources(draft: ImportDraft, kind: str, sources: list[Source]) -> None:
    """Set the kind of data and its sources."""
    draft.put("data.kind", kind)
    if not sources:
        draft.ask("data.paths", [f"{FILL_IN}.jsonl"], "the files to train on; the imported file names none")
    elif all(set(source) == {"paths"} for source in sources):
        draft.put("data.paths", [path for source in sources for path in source["paths"]])
    else:
        draft.put("data.sources", sources)
