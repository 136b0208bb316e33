"""LLaMA-Factory's dataset_info.json: where a data set lies and what its columns are called.

Rows that this trainer would not know by their fields, and lists in a .json file, are written anew as JSONL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.foreign import DESCRIPTION, read_plain
from pipeline.foreign_configs.mapping import Draft
from pipeline.foreign_configs.sources import Source, count_rows, source_name

# Their word for a column -> the field by which this trainer knows it, and what it is called by default.
FIELDS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "messages": "conversations",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
}
ALSO_KNOWN = {"messages": {"messages"}, "kto_tag": {"kto_tag"}}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
ROLES = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}


def find_dataset(draft: Draft, name: str, table: tuple[Path, dict[str, Any]], kind: str) -> Source:
    """The source of a data set.

    Args:
        draft: Gets what is to be filled in, and rows written anew.
        name: As `dataset` has it.
        table: The folder of dataset_info.json, and what it says.
        kind: The recipe's data.kind.
    """
    folder, entries = table
    if name not in entries:
        what = (
            f"is not in {folder}/dataset_info.json" if entries else f"there is no {folder}/dataset_info.json"
        )
        draft.fill_in.append(f"data.paths: the files of {name}: {what}")
        return Source({"paths": [f"{source_name(name)}.jsonl"]})
    entry = entries[name]
    columns = {
        key: column for key, column in (entry.get("columns") or {}).items() if key in FIELDS and column
    }
    if kind == "text":
        text_field = columns.get("prompt", "text")
        is_known = True
        more = {} if text_field == "text" else {"text_field": text_field}
    else:
        more = {}
        is_known = _is_known(columns, entry.get("tags") or {}) and not (entry.get("columns") or {}).get(
            "history"
        )
    hub = entry.get("hf_hub_url") or entry.get("ms_hub_url")
    if hub is not None:
        for key in ("subset", "split"):
            more |= {key: entry[key]} if entry.get(key) else {}
        more |= {"streaming": True} if draft.given("streaming") else {}
        if not is_known:
            draft.fill_in.append(
                f"data: {hub} has columns of other names ({_listed(columns)}); see docs/data.md"
            )
        return Source({"dataset": hub, **more})
    if not isinstance(entry.get("file_name"), str):
        draft.fill_in.append(f"data.paths: {name}: expected file_name or hf_hub_url in dataset_info.json")
        return Source({"paths": [f"{source_name(name)}.jsonl"]})
    path = folder / entry["file_name"]
    if path.suffix == ".json" or (path.suffix == ".jsonl" and not is_known):
        return _written_anew(draft, name, path, entry, kind, more)
    if not is_known:
        draft.fill_in.append(
            f"data.paths: {path} has columns of other names ({_listed(columns)}); see docs/data.md"
        )
    if not path.exists():
        draft.fill_in.append(f"data.paths: {path} is not there")
    return Source({"paths": [str(path)], **more}, count_rows(path))


def _is_known(columns: dict[str, str], tags: dict[str, str]) -> bool:
    named = all(column in {FIELDS[key], *ALSO_KNOWN.get(key, ())} for key, column in columns.items())
    usual = {*TAGS.values(), *ROLES.values(), "role", "content", "bot", "tool"}
    return named and set(tags.values()) <= usual


def _listed(columns: dict[str, str]) -> str:
    return ", ".join(f"{column} is its {key}" for key, column in columns.items())


def _written_anew(draft: Draft, name: str, path: Path, entry: dict[str, Any], kind: str, more: Any) -> Source:
    target = draft.folder / f"{source_name(name)}.jsonl"
    try:
        content = read_plain(path, DESCRIPTION).decode("utf-8")
        rows = (
            json.loads(content)
            if path.suffix == ".json"
            else [json.loads(x) for x in content.splitlines() if x]
        )
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("expected a list of objects")
    except FileNotFoundError:
        draft.fill_in.append(f"data.paths: {path} is not there")
        return Source({"paths": [str(target)], **more})
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if kind != "text":
        rows = [_row(row, entry) for row in rows]
    draft.files[target] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return Source({"paths": [str(target)], **more}, len(rows))


def _row(row: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """A row with the fields that this trainer knows, the history of an instruction as turns before it."""
    columns, tags = dict(entry.get("columns") or {}), TAGS | (entry.get("tags") or {})
    if not columns:
        columns = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
        if entry.get("formatting") in ("sharegpt", "openai"):
            columns = {"messages": "conversations", "system": "system", "tools": "tools"}
    new = {
        FIELDS[key]: row[column]
        for key, column in columns.items()
        if key in FIELDS and row.get(column) is not None
    }
    for field in ("conversations", "chosen", "rejected"):
        if isinstance(new.get(field), list | dict):
            turns = new[field] if isinstance(new[field], list) else [new[field]]
            new[field] = [_turn(turn, tags) for turn in turns]
    if question := new.pop("input", None):
        new["instruction"] = f"{new['instruction']}\n{question}" if new.get("instruction") else question
    history = row.get(columns.get("history") or "history")
    if history and "instruction" in new and "output" in new:
        said = [*history, (new.pop("instruction"), new.pop("output"))]
        new["conversations"] = [
            {"role": role, "content": each}
            for pair in said
            for role, each in zip(("user", "assistant"), pair, strict=True)
        ]
    return new


def _turn(turn: Any, tags: dict[str, str]) -> Any:
    if not isinstance(turn, dict):
        return turn
    role = turn.get(tags["role_tag"], turn.get("role"))
    known: dict[Any, str] = {tags[tag]: ours for tag, ours in ROLES.items()}
    return {"role": known.get(role, role), "content": turn.get(tags["content_tag"], turn.get("content"))}
