"""Axolotl's YAML (`axolotl train FILE`): utils/schemas/*.py of July 2026.

Keys, the text in which it writes rows by the `type` of a data set (prompters, prompt_strategies), data sets.
Prompt and answer are tokenised apart. Text of preference data is what TRL's trainers then get as strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    filled,
    find_source,
    flag,
    held_out,
    keys,
    learned,
    literal,
    names,
    number,
    of_answers,
    of_row,
    optimizer,
    put_eval_sets,
    put_preferences,
    put_row_template,
    put_sources,
    reasons,
    require,
    run_name,
    settle_adapter,
    settle_bits,
    settle_recomputing,
    settle_terms,
    tell_of_long_rows,
    text,
    whole,
    with_tokens,
)
from pipeline.cli.import_configs.training_arguments import COMMON, DEFAULTS, WITHOUT, settle_arguments
from pipeline.errors import ConfigError

TERMS = {
    "orpo_alpha": "beta",
    "rl_beta": "beta",
    "simpo_gamma": "gamma",
    "cpo_alpha": "sft_weight",
    "dpo_label_smoothing": "label_smoothing",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "center_rewards_coefficient": "center_weight",
}
OWN = keys("""
data.tokenizer: tokenizer_config
adapter.kind: adapter peft_use_dora peft_use_rslora
adapter.weights: lora_model_dir
adapter.rank: lora_r
adapter.alpha: lora_alpha
adapter.dropout: lora_dropout
adapter.targets: lora_target_modules lora_target_linear
adapter.modules_to_save: lora_modules_to_save
objective.kind: rl reward_model
data.paths, data.sources, data.layout: datasets
data.paths, data.sources: pretraining_dataset
data.eval_sets: test_datasets
data.eval_fraction: val_set_size
data.chat_template: chat_template chat_template_jinja
data.sequence_length: sequence_len
data.packing: sample_packing
data.too_long: excess_length_strategy
data.learn_from: train_on_inputs
batch.micro_batch_size: micro_batch_size
max_epochs: num_epochs
schedule.kind: lr_scheduler
schedule.min_learning_rate_ratio: cosine_min_lr_ratio
eval.every: evals_per_epoch
checkpoint.every: saves_per_epoch
checkpoint.resume: auto_resume_from_checkpoints
wandb.mode: wandb_mode
model.attention: attn_implementation eager_attention
JSON: zero_optimization: fsdp_config
""") | {
    "base_model": Key("model.pretrained", text),
    "load_in_4bit": Key("adapter.quantize"),
    **{key: Key(f"objective.{name}") for key, name in TERMS.items()},
    "dataset_num_proc": Key("data.prepare_workers", whole),
    "dataset_processes": Key("data.prepare_workers", whole),
    "optimizer": Key("optimizer.kind", optimizer),
    "use_tensorboard": Key("log.tensorboard", flag),
    "wandb_project": Key("wandb.project", text),
    "wandb_entity": Key("wandb.entity", text),
    "wandb_name": Key("name", run_name),
}

OWN_WITHOUT = reasons("""
eight bits are not built here: gptq load_in_8bit loftq_config
the model's folder says what it is: base_model_config cls_model_config model_type processor_type
  tokenizer_legacy tokenizer_type tokenizer_use_fast type_of_model
tokens of its own are a matter of the tokenizer's folder (model.grow_vocabulary): added_tokens_overrides
  eot_tokens resize_token_embeddings_to_32x special_tokens tokens
attention is torch's flash kernels, whatever the length: flash_attention flash_attn_cross_entropy
  flash_attn_fuse_mlp flex_attention s2_attention sdp_attention xformers_attention
data are prepared once and kept by content: dataset_exact_deduplication dataset_keep_in_memory
  dataset_prepared_path dataset_shard_idx dataset_shard_num push_dataset_to_hub shuffle_merged_datasets
  skip_prepare_dataset
rows are packed best fit, or stand alone: batch_flattening curriculum_sampling eval_sample_packing
  multipack_real_batches pad_to_multiple_of pad_to_sequence_len sample_packing_bin_size
  sample_packing_eff_est sample_packing_group_size sample_packing_sequentially
