"""LLaMA-Factory's YAML (`llamafactory-cli train FILE`): hparams/*.py of August 2026.

Keys, the text in which it writes conversations by its `template` (slots of its data/template.py), and data
sets by its dataset_info.json. A slot is tokenised apart from the next one. `{}` is what somebody says; BOS
and EOS are the tokenizer's. Templates that put the end of a turn into the next one (`efficient_eos`) are not
here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.cli.import_configs.mapping import (
    DIVIDE,
    FILL_IN,
    Draft,
    Key,
    Section,
    Source,
    Tool,
    choose,
    column,
    flag,
    held_out,
    keys,
    learned,
    literal,
    local,
    names,
    number,
    of_row,
    put_eval_sets,
    put_preferences,
    put_row_template,
    put_sources,
    reasons,
    refusal,
    require,
    rows_of,
    settle_adapter,
    settle_bits,
    settle_recomputing,
    settle_reports,
    settle_terms,
    source_name,
    tell_of_long_rows,
    text,
    whole,
)
from pipeline.cli.import_configs.training_arguments import DEFAULTS, KEYS, WITHOUT, settle_arguments
from pipeline.config.loading import ConfigFile
from pipeline.errors import ConfigError

LOSSES = {
    "sigmoid": ("dpo", "sigmoid"),
    "hinge": ("dpo", "hinge"),
    "ipo": ("dpo", "ipo"),
    "kto_pair": ("kto", None),
    "orpo": ("orpo", None),
    "simpo": ("simpo", None),
}
TERMS = {
    "pref_beta": "beta",
    "pref_ftx": "sft_weight",
    "simpo_gamma": "gamma",
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
}


def attention(value: Any) -> str:
    """The recipe's word; flash attention is torch's own here."""
    return "eager" if value in ("disabled", False) else "auto"


OWN = keys("""
adapter.weights: adapter_name_or_path
model.activation_checkpointing: disable_gradient_checkpointing
data.kind, objective.kind: stage
adapter.kind, model.freeze: finetuning_type
model.freeze: freeze_trainable_layers
adapter.rank: lora_rank
adapter.alpha: lora_alpha
adapter.dropout: lora_dropout
adapter.targets: lora_target
adapter.modules_to_save: additional_target
adapter.kind: use_rslora use_dora
objective.kind, objective.loss_type: pref_loss
data.paths, data.sources: dataset
data.paths: dataset_dir
data.eval_sets: eval_dataset
data.eval_fraction: val_size
data.sources: max_samples streaming interleave_probs mix_strategy
data.chat_template: template default_system enable_thinking
data.sequence_length: cutoff_len
data.learn_from: train_on_prompt mask_history
data.packing: packing neat_packing
JSON: bf16.enabled: pure_bf16
""") | {
    "flash_attn": Key("model.attention", attention),
    "resize_vocab": Key("model.grow_vocabulary", flag),
    **{key: Key(f"objective.{name}") for key, name in TERMS.items()},
    "preprocessing_num_workers": Key("data.prepare_workers", whole),
    "quantization_bit": Key("adapter.quantize"),
}

OWN_WITHOUT = reasons("""
of quantization there is one kind: double_quantization quantization_device_map quantization_method
  quantization_type
the last n layers are trained with freeze_trainable_layers, whole: freeze_extra_modules
  freeze_trainable_modules use_llama_pro
adapter.init has uniform and gaussian: pissa_convert pissa_init pissa_iter
one adapter is trained; merge others into the model first: adapter_folder create_new_adapter
  loraplus_lr_embedding
the reference is the model that the run starts from: ref_model ref_model_adapters ref_model_quantization_bit
no term of this objective: asft_alpha eaft_alpha ld_alpha pref_bco_weight use_asft_loss use_dft_loss
  use_eaft_loss
no rollouts here: ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model
  reward_model_adapters reward_model_quantization_bit reward_model_type
the optimizer is AdamW, SGD or Adafactor (Muon: optimizer.groups): apollo_rank apollo_scale badam_mode
  badam_switch_interval galore_layerwise galore_rank galore_scale galore_target galore_update_interval
  use_adam_mini use_apollo use_badam use_galore use_muon
orthogonal finetuning is not built here: module_dropout oft_block_size oft_rank oft_target
the import writes no thoughts anew and no tool calls: preserve_thinking tool_format
data are prepared once and kept by content: buffer_size data_shared_file_system overwrite_cache
  preprocessing_batch_size tokenized_path
text alone is read: freeze_language_model freeze_multi_modal_projector freeze_vision_tower image_max_pixels
  image_min_pixels media_dir video_fps video_max_pixels video_min_pixels
kernels are chosen here: low_cpu_mem_usage mixture_of_depths shift_attn split_special_tokens
  upcast_layernorm upcast_lmhead_output use_fast_tokenizer use_unsloth use_v1_kernels
