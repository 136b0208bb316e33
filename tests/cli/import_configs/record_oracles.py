"""Records what Axolotl and TRL themselves make of oracle_cases.py: oracles.json.

Run in an environment that has the two trainers, and this repository on the path:

    PYTHONPATH=.:tests:axolotl/src python tests/cli/import_configs/record_oracles.py

Recorded with Axolotl 067b021 (2026-07-24) and TRL 1.16.0.
"""

from __future__ import annotations

import json
import os
import tempfile
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from oracle_cases import CASES, DEFAULTS, RECORDED, SPECIAL, TOKENIZER, write_case

TEXTS = [json.dumps(CASES, indent=1), Path(__file__).read_text(), "\n\n\n", "the answer is that there is one"]


def train_tokenizer() -> None:
    """Train the byte-level BPE of all cases, with pieces of white space that span lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    core.save(str(TOKENIZER), pretty=False)


def axolotl(config: dict[str, Any], tokenizer: Any) -> list[Any]:
    """Return rows of Axolotl's strategy of the type; of preference data, of TRL's trainer behind it."""
    from axolotl.utils.data.wrappers import get_dataset_wrapper
    from axolotl.utils.dict import DictDefault
    from datasets import Dataset

    entry = config["datasets"][0]
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    cfg = DictDefault({"train_on_inputs": False, **config})
    if rl := config.get("rl"):
        module, _, function = entry["type"].partition(".")
        strategy = getattr(import_module(f"axolotl.prompt_strategies.{rl}.{module}"), function)(cfg)
        transform = strategy[0] if isinstance(strategy, tuple) else strategy
        more = {"tokenizer": tokenizer} if "tokenizer" in signature(transform).parameters else {}
        made = [transform(dict(row), **more) for row in rows]
        return trl(
            rl,
            {},
            tokenizer,
            [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in made],
        )
    dataset, _ = get_dataset_wrapper(
        dataset_config=DictDefault(entry),
        tokenizer=tokenizer,
        cfg=cfg,
        dataset_base_type=entry["type"],
        dataset=Dataset.from_list(rows),
        dataset_prompt_style=None,
    )
    return [[_masked(row["input_ids"], row["labels"])] for row in dataset]


def trl(trainer: str, config: dict[str, Any], tokenizer: Any, rows: list[Any] | None = None) -> list[Any]:
    """Return the prepared rows of TRL's trainer."""
    import trl as library
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    name = {"sft": "SFT", "dpo": "DPO", "kto": "KTO"}[trainer]
    given = {key: value for key, value in config.items() if key not in ("model_name_or_path", "dataset_name")}
    arguments = getattr(library, f"{name}Config")(
        output_dir="out", report_to="none", use_cpu=True, bf16=False, per_device_train_batch_size=2, **given
    )
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    if rows is None:
        rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    more = {} if trainer == "sft" else {"ref_model": LlamaForCausalLM(model.config)}
    made = getattr(library, f"{name}Trainer")(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **more
    ).train_dataset
    if trainer == "sft":
        return [[_masked(row["input_ids"], row.get("labels", row["input_ids"]))] for row in made]
    sides = ("completion",) if trainer == "kto" else ("chosen", "rejected")
    return [
        [
            [
                row["prompt_ids"] + row[f"{side}_ids"],
                [0] * len(row["prompt_ids"]) + [1] * len(row[f"{side}_ids"]),
            ]
            for side in sides
        ]
        for row in made
    ]


def _masked(ids: list[int], labels: list[int]) -> list[list[int]]:
    return [list(ids), [int(label != -100) for label in labels]]


def main() -> None:
    """Record every case, each in a folder of its own."""
    from transformers import AutoTokenizer

    if not TOKENIZER.exists():
        train_tokenizer()
    recorded = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            config = yaml.safe_load(write_case(name, Path(folder)).read_text())
            os.chdir(folder)
            tokenizer = AutoTokenizer.from_pretrained("model")
            assert tokenizer.eos_token == (DEFAULTS | case)["eos"]
            tool, _, trainer = case["tool"].partition("-")
            made = trl(trainer, config, tokenizer) if tool == "trl" else axolotl(config, tokenizer)
            recorded[name] = made
            os.chdir("/")
    lines = (
        f"{json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}" for name, rows in recorded.items()
    )
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