kernels are chosen here: chunked_cross_entropy chunked_cross_entropy_num_chunks cut_cross_entropy gc_steps
  liger_cross_entropy liger_fused_linear_cross_entropy liger_glu_activation liger_layer_norm liger_rms_norm
  liger_rope lora_embedding_kernel lora_mlp_kernel lora_o_kernel lora_qkv_kernel low_cpu_mem_usage plugins
  tiled_mlp unsloth_lora_mlp unsloth_lora_o unsloth_lora_qkv
the run logs to W&B what docs/configuration.md says: use_wandb wandb_log_model wandb_run_id wandb_watch
watch says what ends a run: loss_watchdog_patience loss_watchdog_threshold
the launcher and the split's file say it: context_parallel_size ddp deepcompile device_map dp_shard_size
  fsdp_final_state_dict_type fsdp_version sequence_parallel_degree tensor_parallel_size
the rows and the chat template say it: chat_template_kwargs default_system_message
micro_batch_size and gradient_accumulation_steps say it: batch_size
model.freeze names what stays as it is, by shell patterns: unfrozen_parameters
not built here: activation_offloading adam_beta3 dpo_loss_type dpo_loss_weights
  dpo_use_weighting embedding_lr fp8 layer_offloading lora_alpha_pattern lora_rank_pattern
  lora_target_parameters lr_groups peft peft_init_lora_weights peft_layers_to_transform
  peft_trainable_token_indices process_reward_model qat quantization relora trl vllm
reference log-probabilities are computed before step 1: precompute_ref_log_probs
the bf16 of the JSON: bfloat16 float16 float32
no rows are left out by their length below: eval_sequence_len max_prompt_len min_sample_len
it merges, or serves inference: hf_use_auth_token merge_lora merge_method save_first_step strict
""")
OBJECTIVES = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo", "reward": "reward"}


def settle(draft: Draft) -> None:
    """Take data, objective and adapter; what Axolotl itself asks for is missed here too."""
    rl = draft.given("rl", text)
    rl = "reward" if draft.given("reward_model", flag) else rl
    if rl is not None and rl not in OBJECTIVES:
        raise draft.top.refused("rl", f"{rl}: no objective that is read here")
    for key in ("base_model", "learning_rate"):
        if draft.given(key) is None:
            raise ConfigError(f"{draft.file.path}: {key} is missing, which Axolotl has no default of; add it")
    if rl is not None:
        _objective(draft, rl)
    put_data(draft, rl)
    has_eval = held_out(draft, "val_set_size", draft.given("val_set_size", number))
    settle_arguments(draft, has_eval, "auto", "micro_batch_size", "num_epochs", "lr_scheduler")
    _warmup(draft)
    settle_recomputing(draft, False)
    draft.put(
        "wandb.mode", draft.given("wandb_mode") or ("auto" if draft.given("wandb_project") else "disabled")
    )
    if draft.given("auto_resume_from_checkpoints"):
        draft.put("checkpoint.resume", "auto")
    if draft.given("eager_attention") or draft.given("attn_implementation") == "eager":
        draft.put("model.attention", "eager")
    if tokenizer := draft.given("tokenizer_config", text):
        draft.put("data.tokenizer", {"pretrained": tokenizer})
    if draft.given("adapter"):
        _adapter(draft)


def _warmup(draft: Draft) -> None:
    """Put the warm-up as Axolotl counts it, where the run's steps are known; else the share stands."""
    total, share = draft.recipe.get("max_steps"), draft.recipe.get("schedule.warmup")
    if not isinstance(share, float):
        return
    is_given = draft.file.tree.get("warmup_ratio") is not None or draft.file.tree.get("warmup_steps")
    if total is not None:
        steps = int(share * total)
        steps = steps if is_given else min(steps, 100)
        draft.put("schedule.warmup", 2 if steps == 1 else steps)
    elif not is_given:
        draft.not_taken["warmup_ratio (default)"] = f"{share:g} of the steps; there they are 100 at the most"