model.extra takes fields of the model's config: moe_aux_loss_coef rope_scaling
tokens of its own are a matter of the tokenizer's folder: add_special_tokens add_tokens init_special_tokens
  new_special_tokens_config
set it in the environment: cache_dir hf_hub_token model_revision ms_hub_token om_hub_token swanlab_project
  swanlab_run_name use_swanlab
write model.architecture in place of model.pretrained: train_from_scratch
model.fp8: fp8 fp8_backend fp8_enable_fsdp_float8_all_gather
it serves generation (the command generate): eval_num_beams infer_backend infer_dtype max_new_tokens
  num_beams temperature top_k top_p use_kv_cache
the launcher starts the ranks: master_addr master_port placement_strategy ray_init_kwargs ray_num_workers
  ray_run_name ray_storage_path resources_per_worker
evaluation.py takes the whole held-out split: eval_on_each_dataset ignore_pad_token_for_loss
""")


def settle(draft: Draft) -> None:
    """Take data, objective and adapter, by stage and finetuning_type."""
    stage = draft.given("stage", text)
    if stage in ("dpo", "kto"):
        _objective(draft, stage)
    elif stage == "rm":
        draft.put("objective.kind", "reward")
    elif stage not in ("sft", "pt"):
        raise draft.top.refused("stage", f"{stage}: this version has no objective for it")
    kind = {"pt": "text", "sft": "chat"}.get(stage, "preference")
    put_data(draft, kind)
    settle_arguments(draft, held_out(draft, "val_size", draft.given("val_size", number)), _bf16(draft))
    settle_reports(draft)
    settle_recomputing(draft, not draft.given("disable_gradient_checkpointing", flag))
    how = draft.given("finetuning_type", text)
    if how == "lora":
        _adapter(draft)
    elif how == "freeze":
        _freeze(draft, draft.given("freeze_trainable_layers", whole))
    elif how != "full":
        raise draft.top.refused("finetuning_type", f"{how} is not built here; lora, freeze and full are")


def _bf16(draft: Draft) -> bool:
    return bool(draft.given("pure_bf16", flag))


def _adapter(draft: Draft) -> None:
    settle_bits(draft, "quantization_bit", draft.given("quantization_bit", whole))
    wanted, alpha = draft.given("lora_target", names), draft.given("lora_alpha", number)
    paths = draft.given("adapter_name_or_path", names) or [None]
    if len(paths) > 1:
        draft.drop("adapter_name_or_path", "the first is trained on; merge the others into the model first")
    settle_adapter(
        draft,
        rank="lora_rank",
        alpha=alpha or 2 * draft.given("lora_rank", whole),
        targets=None if "all" in wanted else wanted,
        weights=paths[0],
        to_save="additional_target",
        told_of_alpha="" if alpha else "LLaMA-Factory's default: 2 x rank",
    )


def _objective(draft: Draft, stage: str) -> None:
    given = draft.given("pref_loss", text) if stage == "dpo" else "kto_pair"
    if given not in LOSSES:
        raise draft.top.refused("pref_loss", f"{given} is not built here; {', '.join(LOSSES)} are")
    kind, loss = LOSSES[given]
    settle_terms(draft, kind, TERMS, {})
    if loss is not None:
        draft.put("objective.loss_type", loss)
    if loss in ("hinge", "ipo") and draft.recipe.pop("objective.label_smoothing", None):
        draft.drop("dpo_label_smoothing", f"the loss {loss} has none, there and here")
    if stage == "dpo" and kind == "kto":
        draft.remarks["objective.kind"] = "pairs, each answer by itself"


def _freeze(draft: Draft, count: int) -> None:
    model = Path(draft.recipe.get("model.pretrained", "")) / "config.json"
    try:
        layers = int(json.loads(model.read_text())["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        draft.put(
            "model.freeze", ["model.embed_tokens.*"], "fill in: and the first layers, model.layers.[0-9].*"
        )
        draft.fill_in.append(
            f"model.freeze: all but {count} layers; the model's config.json, which says how many, is not here"
        )
        return
    kept = range(layers - count, layers) if count > 0 else range(-count)
    frozen = [f"model.layers.{number}.*" for number in range(layers) if number not in kept]
    draft.put(
        "model.freeze", ["model.embed_tokens.*", "model.norm.*", *frozen], f"{abs(count)} layers are trained"
    )


TOOL = Tool(
    title="LLaMA-Factory",
    keys=KEYS | OWN,
    without=WITHOUT | OWN_WITHOUT,
    marks="stage finetuning_type lora_target lora_rank cutoff_len template dataset_dir",
    defaults=DEFAULTS
    | {
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_dropout": 0.0,
        "lora_target": "all",
        "pref_loss": "sigmoid",
        "pref_beta": 0.1,
        "simpo_gamma": 0.5,
        "cutoff_len": 2048,
        "dataset_dir": "data",
    },
    settle=settle,
)


BOS, EOS = "<bos>", "<eos>"
THOUGHT, OPENING, CLOSING = "<think>\n\n</think>\n\n", "<think>", "</think>"
THOUGHTS = "thoughts, which LLaMA-Factory takes out of this answer"
TOOLS = "tool calls: LLaMA-Factory writes them by tool_format, which the import does not take"


@dataclass(frozen=True)
class Slots:
    """What a template writes around what is said."""

    user: tuple[str, ...]
    assistant: tuple[str, ...] = ("{}", EOS)
    system: tuple[str, ...] = ("{}",)
    prefix: tuple[str, ...] = ()
    default_system: str = ""
    is_fused: bool = False
    """Whether the system message stands within the first user's turn."""
    thinks: bool = False
    """Whether an answer without thoughts gets empty ones."""


