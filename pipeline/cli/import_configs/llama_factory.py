"""Imports LLaMA-Factory's YAML (`llamafactory-cli train FILE`), by hparams/*.py of August 2026.

The text of its `template` and the layout of rows in dataset_info.json are left open.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.import_configs import training_arguments as common
from pipeline.cli.import_configs.conversions import parse_table, to_bool, to_int, to_names, to_text
from pipeline.cli.import_configs.mapping import (
    FILL_IN,
    ImportDraft,
    Source,
    TrainerTable,
    locate_file,
    put_sources,
)
from pipeline.config.loading import read_json

KINDS = {"pt": "text", "sft": "chat", "rm": "preference", "dpo": "preference", "kto": "preference"}
LOSSES = {
    "sigmoid": ("dpo", "sigmoid"),
    "hinge": ("dpo", "hinge"),
    "ipo": ("dpo", "ipo"),
    "kto_pair": ("kto", None),
    "orpo": ("orpo", None),
    "simpo": ("simpo", None),
}
NAMES = {
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target",
    "lora_modules_to_save": "additional_target",
    "gradient_checkpointing": "disable_gradient_checkpointing",
}
LLAMA_FACTORY_ROWS = parse_table("""
data.kind, objective.kind: stage
adapter.kind, model.freeze: finetuning_type
adapter.weights as one adapter: adapter_name_or_path
adapter.quantize as 4 bits: quantization_bit
model.activation_checkpointing as no recomputation: disable_gradient_checkpointing
model.attention as attention: flash_attn
model.grow_vocabulary as boolean: resize_vocab
objective.kind, objective.loss_type: pref_loss
objective.beta as number: pref_beta
objective.sft_weight as number: pref_ftx
objective.gamma as number: simpo_gamma
objective.label_smoothing as number: dpo_label_smoothing
objective.desirable_weight as number: kto_chosen_weight
objective.undesirable_weight as number: kto_rejected_weight
data.paths, data.sources: dataset dataset_dir max_samples streaming
data.eval_fraction: val_size
data.chat_template: template
data.sequence_length: cutoff_len
data.learn_from: train_on_prompt
data.packing: packing neat_packing
data.prepare_workers as integer: preprocessing_num_workers
JSON: bf16.enabled: pure_bf16
""")


def import_llama_factory(draft: ImportDraft) -> None:
    """Import data, objective and adapter, by stage and finetuning_type."""
    stage = draft.read_value("stage", to_text)
    if stage not in KINDS:
        raise draft.make_error("stage", f"{stage} is not supported; expected {', '.join(KINDS)}")
    if stage == "rm":
        draft.put("objective.kind", "reward")
        draft.put("objective.margin_weight", 0.0, "no margins, as in LLaMA-Factory")
    elif KINDS[stage] == "preference":
        _put_objective(draft, draft.read_value("pref_loss", to_text) if stage == "dpo" else "kto_pair")
    _put_data(draft, KINDS[stage])
    common.put_arguments(draft, common.put_held_out(draft, "val_size"))
    if draft.read_value("pure_bf16", to_bool):
        draft.json["bf16.enabled"] = True
    how = draft.read_value("finetuning_type", to_text)
    if how == "lora":
        if draft.get_stated("lora_alpha") is None:
            draft.put("adapter.alpha", 2 * draft.recipe["adapter.rank"], "LLaMA-Factory's default: 2 x rank")
        common.put_adapter(draft)
    elif how == "freeze":
        draft.ask("model.freeze", [FILL_IN], "patterns of frozen parameters, such as model.layers.[0-9].*")
    elif how != "full":
        raise draft.make_error("finetuning_type", f"{how} is not supported; expected lora, freeze or full")


def _put_objective(draft: ImportDraft, given: str) -> None:
    if given not in LOSSES:
        raise draft.make_error("pref_loss", f"{given} is not supported; expected {', '.join(LOSSES)}")
    kind, loss = LOSSES[given]
    draft.put("objective.kind", kind)
    if loss is not None:
        draft.put("objective.loss_type", loss)


def _put_data(draft: ImportDraft, kind: str) -> None:
    limit = draft.read_value("max_samples", to_int)
    streams = draft.read_value("streaming", to_bool)
    sources = [_find_dataset(draft, name) for name in draft.read_value("dataset", to_names) or []]
    for source in sources:
        if limit:
            source["max_documents"] = limit
        if streams and "dataset" in source:
            source["streaming"] = True
    put_sources(draft, kind, sources)
    length = draft.read_value("cutoff_len", to_int)
    packs = draft.read_value("packing", to_bool)
    draft.put("data.sequence_length", length)
    if kind == "text":
        draft.put("data.packing", "none" if packs is False else "concatenate")
        draft.put("data.separate_documents", False, "one stream, as in LLaMA-Factory")
        draft.leave_open(
            "template", "texts end with the tokenizer's own end token; LLaMA-Factory's llama3 has another one"
        )
        return
    if kind == "preference":
        common.put_preferences(draft, length)
    else:
        neat = draft.read_value("neat_packing", to_bool)
        draft.put("data.packing", "best_fit" if packs or neat else "none")
        draft.put("data.too_long", "drop", "LLaMA-Factory cuts longer rows")
        draft.put("data.learn_from", "all" if draft.read_value("train_on_prompt", to_bool) else "assistant")
        if packs and not neat:
            draft.leave_open(
                "packing",
                "in LLaMA-Factory conversations of a row attend to each other, here they never do",
            )
    template = draft.read_value("template", to_text)
    what = f"a Jinja file that writes the same text as LLaMA-Factory's template {template}; "
    what += "delete the line if that is the tokenizer's own template"
    draft.ask("data.chat_template", f"{FILL_IN}.jinja", what)


def _find_dataset(draft: ImportDraft, name: str) -> Source:
    """Return the source of a data set in dataset_info.json, and leave open other fields of its entry."""
    folder = Path(draft.read_value("dataset_dir", to_text))
    places = (folder, draft.file.path.parent / folder, draft.file.path.parent)
    folder = next((place for place in places if (place / "dataset_info.json").is_file()), folder)
    table = folder / "dataset_info.json"
    entry = read_json(table).tree.get(name) if table.is_file() else None
    entry = entry if isinstance(entry, dict) else {}
    known = {"hf_hub_url": "dataset", "subset": "subset", "split": "split", "file_name": "paths"}
    if others := ", ".join(sorted(entry.keys() - known.keys())):
        draft.left_open[f"{name}: {others}"] = "convert the rows, or write data.sources.fields (docs/data.md)"
    found: Source = {ours: entry[key] for key, ours in known.items() if isinstance(entry.get(key), str)}
    if "dataset" in found:
        return {key: value for key, value in found.items() if key != "paths"}
    if "paths" in found:
        return {"paths": [locate_file(draft, str(folder / found["paths"]))]}
    draft.fill_in.append(f"data.paths: the files of {name}; {table} does not name them")
    return {"paths": [f"{FILL_IN}.jsonl"]}


TOOL = TrainerTable(
    title="LLaMA-Factory",
    rows=common.rename_keys(common.ROWS | common.MODEL_ROWS, NAMES) | LLAMA_FACTORY_ROWS,
    import_values=import_llama_factory,
    names=NAMES,
    defaults=common.DEFAULTS
    | {"stage": "sft", "finetuning_type": "lora", "lora_rank": 8, "disable_gradient_checkpointing": False}
    | {
        "pref_loss": "sigmoid",
        "pref_beta": 0.1,
        "simpo_gamma": 0.5,
        "cutoff_len": 2048,
        "dataset_dir": "data",
    },
)
