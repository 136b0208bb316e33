"""Records what LLaMA-Factory, Axolotl and TRL themselves make of oracle_cases.py: oracles.json.

Run in an environment that has the three trainers, and this repository on the path:

    PYTHONPATH=.:tests:LLaMA-Factory/src:axolotl/src python tests/cli/import_configs/record_oracles.py

Recorded with LLaMA-Factory ff6d4d1 (2026-08-18), Axolotl 067b021 (2026-07-24) and TRL 1.16.0. The texts are
text alone, so that torchaudio, which LLaMA-Factory imports, is not needed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from importlib import import_module
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from support.oracle_cases import CASES, DEFAULTS, RECORDED, SPECIAL, TOKENIZER, write_case

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


def llama_factory(config: dict[str, Any], tokenizer: Any) -> list[Any]:
    """Return rows of LLaMA-Factory's processor of the stage."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"  # of transformers, whose tokenizers are all that is used
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import get_dataset_list
    from llamafactory.data.processor import (
        FeedbackDatasetProcessor,
        PairwiseDatasetProcessor,
        SupervisedDatasetProcessor,
    )
    from llamafactory.data.template import TEMPLATES, get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    keys = (
        "template",
        "dataset",
        "dataset_dir",
        "cutoff_len",
        "mask_history",
        "enable_thinking",
        "train_on_prompt",
    )
    arguments = DataArguments(**{key: config[key] for key in keys if key in config})
    template = get_template_and_fix_tokenizer(tokenizer, arguments)
    [attributes] = get_dataset_list(arguments.dataset, arguments.dataset_dir)
    convert = get_dataset_converter(attributes.formatting, attributes, arguments)
    rows = [convert(row) for row in json.loads(Path(attributes.dataset_name).read_text())]
    examples = {key: [row[key] for row in rows] for key in rows[0]}
    of_stage = {
        "sft": SupervisedDatasetProcessor,
        "dpo": PairwiseDatasetProcessor,
        "kto": FeedbackDatasetProcessor,
    }
    made = of_stage[config["stage"]](template, tokenizer, None, arguments).preprocess_dataset(examples)
    assert TEMPLATES
    sides = ("chosen_", "rejected_") if config["stage"] == "dpo" else ("",)
    columns = [list(zip(made[f"{side}input_ids"], made[f"{side}labels"], strict=True)) for side in sides]
    return [[_masked(ids, labels) for ids, labels in answers] for answers in zip(*columns, strict=True)]


def axolotl(config: dict[str, Any], tokenizer: Any) -> list[Any]:
    """Return rows of Axolotl's strategy of the type; of preference data, of TRL's trainer behind it."""
    from axolotl.utils.data.wrappers import get_dataset_wrapper
    from axolotl.utils.dict import DictDefault
    from datasets import Dataset

    entry = config["datasets"][0]
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    cfg = DictDefault({"train_on_inputs": False, **config})
    rl = config.get("rl")
    if rl:
        named = entry["type"] if isinstance(entry["type"], str) else "user_defined.default"
        module, _, function = named.partition(".")
        strategy = getattr(import_module(f"axolotl.prompt_strategies.{rl}.{module}"), function or "default")
        transform = strategy(cfg)
        transform = transform[0] if isinstance(transform, tuple) else transform
        more = {"tokenizer": tokenizer} if "tokenizer" in signature(transform).parameters else {}
        made = [transform(dict(row), **more) for row in rows]
        names = ("prompt", "completion", "label") if rl == "kto" else ("prompt", "chosen", "rejected")
        return trl(rl, {}, tokenizer, [{name: row[name] for name in names} for row in made])
    base, _, style = entry["type"].partition(":") if isinstance(entry["type"], str) else ("", "", "")
    dataset, _ = get_dataset_wrapper(
        dataset_config=DictDefault(entry),
        tokenizer=tokenizer,
        cfg=cfg,
        dataset_base_type=base,
        dataset=Dataset.from_list(rows),
        dataset_prompt_style=style or None,
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
            if tool == "trl":
                recorded[name] = trl(trainer, config, tokenizer)
            else:
                recorded[name] = (axolotl if tool == "axolotl" else llama_factory)(config, tokenizer)
            os.chdir("/")
    lines = (
        f"{json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}" for name, rows in recorded.items()
    )
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
