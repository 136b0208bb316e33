"""The data sets of a LLaMA-Factory configuration, by its dataset_info.json -> the recipe's data section."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config.loading import ConfigFile
from pipeline.errors import ConfigError
from pipeline.foreign_configs.llama_factory_text import COLUMNS, SLOTS, TAGS, TOOLS, Rows, row_template
from pipeline.foreign_configs.mapping import FILL_IN, Draft, Section, flag, names, number, text, whole
from pipeline.foreign_configs.row_templates import put_row_template
from pipeline.foreign_configs.sources import (
    Source,
    local,
    put_eval_sets,
    put_preferences,
    put_sources,
    rows_of,
    source_name,
    tell_of_long_rows,
)

NEEDED_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag")


def put_data(draft: Draft, kind: str) -> None:
    """Put the data sets, and how their rows are written and packed."""
    _data(draft, kind, _sources(draft, kind))


def _sources(draft: Draft, kind: str) -> Rows | None:
    """Put the data sets, and return how their rows are laid out; None: text, or unknown."""
    table = _dataset_info(draft)
    limit, found = draft.given("max_samples", whole), {}
    for key in ("dataset", "eval_dataset"):
        found[key] = [
            (name, *_dataset(draft, key, name, table, kind)) for name in draft.given(key, names) or []
        ]
        for _, source, _ in found[key]:
            if limit:
                source["max_documents"] = limit
            if "dataset" in source and draft.given("streaming", flag):
                source["streaming"] = True
    laid_out = [(name, rows) for _, entries in found.items() for name, _, rows in entries if rows is not None]
    for name, rows in laid_out[1:]:
        if rows != laid_out[0][1] and kind != "text":
            raise draft.top.refused(
                "dataset", f"{laid_out[0][0]} and {name} differ in columns or tags; one run has one template"
            )
    sources = [source for _, source, _ in found["dataset"]]
    if (draft.given("mix_strategy", text) or "concat") != "concat":
        shares = names(draft.given("interleave_probs") or [])
        for source, share in zip(sources, shares, strict=False):
            source["weight"] = float(draft.top.converted("interleave_probs", number, share))
        if not shares:
            draft.drop("mix_strategy", "write data.sources.weight")
    put_sources(draft, kind, sources)
    put_eval_sets(draft, {name: source for name, source, _ in found["eval_dataset"]})
    return laid_out[0][1] if laid_out else None


def _data(draft: Draft, kind: str, rows: Rows | None) -> None:
    length, packs, neat = (
        draft.given("cutoff_len", whole),
        draft.given("packing"),
        draft.given("neat_packing"),
    )
    tell_of_long_rows(draft, "cutoff_len")
    if kind == "text":
        draft.put("data.sequence_length", length)
        draft.put("data.packing", "none" if packs is False else "concatenate")
        draft.put("data.separate_documents", False, "one stream, as there")
        del draft.not_taken["cutoff_len of longer rows"]
        if draft.given("template", text) == "llama3":
            draft.drop(
                "template", "it ends each text with <|end_of_text|>, here the tokenizer's own token does"
            )
        return
    if kind == "preference":
        put_preferences(draft, length)
    else:
        draft.put("data.sequence_length", length)
        draft.put("data.packing", "best_fit" if packs or neat else "none")
        draft.put("data.too_long", "drop")
        draft.put("data.learn_from", "all" if draft.given("train_on_prompt", flag) else "assistant")
        if packs and not neat:
            draft.drop(
                "packing", "conversations of a row see each other there, and do not here (neat_packing)"
            )
    _template(draft, kind, rows)


def _template(draft: Draft, kind: str, rows: Rows | None) -> None:
    name = draft.given("template", text)
    slots, system = SLOTS.get(name or ""), draft.given("default_system", text)
    given = [draft.given(key, flag) for key in ("mask_history", "enable_thinking")]
    if slots is None:
        draft.drop("template", "its text is not in the import's table")
        draft.put("data.chat_template", f"{FILL_IN}.jinja")
        draft.fill_in.append(f"data.chat_template: a Jinja file that writes as the template {name} does")
    elif rows is not None:
        slots = replace(slots, default_system=system) if system else slots
        thinks = True if "enable_thinking" not in draft.file.tree else given[1]
        text_of_rows = row_template(slots, rows, kind, masks_history=bool(given[0]), thinks=thinks)
        put_row_template(draft, text_of_rows, f"LLaMA-Factory's template {name}")
    else:
        draft.put("data.chat_template", f"{FILL_IN}.jinja")


def _dataset_info(draft: Draft) -> tuple[Path, dict[str, Any]]:
    folder = Path(draft.given("dataset_dir", text))
    places = [folder, draft.file.path.parent / folder, draft.file.path.parent]
    path = next(
        (place / "dataset_info.json" for place in places if (place / "dataset_info.json").is_file()), None
    )
    if path is None:
        return folder, {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(table, dict) or not all(isinstance(each, dict) for each in table.values()):
            raise ValueError("expected an object of data sets")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return path.parent, table


def _dataset(
    draft: Draft, key: str, name: str, table: tuple[Path, dict[str, Any]], kind: str
) -> tuple[Source, Rows | None]:
    """Return the source of a data set, and how its rows are laid out."""
    folder, entries = table
    if name not in entries:
        draft.fill_in.append(
            f"data.paths: {name} is not in {folder}/dataset_info.json; put it there and import again"
        )
        return {"paths": [f"{source_name(name)}.jsonl"]}, None
    where = ConfigFile(folder / "dataset_info.json", entries[name])
    entry = Section(where, entries[name], f"{key} {name}: ", draft.not_taken)
    draft.top.below.append(entry)
    hub = entry.given("hf_hub_url", text)
    if hub is not None:
        given = {"dataset": hub, "subset": entry.given("subset", text), "split": entry.given("split", text)}
        source: Source = {key: value for key, value in given.items() if value and value != "train"}
        for other in ("ms_hub_url", "om_hub_url"):
            entry.drop(other, "the one of Hugging Face is read")
    elif (file := entry.given("file_name", text)) is not None:
        source = {"paths": [str(local(draft, folder / file))]}
    else:
        raise draft.top.refused(key, f"{name}: expected file_name or hf_hub_url in {where.path}")
    return source, _rows(draft, key, name, entry, source, kind)


def _rows(draft: Draft, key: str, name: str, entry: Section, source: Source, kind: str) -> Rows | None:
    formatting = entry.given("formatting", text) or "alpaca"
    entry.given("ranking")
    columns, tags = entry.given("columns"), entry.given("tags")
    columns = COLUMNS if columns is None else columns
    tags = TAGS if tags is None else tags
    if kind == "text":
        if (field := columns.get("prompt", "text")) != "text":
            source["text_field"] = field
        return None
    for of_what, known in (("columns", COLUMN_NAMES), ("tags", TAGS)):
        given = columns if of_what == "columns" else tags
        if not isinstance(given, dict) or set(given) - set(known):
            raise draft.top.refused(key, f"{name}: {of_what} of which the import knows {', '.join(known)}")
    missing = [tag for tag in NEEDED_TAGS if tag not in tags]
    if formatting != "alpaca" and missing:
        usual = ", ".join(f"{tag}: {TAGS[tag]}" for tag in missing)
        why = "LLaMA-Factory has no default for a tag beside others"
        raise draft.top.refused(key, f"{name}: tags without {', '.join(missing)}; {why}; usual are {usual}")
    if (label := columns.get("kto_tag")) not in (None, "label", "kto_tag"):
        raise draft.top.refused(key, f"{name}: the column {label} as kto_tag; rename it to label")
    if any(_has_calls(row, columns, tags) for row in rows_of(source)):
        raise draft.top.refused(key, f"{name}: {TOOLS}; write the rows as `messages` (docs/data.md, Tools)")
    return Rows(formatting != "alpaca", columns, tags)


def _has_calls(row: dict[str, Any], columns: dict[str, str], tags: dict[str, str]) -> bool:
    turns = row.get(columns.get("messages", ""))
    roles = (
        [each.get(tags.get("role_tag")) for each in turns if isinstance(each, dict)]
        if isinstance(turns, list)
        else []
    )
    calling = {tags.get("function_tag"), tags.get("observation_tag")} - {None}
    return bool(row.get(columns.get("tools", ""))) or any(role in calling for role in roles)


COLUMN_NAMES = (*COLUMNS, "history", "system", "tools", "chosen", "rejected", "kto_tag")