def _adapter(draft: Draft) -> None:
    if draft.given("adapter") not in ("lora", "qlora"):
        raise draft.top.refused("adapter", f"{draft.given('adapter')} is not built here; lora and qlora are")
    weights, alpha = draft.given("lora_model_dir", text), draft.given("lora_alpha", number)
    for key in ("lora_r", "lora_alpha"):
        if draft.given(key) is None and weights is None:
            raise ConfigError(f"{draft.file.path}: {key} is missing, which Axolotl has no default of; add it")
    targets, every = draft.given("lora_target_modules", names), draft.given("lora_target_linear", flag)
    settle_bits(draft, "load_in_4bit", 4 if draft.given("load_in_4bit", flag) else None)
    settle_adapter(
        draft,
        rank="lora_r",
        alpha=alpha,
        targets=None if every else targets,
        weights=weights,
        flags=("peft_use_rslora", "peft_use_dora"),
    )
    if not every and targets is None and weights is None:
        draft.not_taken["lora_target_modules (default)"] = "peft's by the model; here all linear layers"


def _objective(draft: Draft, rl: str) -> None:
    kind = OBJECTIVES[rl]
    defaults = {"simpo_gamma": 0.5, "cpo_alpha": 1.0} if kind == "simpo" else {}  # TRL's CPOConfig
    settle_terms(draft, kind, TERMS, {"orpo_alpha": 0.1} | defaults)
    if kind == "reward":
        draft.put("objective.margin_weight", 0.0, "no margins, as there")
    if rl in ("dpo", "ipo") and draft.recipe.pop("objective.label_smoothing", None):
        draft.drop("dpo_label_smoothing", "TRL's sigmoid and ipo losses have none")
    if rl == "ipo":
        draft.put("objective.loss_type", "ipo")


