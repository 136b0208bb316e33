"""Configurations of other trainers in small, with data of their forms: what record_oracles.py records ids of.

`MODEL` in a configuration is a folder with the tokenizer that `write_tokenizer` makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1] / "cli" / "import_configs"
RECORDED = HERE / "oracles.json"
TOKENIZER = HERE / "oracle_tokenizer.json"
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "</s>",
]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

INSTRUCTIONS = [
    {"instruction": "Name a river.", "input": "In France.", "output": "The Loire.", "system": ""},
    {"instruction": "Count to three.", "input": "", "output": "\n1, 2, 3", "system": "Be brief."},
    {"instruction": "Say hello", "input": "", "output": " hello  there\n", "system": ""},
]
TALKS = [
    {
        "conversations": [
            {"from": "human", "value": "Is water wet?"},
            {"from": "gpt", "value": "It is.\n\nVery."},
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "Nobody knows."},
        ]
    },
    {
        "conversations": [
            {"from": "system", "value": "You are a duck."},
            {"from": "human", "value": "Speak!"},
            {"from": "gpt", "value": "Quack, quack."},
        ]
    },
]
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
MESSAGES = [
    {"messages": [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]}
    for row in TALKS
]
JUDGED_TALKS = [
    {
        "conversations": [{"from": "human", "value": f"What is {n} + {n}?"}],
        "chosen": {"from": "gpt", "value": f"It is {2 * n}."},
        "rejected": {"from": "gpt", "value": "No idea,\nreally."},
    }
    for n in range(2)
]
LABELLED_TALKS = [
    {
        "messages": [{"role": "user", "content": f"Is {n} odd?"}, {"role": "assistant", "content": said}],
        "label": said == "Yes.",
    }
    for n, said in enumerate(("No.", "Yes."))
]
QUESTIONS = [
    {"system": "", "question": "Which way?", "chosen": "Left.", "rejected": "Right, I think"},
    {"system": "Be kind.", "question": "Am I late?", "chosen": "Not at all.", "rejected": "Yes!"},
]
PAIRED_MESSAGES = [
    {
        "prompt": question,
        "chosen": [{"role": "user", "content": question}, {"role": "assistant", "content": good}],
        "rejected": [{"role": "user", "content": question}, {"role": "assistant", "content": bad}],
    }
    for question, good, bad in (("Which way?", "Left.", "Right"), ("Am I late?", "Never.", "Always."))
]
STRINGS = [
    {"prompt": "The sky is", "completion": " blue.", "label": True},
    {"prompt": "Grass is", "completion": " red.", "label": False},
]
TURNED = [
    {
        "prompt": [{"role": "user", "content": row["question"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }
    for row in QUESTIONS
]
COMPLETED = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in TURNED]
RENAMED = [{"ask": row["instruction"], "more": row["input"], "say": row["output"]} for row in INSTRUCTIONS]
SEGMENTS = [
    {"segments": [{"label": False, "text": "Ask: why\n"}, {"label": True, "text": "\nSo.<|im_end|>"}]}
]

LLAMA_FACTORY = {
    "model_name_or_path": "MODEL",
    "stage": "sft",
    "finetuning_type": "lora",
    "dataset_dir": ".",
    "dataset": "rows",
    "cutoff_len": 512,
    "learning_rate": 1e-4,
}
AXOLOTL = {"base_model": "MODEL", "sequence_len": 512, "learning_rate": 1e-4, "micro_batch_size": 1}
TRL = {"model_name_or_path": "MODEL", "dataset_name": "rows.jsonl", "max_length": 512}


def _llama_factory(entry: dict[str, Any], rows: list[Any], **changes: Any) -> dict[str, Any]:
    table = {"rows": {"file_name": "rows.json", **entry}}
    files = {"dataset_info.json": json.dumps(table), "rows.json": json.dumps(rows)}
    return {"tool": "llama-factory", "config": LLAMA_FACTORY | changes, "files": files}


def _axolotl(
    type_: Any, rows: list[Any], entry: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    datasets = [{"path": "rows.jsonl", "ds_type": "json", "type": type_, **(entry or {})}]
    return {"tool": "axolotl", "config": AXOLOTL | {"datasets": datasets} | changes, "files": _lines(rows)}


def _trl(trainer: str, rows: list[Any], **changes: Any) -> dict[str, Any]:
    return {"tool": f"trl-{trainer}", "config": TRL | changes, "files": _lines(rows)}


def _lines(rows: list[Any]) -> dict[str, str]:
    return {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
OWN_TYPE = {
    "system_prompt": "Help.",
    "format": "Q: {instruction} ({input})\nA:",
    "no_input_format": "Q: {instruction}\nA:",
}
OWN_TYPE |= {
    "field_instruction": "ask",
    "field_input": "more",
    "field_output": "say",
    "system_format": "[{system}] ",
}
CASES: dict[str, dict[str, Any]] = {
    "llama_factory_alpaca_llama3": _llama_factory({}, INSTRUCTIONS, template="llama3")
    | {"eos": "<|endoftext|>", "bos": "<|begin_of_text|>"},
    "llama_factory_alpaca_system_qwen": _llama_factory(
        {"columns": {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}},
        INSTRUCTIONS,
        template="qwen",
    ),
    "llama_factory_renamed_qwen3": _llama_factory(
        {"columns": {"prompt": "ask", "query": "more", "response": "say"}}, RENAMED, template="qwen3"
    ),
    "llama_factory_qwen3_without_thinking": _llama_factory(
        {}, INSTRUCTIONS, template="qwen3", enable_thinking=False, mask_history=True
    ),
    "llama_factory_sharegpt_default": _llama_factory({"formatting": "sharegpt"}, TALKS, template="default"),
    "llama_factory_sharegpt_last_answer": _llama_factory(
        {"formatting": "sharegpt"}, TALKS, template="qwen3_nothink", mask_history=True
    ),
    "llama_factory_sharegpt_llama2": _llama_factory({"formatting": "sharegpt"}, TALKS, template="llama2")
    | {"bos": "<|begin_of_text|>", "begins": True},
    "llama_factory_dpo": _llama_factory(
        {
            "formatting": "sharegpt",
            "ranking": True,
            "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
        },
        JUDGED_TALKS,
        template="llama3",
        stage="dpo",
    )
    | {"bos": "<|begin_of_text|>"},
    "llama_factory_kto": _llama_factory(
        {
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "kto_tag": "label"},
            "tags": OPENAI_TAGS,
        },
        LABELLED_TALKS,
        template="qwen3_nothink",
        stage="kto",
    ),
    "axolotl_alpaca": _axolotl("alpaca", INSTRUCTIONS),
    "axolotl_alpaca_begun": _axolotl("alpaca", INSTRUCTIONS) | {"bos": "<|begin_of_text|>", "begins": True},
    "axolotl_alpaca_chat_style": _axolotl("alpaca:chat", INSTRUCTIONS, train_on_inputs=True),
    "axolotl_alpaca_chat_qa": _axolotl(
        "alpaca_chat.load_qa", [{"question": row["question"], "answer": row["chosen"]} for row in QUESTIONS]
    ),
    "axolotl_system_orca_chatml": _axolotl(
        "alpaca_w_system.load_open_orca_chatml",
        [
            {"system_prompt": r["system"], "question": r["question"], "response": r["chosen"]}
            for r in QUESTIONS
        ],
    ),
    "axolotl_own_type": _axolotl(OWN_TYPE, RENAMED),
    "axolotl_input_output": _axolotl("input_output", SEGMENTS),
    "axolotl_chat_template": _axolotl("chat_template", MESSAGES),
    "axolotl_chat_template_other_eos": _axolotl("chat_template", MESSAGES) | {"eos": "<|endoftext|>"},
    "axolotl_chat_template_llama3": _axolotl(
        "chat_template",
        TALKS,
        {
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        },
        chat_template="llama3",
    )
    | {"eos": "<|eot_id|>", "bos": "<|begin_of_text|>"},
    "axolotl_dpo_intel": _axolotl("chatml.intel", QUESTIONS, rl="dpo"),
    "axolotl_dpo_intel_other_eos": _axolotl("chatml.intel", QUESTIONS, rl="dpo") | {"eos": "<|endoftext|>"},
    "axolotl_dpo_ultra": _axolotl("llama3.ultra", PAIRED_MESSAGES, rl="dpo") | {"eos": "</s>"},
    "axolotl_dpo_argilla_chat": _axolotl("chatml.argilla_chat", PAIRED_MESSAGES, rl="dpo"),
    "axolotl_kto_ultra": _axolotl("llama3.ultra", STRINGS, rl="kto")
    | {"bos": "<|begin_of_text|>", "begins": True, "eos": "<|eot_id|>"},
    "axolotl_dpo_own_type": _axolotl(
        {
            "field_prompt": "question",
            "prompt_format": "[{system}] Q: {prompt}\nA:",
            "chosen_format": " {chosen}<|im_end|>",
            "rejected_format": " {rejected}",
        },
        QUESTIONS,
        rl="dpo",
    ),
    "axolotl_dpo_chat_template": _axolotl(
        "chat_template.default",
        [
            {
                "talk": row["messages"][:1],
                "good": row["messages"][1],
                "bad": {"role": "assistant", "content": "?"},
            }
            for row in MESSAGES[:1]
        ],
        {"field_messages": "talk", "field_chosen": "good", "field_rejected": "bad"},
        rl="dpo",
        chat_template="chatml",
    ),
    "trl_sft_messages": _trl("sft", MESSAGES),
    "trl_sft_messages_other_eos": _trl("sft", MESSAGES) | {"eos": "<|endoftext|>"},
    "trl_sft_assistant_only": _trl("sft", MESSAGES, assistant_only_loss=True) | {"template": MARKED},
    "trl_sft_text": _trl("sft", [{"text": "Once upon"}, {"text": "a time.\n"}], dataset_text_field="text")
    | {"bos": "<|begin_of_text|>", "begins": True},
    "trl_sft_strings": _trl("sft", STRINGS),
    "trl_sft_completed_turns": _trl("sft", COMPLETED),
    "trl_dpo_turns": _trl("dpo", TURNED) | {"eos": "<|endoftext|>"},
    "trl_dpo_strings": _trl(
        "dpo", [{"prompt": r["question"], "chosen": " " + r["chosen"], "rejected": " no"} for r in QUESTIONS]
    ),
    "trl_kto_strings": _trl("kto", STRINGS),
}
DEFAULTS = {"eos": "<|im_end|>", "bos": None, "begins": False, "template": CHATML}


def write_case(name: str, folder: Path) -> Path:
    """Write a case's model folder, data and configuration, and return the configuration's path."""
    import yaml

    case = DEFAULTS | CASES[name]
    write_tokenizer(folder / "model", case)
    for file, content in case["files"].items():
        (folder / file).write_text(content)
    config = json.loads(json.dumps(case["config"]).replace('"MODEL"', json.dumps(str(folder / "model"))))
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def write_tokenizer(folder: Path, case: dict[str, Any]) -> None:
    """Write a tokenizer with the case's tokens of beginning and end, and a model's config."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_file(str(TOKENIZER))
    bos = case["bos"]
    if case["begins"]:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, core.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=case["eos"], pad_token="<|endoftext|>", bos_token=bos
    )
    tokenizer.chat_template = case["template"]
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": core.get_vocab_size(),
    }
    (folder / "config.json").write_text(json.dumps(config | sizes | {"max_position_embeddings": 1024}))