CHATML = Slots(
    ("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",),
    ("{}<|im_end|>\n",),
    ("<|im_start|>system\n{}<|im_end|>\n",),
)
LLAMA3 = Slots(
    (
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("{}<|eot_id|>",),
    ("<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",),
    (BOS,),
)
DEEPSEEK3 = Slots(("<｜User｜>{}<｜Assistant｜>",), prefix=(BOS,))
GEMMA = Slots(
    ("<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",),
    ("{}<end_of_turn>\n",),
    ("{}\n\n",),
    (BOS,),
    is_fused=True,
)
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SLOTS: Mapping[str, Slots] = {
    "alpaca": Slots(
        ("### Instruction:\n{}\n\n### Response:\n",),
        ("{}", EOS, "\n\n"),
        default_system="Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n",
    ),
    "chatml": CHATML,
    "deepseek3": DEEPSEEK3,
    "deepseekr1": replace(DEEPSEEK3, thinks=True),
    "default": Slots(("Human: {}", EOS, "\nAssistant:"), ("{}", EOS, "\n"), ("System: {}", EOS, "\n")),
    "empty": Slots(("{}",), ("{}",)),
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "llama2": Slots((BOS, "[INST] {} [/INST]"), system=("<<SYS>>\n{}\n<</SYS>>\n\n",), is_fused=True),
    "llama3": LLAMA3,
    "mistral": Slots(("[INST] {}[/INST]",), (" {}", EOS), ("{}\n\n",), (BOS,), is_fused=True),
    "phi": Slots(("<|user|>\n{}<|end|>\n<|assistant|>\n",), ("{}<|end|>\n",), ("<|system|>\n{}<|end|>\n",)),
    "phi4": Slots(
        ("<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>",),
        ("{}<|im_end|>",),
        ("<|im_start|>system<|im_sep|>{}<|im_end|>",),
    ),
    "qwen": replace(CHATML, default_system=QWEN),
    "qwen3": replace(CHATML, thinks=True),
    "qwen3_nothink": CHATML,
    "vicuna": Slots(
        ("USER: {} ASSISTANT:",),
        default_system="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    ),
    "yi": CHATML,
    "zephyr": Slots(
        ("<|user|>\n{}", EOS, "<|assistant|>\n"),
        system=("<|system|>\n{}", EOS),
        default_system="You are Zephyr, a helpful assistant.",
    ),
}
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclass(frozen=True)
class Rows:
    """How the rows of a data set are laid out, as its entry in dataset_info.json says."""

    is_sharegpt: bool
    columns: Mapping[str, str]
    tags: Mapping[str, str]

    def column(self, name: str) -> str:
        """Return the Jinja expression of a column, or of nothing."""
        given = self.columns.get(name)
        return column(given) if given else "''"


def _written(slots: tuple[str, ...], said: str) -> str:
    """Return Jinja for slots, each tokenised apart from what stands around it."""
    pieces = []
    for slot in slots:
        before, _, after = slot.partition("{}")
        if slot in (BOS, EOS):
            pieces.append("{{ " + ("bos_token" if slot == BOS else "eos_token") + " }}")
        elif "{}" in slot:
            pieces.append(f"{literal(before)}{{{{ {said} }}}}{literal(after)}{DIVIDE}")
        else:
            pieces.append(f"{literal(slot)}{DIVIDE}")
    return "".join(pieces)


def row_template(slots: Slots, rows: Rows, kind: str, *, masks_history: bool, thinks: Any) -> str:
    """Return the Jinja template that writes a row as LLaMA-Factory does.

    Args:
        slots: Of its template.
        rows: How the rows are laid out.
        kind: The recipe's data.kind.
        masks_history: Whether the last answer alone counts.
        thinks: `enable_thinking`, for templates that think.
    """
    is_chat = kind == "chat"
    answer = "said.content"
    user = _written(slots.user, "(ns.system + said.content)" if slots.is_fused else answer)
    system = _written(slots.system, "ns.system")
    if slots.is_fused:
        before, _, after = slots.system[0].partition("{}")
        head = choose(
            "ns.system", f"{{% set ns.system = {json.dumps(before)} + ns.system + {json.dumps(after)} %}}"
        )
        user += "{% set ns.system = '' %}"
    else:
        head = choose("ns.system", system)
    last = earlier = _written(slots.assistant, answer)
    stripped = _written(slots.assistant, r"said.content.lstrip('\n')")  # as where thoughts are taken out
    before = ""
    if slots.thinks:
        unthought = f"'{OPENING}' not in said.content and '{CLOSING}' not in said.content"
        thought = choose(unthought, literal(THOUGHT) + DIVIDE)
        without = choose(f"'{OPENING}' in said.content", refusal(THOUGHTS))
        before = "" if thinks else thought
        last = thought + last if thinks else without + stripped if thinks is False else last
        earlier = without + stripped
    counts = before + learned(last)
    if masks_history or not is_chat:
        counts = choose("loop.last", counts, earlier)
    turns = "{% for said in ns.said %}" + choose("said.role == 'user'", user, counts) + "{% endfor %}"
    start = "{% set ns = namespace(said=[], system='') %}"
    fallback = choose("not ns.system", f"{{% set ns.system = {json.dumps(slots.default_system)} %}}")
    body = start + _read(rows, kind) + fallback + _written(slots.prefix, "''") + head + turns
    return of_row(body) if is_chat else of_row(choose("turn.role == 'assistant'", body))


def _read(rows: Rows, kind: str) -> str:
    """Return Jinja that puts the turns of a row into `ns.said`, and its system message into `ns.system`."""
    refuse = refusal(TOOLS)
    read = f"{{% set ns.system = {rows.column('system')} or '' %}}"
    read += choose(f"{rows.column('tools')}", refuse)
    return read + (_sharegpt(rows, kind, refuse) if rows.is_sharegpt else _alpaca(rows, kind))


def _add(role: str, content: str) -> str:
    return f"{{% set ns.said = ns.said + [{{'role': '{role}', 'content': {content}}}] %}}"


def _alpaca(rows: Rows, kind: str) -> str:
    pair = _add("user", "pair[0]") + _add("assistant", "pair[1]")
    read = f"{{% for pair in {rows.column('history')} or [] %}}{pair}{{% endfor %}}"
    question = f"[{rows.column('prompt')} or '', {rows.column('query')} or ''] | select | join('\\n')"
    said = rows.column("response")
    if kind == "preference":
        said = f"({rows.column('chosen')} if turn.content == 'chosen' else {rows.column('rejected')} "
        said += f"if turn.content == 'rejected' else {rows.column('response')})"
    needed = [] if kind == "preference" else [rows.column("prompt"), said]
    return "".join(map(require, needed)) + read + _add("user", question) + _add("assistant", said)


def _sharegpt(rows: Rows, kind: str, refuse: str) -> str:
    tags = {name: json.dumps(tag, ensure_ascii=False) for name, tag in rows.tags.items()}
    role, content = f"each[{tags['role_tag']}]", f"each[{tags['content_tag']}]"
    roles = [("user_tag", _add("user", content)), ("assistant_tag", _add("assistant", content))]
    wrong = refusal("user and assistant do not take turns; LLaMA-Factory leaves such a row out")
    order = choose(
        "ns.said and ns.said[-1].role == (ns.said[-2].role if ns.said | length > 1 else 'assistant')", wrong
    )
    branches = wrong
    for name, yes in reversed(roles):
        branches = choose(f"{role} == {tags[name]}", yes, branches)
    for name in ("function_tag", "observation_tag"):
        if name in tags:
            branches = choose(f"{role} == {tags[name]}", refuse, branches)
    if "system_tag" in tags:
        first = f"loop.first and {role} == {tags['system_tag']}"
        branches = choose(first, f"{{% set ns.system = {content} or '' %}}", branches)
    calls = choose("each.tool_calls", refuse)
    read = f"{{% for each in {rows.column('messages')} %}}{calls}{branches}{order}{{% endfor %}}"
    if kind == "chat" or not rows.columns.get("chosen"):
        read += choose("ns.said[-1].role == 'user'", wrong)
    if kind != "preference" or not rows.columns.get("chosen"):
        return read
    sides = (
        "{'chosen': " + rows.column("chosen") + ", 'rejected': " + rows.column("rejected") + "}[turn.content]"
    )
    return read + _add("assistant", f"{sides}[{tags['content_tag']}]")


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
    return source, _rows(draft, key, name=name, entry=entry, source=source, kind=kind)


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
