"""Imports LLaMA-Factory's YAML (`llamafactory-cli train FILE`).

Keys and defaults are those of LLaMA-Factory's hparams/*.py in August 2026. The text of a `template` and the
layout of rows in dataset_info.json are left to the user.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.import_configs import training_arguments as common
from pipeline.cli.import_configs.conversions import parse_table, to_bool, to_int, to_names, to_text
from pipeline.cli.import_configs.mapping import (
    ImportDraft,
    Source,
    TrainerTable,
    locate_file,
    put_sources,
)
from pipeline.config.loading import read_json
from pipeline.config.recipe import FILL_IN

# Value of `stage` -> data.kind.
DATA_KINDS = {"pt": "text", "sft": "chat", "rm": "preference", "dpo": "preference", "kto": "preference"}
# Value of `pref_loss` -> objective.kind, and objective.loss_type or `None` if the objective has none.
LOSSES = {
    "sigmoid": ("dpo", "sigmoid"),
    "hinge": ("dpo", "hinge"),
    "ipo": ("dpo", "ipo"),
    "kto_pair": ("kto", None),
    "orpo": ("orpo", None),
    "simpo": ("simpo", None),
}
LLAMA_FACTORY_NAMES = {
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target",
    "lora_modules_to_save": "additional_target",
    "gradient_checkpointing": "disable_gradient_checkpointing",
}
"""Key of transformers or TRL -> key of LLaMA-Factory, if they differ."""
# Recipe keys [as conversion]: LLaMA-Factory's keys; see parse_table.
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
    """Import data, objective, training arguments and adapter, by stage and finetuning_type.

    Raises:
        ConfigError: A value is not supported.
    """
    stage = draft.read_value("stage", to_text)
    if stage not in DATA_KINDS:
        raise draft.make_error("stage", f"{stage} is not supported; expected {', '.join(DATA_KINDS)}")
    kind = DATA_KINDS[stage]
    if stage == "rm":
        draft.put("objective.kind", "reward")
        draft.put("objective.margin_weight", 0.0, "no margins, as in LLaMA-Factory")
    elif kind == "preference":
        _put_objective(draft, draft.read_value("pref_loss", to_text) if stage == "dpo" else "kto_pair")
    _put_data(draft, kind)
    common.put_arguments(draft, common.put_held_out(draft, "val_size"))
    if draft.read_value("pure_bf16", to_bool):
        draft.json["bf16.enabled"] = True
    finetuning_type = draft.read_value("finetuning_type", to_text)
    if finetuning_type == "lora":
        if draft.get_stated("lora_alpha") is None:
            draft.put("adapter.alpha", 2 * draft.recipe["adapter.rank"], "LLaMA-Factory's default: 2 x rank")
        common.put_adapter(draft)
    elif finetuning_type == "freeze":
        draft.ask("model.freeze", [FILL_IN], "patterns of frozen parameters, such as model.layers.[0-9].*")
    elif finetuning_type != "full":
        raise draft.make_error(
            "finetuning_type", f"{finetuning_type} is not supported; expected lora, freeze or full"
        )


def _put_objective(draft: ImportDraft, pref_loss: str) -> None:
    """Put the kind of a preference objective, and its loss if the kind has several."""
    if pref_loss not in LOSSES:
        raise draft.make_error("pref_loss", f"{pref_loss} is not supported; expected {', '.join(LOSSES)}")
    kind, loss_type = LOSSES[pref_loss]
    draft.put("objective.kind", kind)
    if loss_type is not None:
        draft.put("objective.loss_type", loss_type)


def _put_data(draft: ImportDraft, kind: str) -> None:
    """Put the sources of data of this kind, and how their rows are read."""
    max_samples = draft.read_value("max_samples", to_int)
    is_streaming = draft.read_value("streaming", to_bool)
    sources = [_find_dataset(draft, name) for name in draft.read_value("dataset", to_names) or []]
    for source in sources:
        if max_samples:
            source["max_documents"] = max_samples
        if is_streaming and "dataset" in source:
            source["streaming"] = True
    put_sources(draft, kind, sources)
    length = draft.read_value("cutoff_len", to_int)
    packs = draft.read_value("packing", to_bool)  # `None` if not stated
    draft.put("data.sequence_length", length)
    if kind == "text":
        draft.put("data.packing", "none" if packs is False else "concatenate")
        draft.put("data.separate_documents", False, "one stream, as in LLaMA-Factory")
        draft.leave_open(
            "template", "texts end with the tokenizer's end token; LLaMA-Factory's llama3 has another one"
        )
        return
    if kind == "preference":
        common.put_preferences(draft, length)
    else:
        packs_neatly = draft.read_value("neat_packing", to_bool)
        draft.put("data.packing", "best_fit" if packs or packs_neatly else "none")
        draft.put("data.too_long", "drop", "LLaMA-Factory cuts longer rows")
        draft.put("data.learn_from", "all" if draft.read_value("train_on_prompt", to_bool) else "assistant")
        if packs and not packs_neatly:
            draft.leave_open(
                "packing",
                "in LLaMA-Factory the conversations in a row attend to each other, here they never do",
            )
    template = draft.read_value("template", to_text)
    draft.ask(
        "data.chat_template",
        f"{FILL_IN}.jinja",
        f"a Jinja file that writes the same text as LLaMA-Factory's template {template}; delete the line if "
        "that is the tokenizer's own template",
    )


def _find_dataset(draft: ImportDraft, name: str) -> Source:
    """Return the source of a data set in dataset_info.json, and leave open other fields of its entry.

    If the entry names no files, or there is none, the files are left to the user.
    """
    dataset_dir = Path(draft.read_value("dataset_dir", to_text))
    folders = (dataset_dir, draft.file.path.parent / dataset_dir, draft.file.path.parent)
    folder = next((each for each in folders if (each / "dataset_info.json").is_file()), dataset_dir)
    info_file = folder / "dataset_info.json"
    entry = read_json(info_file).tree.get(name) if info_file.is_file() else None
    if not isinstance(entry, dict):
        entry = {}
    imported = {"hf_hub_url": "dataset", "subset": "subset", "split": "split", "file_name": "paths"}
    others = ", ".join(sorted(entry.keys() - imported.keys()))
    if others:
        draft.left_open[f"{name}: {others}"] = (
            "not imported: a row's fields tell its layout, such as ShareGPT's; if your fields have other "
            "names, write data.sources.fields (docs/how-to/data.md)"
        )
    source: Source = {ours: entry[key] for key, ours in imported.items() if isinstance(entry.get(key), str)}
    file_name = source.pop("paths", None)
    if "dataset" in source:
        return source
    if file_name is not None:
        return {"paths": [locate_file(draft, str(folder / file_name))]}
    draft.fill_in.append(f"data.paths: the files of {name}; {info_file} does not name them")
    return {"paths": [f"{FILL_IN}.jsonl"]}


TOOL = TrainerTable(
    title="LLaMA-Factory",
    rows=common.rename_keys(common.ROWS | common.MODEL_ROWS, LLAMA_FACTORY_NAMES) | LLAMA_FACTORY_ROWS,
    import_values=import_llama_factory,
    names=LLAMA_FACTORY_NAMES,
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