TOOL = Tool(
    title="Axolotl",
    keys=COMMON | OWN,
    without={key: why for key, why in WITHOUT.items() if key not in OWN} | OWN_WITHOUT,
    marks="base_model micro_batch_size sequence_len lora_r sample_packing num_epochs",
    defaults={
        key: DEFAULTS[key] for key in ("weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "seed")
    }
    | {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1.0,
        "sequence_len": 512,
        "lora_dropout": 0.0,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "warmup_ratio": 0.03,
        "save_strategy": "epoch",
        "save_total_limit": 4,
    },
    settle=settle,
)


START = "{{ text_start }}"
PAIRED = "Below is an instruction that describes a task, paired with an input that provides further context. "
ALONE = "Below is an instruction that describes a task. "
COMPLETES = "Write a response that appropriately completes the request."
TO_USER = "Below is an instruction from a USER that describes a task"
CONCISELY = (
    f"{TO_USER}, paired with an input that provides further context. The ASSISTANT writes a response that "
    "concisely and appropriately completes the request.\n\n"
)


@dataclass(frozen=True)
class Style:
    """Formats of a turn with an input, of one without, and of the system text."""

    turn: str
    alone: str
    system: str


INSTRUCT = Style(
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "### Instruction:\n{instruction}\n\n### Response:\n",
    "{system}\n\n",
)
CHAT = Style(
    "USER: {instruction}\n{input}\nASSISTANT:", "USER: {instruction}\nASSISTANT:", "SYSTEM: {system}\n"
)
CHATML = Style(
    "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\n{system}<|im_end|>\n",
)
PHI = Style(
    "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
    "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    "<|system|>\n{system}<|end|>\n",
)
STYLES = {"": INSTRUCT, "instruct": INSTRUCT, "chat": CHAT, "chatml": CHATML, "phi": PHI}
ORCA = Style(
    "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
    "### Human:\n{instruction}\n### Assistant:\n",
    "### System:\n{system}\n",
)
FIELDS = ("instruction", "input", "output")
QUESTION = ("question", "", "answer")
SYSTEMS = (PAIRED + COMPLETES, ALONE + COMPLETES)
CONCISE = (
    CONCISELY,
    f"{TO_USER}. The ASSISTANT writes a response that appropriately and concisely completes the request.\n\n",
)


# type -> style (None: the one behind the colon), system texts with and without input, fields of the row
FIXED: Mapping[str, tuple[Style | None, tuple[str, str], tuple[str, str, str]]] = {
    "alpaca": (None, SYSTEMS, FIELDS),
    "jeopardy": (None, SYSTEMS, ("question", "category", "answer")),
    "gpteacher": (None, SYSTEMS, ("instruction", "input", "response")),
    "oasst": (None, SYSTEMS, ("INSTRUCTION", "", "RESPONSE")),
    "alpaca_instruct": (INSTRUCT, SYSTEMS, FIELDS),
    "alpaca_instruct.load_no_prompt": (INSTRUCT, ("", ""), FIELDS),
    "alpaca_chat": (CHAT, SYSTEMS, FIELDS),
    "alpaca_chat.load_concise": (CHAT, CONCISE, FIELDS),
    "alpaca_chat.load_qa": (CHAT, CONCISE, QUESTION),
    "alpaca_chat.load_camel_ai": (CHAT, CONCISE, ("message_1", "", "message_2")),
    "alpaca_chat.load_no_prompt": (CHAT, ("", ""), FIELDS),
}
# type -> style, field of the system text, fields of the row
WITH_SYSTEM: Mapping[str, tuple[Style, str, tuple[str, str, str]]] = {
    "alpaca_w_system": (CHAT, "system", FIELDS),
    "alpaca_w_system.load_chat": (CHAT, "system", FIELDS),
    "alpaca_w_system.load_instruct": (INSTRUCT, "system", FIELDS),
    "alpaca_w_system.load_open_orca": (ORCA, "system_prompt", ("question", "", "response")),
    "alpaca_w_system.load_open_orca_chatml": (CHATML, "system_prompt", ("question", "", "response")),
}
USER_DEFINED = {
    "system_prompt": "",
    "field_system": "system",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "format": "{instruction} {input} ",
    "no_input_format": "{instruction} ",
    "system_format": "{system}",
}


def instruction_template(said: str) -> str | None:
    """Return the template of a type of instructions; None: the type is not in the tables."""
    base, _, style = said.partition(":")
    if said in WITH_SYSTEM:
        own, field, fields = WITH_SYSTEM[said]
        system = filled(own.system, {"system": column(field)})
        return _instructions(own, choose(column(field), system), "", fields)
    if base not in FIXED or style not in STYLES or (style and FIXED[base][0]):
        return None
    given, (paired, alone), fields = FIXED[base]
    own = given or STYLES[style]
    starts = [literal(own.system.format(system=each)) if each else "" for each in (paired, alone)]
    with_input = column(fields[1]) if fields[1] else ""
    start = choose(with_input, *starts) if with_input else starts[1]
    return _instructions(own, start, "what is " if base == "jeopardy" else "", fields)


def own_template(type_: Section) -> str:
    """Return the template of a `type` that a user defined, as a mapping of formats and fields."""
    given = {key: type_.given(key, text) or default for key, default in USER_DEFINED.items()}
    own = Style(given["format"], given["no_input_format"], given["system_format"])
    field = column(given["field_system"])
    system = f"({field} if {field} is defined else {_string(given['system_prompt'])})"
    fields = (given["field_instruction"], given["field_input"], given["field_output"])
    return _instructions(own, choose(system, filled(own.system, {"system": system})), "", fields)


def _string(value: str) -> str:
    return literal(value).removeprefix("{{ ").removesuffix(" }}") or "''"


def _instructions(style: Style, start: str, before_answer: str, fields: tuple[str, str, str]) -> str:
    expressions = {"instruction": column(fields[0]), "input": column(fields[1]) if fields[1] else "''"}
    turn = filled(style.alone, expressions)
    if fields[1]:
        turn = choose(column(fields[1]), filled(style.turn, expressions), turn)
    answer = literal(before_answer) + "{{ " + column(fields[2]) + " }}" + DIVIDE + "{{ eos_token }}"
    needed = require(expressions["instruction"]) + require(column(fields[2]))
    return of_row(needed + START + start + turn + DIVIDE + learned(answer))


SEGMENTS = of_row(
    "{% for each in row.segments %}"
    + choose("each.label", learned(with_tokens("each.text") + DIVIDE), with_tokens("each.text") + DIVIDE)
    + "{% endfor %}"
)
"""`input_output`: every segment is tokenised apart, with no token of its own."""


@dataclass(frozen=True)
class Chat:
    """How a family of types writes a system text, a question and an answer."""

    system: str
    user: str
    end: str


CHATS = {
    "chatml": Chat(
        "<|im_start|>system\n{}<|im_end|>\n",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    "llama3": Chat(
        "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
}
SIDE = "row[turn.content]"


def _first_of(*fields: str) -> str:
    """Return the expression of the first field that a row has."""
    *first, last = fields
    return "".join(f"row.{name} if row.{name} is defined else " for name in first) + f"row.{last}"


# transform -> expressions of the question and of the answer
PAIRS: Mapping[str, tuple[str, str]] = {
    "default": (
        _first_of("prompt", "input", "question", "instruction"),
        f"({SIDE} or row[turn.content + '_response'])",
    ),
    "argilla_chat": ("row.chosen[0].content", f"{SIDE}[1].content"),
    "icr": ("row.input", SIDE),
    "intel": ("row.question", SIDE),
    "prompt_pairs": ("row.prompt", SIDE),
    "ultra": ("row.prompt", f"{SIDE}[1].content"),
}
JUDGED: Mapping[str, tuple[str, str]] = {
    "argilla": ("row.instruction", "row.completion"),
    "argilla_chat": ("row.completion[0].content", "row.completion[1].content"),
    "intel": ("row.question", "row.completion"),
    "prompt_pairs": ("row.prompt", "row.completion"),
    "ultra": ("row.prompt", "row.completion"),
}


def judged_template(said: str, unpaired: bool) -> str | None:
    """Return the template of a type of preference data, as `llama3.ultra`; None: it is not in the tables."""
    family, _, transform = said.partition(".")
    table = JUDGED if unpaired else PAIRS
    if family not in CHATS or (transform or "default") not in table:
        return None
    chat, (question, answer) = CHATS[family], table[transform or "default"]
    system = "" if transform == "argilla_chat" else choose("row.system", _around(chat.system, "row.system"))
    ended = literal(chat.end) + _ended(chat.end)
    prompt = require(question) + START + system + _around(chat.user, question)
    return of_answers(prompt, f"{require(answer)}{{{{ {answer} }}}}{ended}")


def _ended(tail: str) -> str:
    """Return Jinja that writes the tokenizer's end, where the text does not end with it."""
    return f"{{{{ '' if {_string(tail)}.endswith(eos_token) else eos_token }}}}"


def _around(form: str, expression: str) -> str:
    before, _, after = form.partition("{}")
    return f"{literal(before)}{{{{ {expression} }}}}{literal(after)}"


OWN_PAIRS = {
    "field_prompt": "prompt",
    "field_system": "system",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
}


def own_judged_template(type_: Section, unpaired: bool) -> str:
    """Return the template of preference data whose `type` is a mapping of formats and fields."""
    given = {key: type_.given(key, text) or default for key, default in OWN_PAIRS.items()}
    sides = ("completion",) if unpaired else ("chosen", "rejected")
    formats = {name: type_.given(f"{name}_format", text) or f"{{{name}}}" for name in ("prompt", *sides)}
    columns = {name: column(given[f"field_{name}"]) for name in ("prompt", "system")}
    columns["system"] = f"({columns['system']} or '')"
    answers = []
    for side in sides:
        field = type_.given("field_completion", text) or side if unpaired else given[f"field_{side}"]
        tail = formats[side].rpartition("}")[2]
        answers.append(require(column(field)) + filled(formats[side], {side: column(field)}) + _ended(tail))
    answer = choose("turn.content == 'rejected'", answers[-1], answers[0]) if len(answers) > 1 else answers[0]
    return of_answers(require(columns["prompt"]) + START + filled(formats["prompt"], columns), answer)


def put_data(draft: Draft, rl: str | None) -> None:
    """Put the data sets, and how their rows are written and packed."""
    streams = draft.top.sections("pretraining_dataset")
    entries = draft.top.sections("datasets") + streams
    said = {str(entry.given("type") or ("pretrain" if entry in streams else None)) for entry in entries}
    if len(said) > 1:
        raise draft.top.refused(
            "datasets",
            f"types {', '.join(sorted(said))} in one run: a run here writes all rows by one template",
        )
    kind = "preference" if rl else "text" if said and said <= {"completion", "pretrain"} else "chat"
    put_sources(draft, kind, [_source(draft, entry, kind) for entry in entries])
    tests = draft.top.sections("test_datasets")
    for test in tests:
        if str(test.given("type")) not in said:
            raise test.refused(
                "type", f"{test.given('type')}: an evaluation's rows are written as the training's"
            )
    put_eval_sets(draft, {str(test.given("path")): _source(draft, test, kind) for test in tests})
    length, packs = draft.given("sequence_len", whole), bool(draft.given("sample_packing", flag))
    if kind == "text":
        draft.put("data.sequence_length", length)
        draft.put("data.packing", "concatenate" if streams else "best_fit" if packs else "none")
        draft.not_taken["the token before each text"] = (
            "a tokenizer that begins texts with one does so there alone"
        )
        if streams:
            draft.not_taken["pieces of longer texts"] = "they overlap by up to 256 tokens there, and not here"
        return
    too_long = draft.given("excess_length_strategy", text) or "drop"
    if rl:
        put_preferences(draft, length)
        draft.put("data.too_long", "error" if too_long == "raise" else "drop")
        tell_of_long_rows(draft, "sequence_len")
    else:
        draft.put("data.sequence_length", length)
        draft.put("data.packing", "best_fit" if packs else "none")
        draft.put("data.too_long", "error" if too_long == "raise" else "drop")
        if too_long not in ("drop", "raise"):
            draft.drop("excess_length_strategy", f"{too_long}: a longer row is left out here")
    draft.put("data.append_eos", False)
    if entries:
        _template(draft, entries + tests, rl)


def _template(draft: Draft, entries: list[Section], rl: str | None) -> None:
    """Put what writes the rows. One template is for all: entries that need two are refused."""
    made = [_text_of(draft, entry, rl) for entry in entries]
    if any(each != made[0] for each in made):
        raise draft.top.refused("datasets", "entries whose rows need different templates; a run here has one")
    template, told = made[0]
    if template is not None:
        put_row_template(draft, template, told)
    if rl is None and template is not None:
        draft.put("data.learn_from", "all" if draft.given("train_on_inputs", flag) else "assistant")
    elif draft.given("train_on_inputs", flag):
        draft.drop("train_on_inputs", "the content of every turn counts there; here of the assistant's alone")


def _text_of(draft: Draft, entry: Section, rl: str | None) -> tuple[str | None, str]:
    """Return the template of an entry's rows, None if it is the model's or a file's, and the entry's type."""
    given, unpaired = entry.given("type"), rl == "kto"
    if isinstance(given, dict):
        [own] = entry.sections("type")
        try:
            return (own_judged_template(own, unpaired) if rl else own_template(own)), "type"
        except KeyError as error:
            raise entry.refused("type", f"{error} in a format; its fields alone are known") from None
    said = text(given) if isinstance(given, str) else ""
    if said in CHAT_TYPES.get(rl or "sft", ()):
        _chat(draft, entry, rl)
        return None, said
    if rl:
        template = judged_template(said, unpaired) if rl in ("dpo", "ipo", "kto") else None
    elif said == "input_output":
        template = SEGMENTS
    else:
        template = instruction_template(said)
    if template is None:
        raise entry.refused("type", f"{given}: its text is not in the import's tables (docs/coming-from.md)")
    return template, said


CHAT_FIELDS = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "message_field_training": ("train", "weight"),
    "message_field_training_detail": ("train_detail",),
    "template_thinking_key": ("reasoning_content",),
    "message_property_mappings": (
        {"role": "role", "content": "content"},
        {"role": "from", "content": "value"},
    ),
    "field_thinking": ("reasoning_content", "thinking", "reasoning"),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
}
"""Values of an entry that mean here what they mean there."""
ROLES = {"user": ["user", "human"], "assistant": ["assistant", "gpt"], "system": ["system"], "tool": ["tool"]}
ENTRY_FIELDS = ("messages", "tools", "system", "chosen", "rejected")
"""Fields of the rows that an entry's `field_...` names otherwise."""


CHAT_TYPES = {
    "sft": ("chat_template", "chat_template.load"),
    "dpo": ("chat_template", "chat_template.default"),
    "ipo": ("chat_template", "chat_template.default"),
    "reward": ("bradley_terry.chat_template",),
}


def _chat(draft: Draft, entry: Section, rl: str | None) -> None:
    """Put conversations that a chat template writes, whose fields are those that are known here."""
    for key, known in CHAT_FIELDS.items():
        if (value := entry.given(key)) is not None and value not in known:
            raise entry.refused(key, f"{value!r}: the run reads {' or '.join(map(str, known))}")
    roles = entry.given("roles") or {}
    if roles and not (isinstance(roles, dict) and all(_is_known(*each) for each in roles.items())):
        raise entry.refused("roles", f"{roles}: the run reads {ROLES}")
    for key in ("split_thinking", "drop_system_message"):
        if entry.given(key):
            raise entry.refused(key, "the run reads rows as they are; write them anew without it")
    if rl == "reward":
        draft.put("data.layout", "icr")
    elif rl:
        draft.put("data.layout", "messages")
        draft.put("data.learn_from", "content")
        draft.not_taken["eos_token behind another end of turn"] = "TRL adds and learns it there"
    else:
        draft.put("data.layout", "sharegpt", "the messages, behind a row's `system`")
        draft.put("data.learn_from", "content", "and the tokenizer's eos_token behind it, as there")
    given = entry.given("chat_template", text) or draft.given("chat_template", text) or "tokenizer_default"
    jinja = entry.given("chat_template_jinja", text) or draft.given("chat_template_jinja", text)
    if given == "jinja" or (jinja and given == "tokenizer_default"):
        _jinja(draft, jinja)
    elif given in ("chatml", "llama3"):
        path = draft.folder / "template.jinja"
        draft.files[path] = TEMPLATES[given] + "\n"
        draft.put("data.chat_template", str(path), f"Axolotl's {given}")
    elif given != "tokenizer_default":
        draft.put("data.chat_template", f"{FILL_IN}.jinja")
        draft.drop("chat_template", f"{given}: its text is not in the import's tables")
        draft.fill_in.append(
            f"data.chat_template: Axolotl's file {given}.jinja (utils/chat_templates/templates)"
        )


def _is_known(role: str, theirs: Any) -> bool:
    return isinstance(theirs, list) and set(map(str, theirs)) <= set(ROLES.get(role, ()))


def _jinja(draft: Draft, jinja: str | None) -> None:
    found = draft.found(jinja) if jinja and "{" not in jinja else None
    path = found or draft.folder / "template.jinja"
    if found is None:
        draft.files[path] = (jinja or "") + "\n"
    draft.put("data.chat_template", str(path))


TEMPLATES = {
    "chatml": "{% for turn in messages %}"
    "{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama3": "{% for turn in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + turn.role + '<|end_header_id|>\\n\\n' + turn.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
}


def _source(draft: Draft, entry: Section, kind: str) -> Source:
    found = find_source(draft, entry)
    if any(entry.given("type") in types for types in CHAT_TYPES.values()):
        named = {name: entry.given(f"field_{name}", text) or name for name in ENTRY_FIELDS}
        named |= {"conversations": named.pop("messages")} if kind == "chat" else {}
        found |= {"fields": {ours: theirs for ours, theirs in named.items() if ours != theirs}}
    field = entry.given("text_column", text) or (entry.given("field", text) if kind == "text" else None)
    if kind == "text" and field not in (None, "text"):
        found["text_field"] = field
    entry.given("trust_remote_code")  # no data set's code is run
    return found
