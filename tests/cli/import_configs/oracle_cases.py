"""Configurations of other trainers in small, with data of their forms: what record_oracles.py records ids of.

`MODEL` in a configuration is a folder with the tokenizer that `write_tokenizer` makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
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
QUESTIONS = [
    {"system": "", "question": "Which way?", "chosen": "Left.", "rejected": "Right, I think"},
    {"system": "Be kind.", "question": "Am I late?", "chosen": "Not at all.", "rejected": "Yes!"},
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
AXOLOTL = {"base_model": "MODEL", "sequence_len": 512, "learning_rate": 1e-4, "micro_batch_size": 1}
TRL = {"model_name_or_path": "MODEL", "dataset_name": "rows.jsonl", "max_length": 512}


def _axolotl(
    type_: Any, rows: list[Any], entry: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    datasets = [{"path": "rows.jsonl", "ds_type": "json", "type": type_, **(entry or {})}]
    return {"tool": "axolotl", "config": AXOLOTL | {"datasets": datasets} | changes, "files": _lines(rows)}


def _trl(trainer: str, rows: list[Any], **changes: Any) -> dict[str, Any]:
    return {"tool": f"trl-{trainer}", "config": TRL | changes, "files": _lines(rows)}


def _lines(rows: list[Any]) -> dict[str, str]:
    return {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


CASES: dict[str, dict[str, Any]] = {
    "axolotl_chat_template": _axolotl("chat_template", MESSAGES),
    "axolotl_chat_template_other_eos": _axolotl("chat_template", MESSAGES) | {"eos": "<|endoftext|>"},
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
    "trl_sft_completed_turns": _trl("sft", COMPLETED, completion_only_loss=True),
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
