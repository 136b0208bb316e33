"""Writes values.json: what TRL's own trainers say of a batch, the loss and the norm of its gradient.

TRL is no dependency. In a copy of the environment:
    pip install --no-deps trl==1.16.0 && PYTHONPATH=tests python tests/trl_values/make_values.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_values.model import VOCABULARY, margin_of, small_model

VALUES = Path(__file__).with_name("values.json")
PAIRS = 6
DPO = {
    "dpo": {"loss_type": ["sigmoid"]},
    "dpo hinge": {"loss_type": ["hinge"]},
    "dpo ipo": {"loss_type": ["ipo"]},
    "dpo robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "dpo of means": {"loss_type": ["sigmoid_norm"], "beta": 2.0},
    "dpo sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
}
REWARD = {
    "reward": {"with_margins": False},
    "reward of margins, centred": {"with_margins": True, "center_rewards_coefficient": 0.01},
}
CPO = {
    "cpo": {"loss_type": "sigmoid"},
    "cpo smoothed": {"loss_type": "sigmoid", "label_smoothing": 0.2},
    "cpo hinge": {"loss_type": "hinge", "beta": 0.5},
    "cpo ipo": {"loss_type": "ipo", "cpo_alpha": 0.5},
    "simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
}


def drawn() -> dict[str, Any]:
    """Return token ids. Prompts of `short` have one token.

    TRL's ORPO counts a prompt's tokens in the cross entropy, and there are none then.
    """
    generator = torch.Generator().manual_seed(7)

    def ids(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(3, VOCABULARY, (size,), generator=generator).tolist()

    pairs = [{"prompt": ids(1, 7), "chosen": ids(2, 9), "rejected": ids(2, 9)} for _ in range(PAIRS)]
    short = [{**pair, "prompt": pair["prompt"][:1]} for pair in pairs]
    examples = [
        {"prompt": ids(1, 7), "answer": ids(2, 9), "mismatched": ids(2, 9), "desirable": number % 3 > 0}
        for number in range(PAIRS)
    ]
    return {"pairs": pairs, "short": short, "examples": examples}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def settings(kind: Any, folder: str, **further: Any) -> Any:
    return kind(
        output_dir=folder, report_to=[], use_cpu=True, bf16=False, per_device_train_batch_size=PAIRS,
        gradient_checkpointing=False, **further,
    )  # fmt: skip


def told(model: torch.nn.Module, loss: torch.Tensor, metrics: dict[str, Any]) -> dict[str, float]:
    model.zero_grad()
    loss.backward()
    gradients = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    values = {"loss": float(loss.detach().double()), "grad_norm": float(torch.stack(gradients).norm())}
    names = {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "kl"}
    return values | {k: float(v[-1] if isinstance(v, list) else v) for k, v in metrics.items() if k in names}


def padded(rows: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """(prompt, answer) of each -> ids, labels and mask, padded on the right."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    for row, (prompt, answer) in enumerate(rows):
        whole = torch.tensor(prompt + answer)
        ids[row, : len(whole)], labels[row, len(prompt) : len(whole)] = whole, torch.tensor(answer)
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def sides(pairs: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch of TRL's trainers without a reference."""
    batch = {}
    for side in ("chosen", "rejected"):
        found = padded([(pair["prompt"], pair[side]) for pair in pairs])
        batch |= {f"{side}_{key}": value for key, value in found.items()}
    return batch


def of_dpo(data: dict[str, Any], folder: str, section: dict[str, Any]) -> dict[str, float]:
    model = small_model(0.0)
    rows = Dataset.from_list([{"prompt": "w3 w4", "chosen": " w5", "rejected": " w6"}] * PAIRS)
    trainer = DPOTrainer(
        model, small_model(0.2), settings(DPOConfig, folder, **section),
        train_dataset=rows, processing_class=tokenizer(),
    )  # fmt: skip
    pairs = [{f"{key}_ids": ids for key, ids in pair.items()} for pair in data["pairs"]]
    loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(pairs))
    return told(trainer.model, loss, trainer._metrics["train"])


def of_kto(data: dict[str, Any], folder: str) -> dict[str, float]:
    model = small_model(0.2)
    rows = [{"prompt": "w3 w4", "completion": f" w{5 + n}", "label": n % 2 == 0} for n in range(PAIRS)]
    trainer = KTOTrainer(
        model, small_model(0.0), settings(KTOConfig, folder, desirable_weight=1.3, undesirable_weight=0.8),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
    )  # fmt: skip
    given = [
        {
            "prompt_ids": each["prompt"],
            "completion_ids": each["answer"],
            "KL_completion_ids": each["mismatched"],
            "label": each["desirable"],
        }
        for each in data["examples"]
    ]
    loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(given))
    return told(trainer.model, loss, trainer._metrics["train"])


def of_reward(data: dict[str, Any], folder: str, with_margins: bool, **section: Any) -> dict[str, float]:
    rows = Dataset.from_list([{"chosen": "w3 w5", "rejected": "w3 w6"}] * PAIRS)
    trainer = RewardTrainer(
        small_model(0.0, LlamaForSequenceClassification), settings(RewardConfig, folder, **section),
        train_dataset=rows, processing_class=tokenizer(),
    )  # fmt: skip
    given = [
        {f"{side}_ids": each["prompt"] + each[side] for side in ("chosen", "rejected")}
        | ({"margin": margin_of(each)} if with_margins else {})
        for each in data["pairs"]
    ]
    loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(given))
    found = {key: value[-1] for key, value in trainer._metrics["train"].items()}
    found |= {"rewards/accuracies": found["accuracy"], "rewards/margins": found["margin"]}
    return told(trainer.model, loss, found)


def without_reference(
    kinds: tuple[Any, Any], pairs: list[dict[str, list[int]]], folder: str, **section: Any
) -> dict[str, float]:
    rows = Dataset.from_list([{"prompt": "w3 w4", "chosen": "w5", "rejected": "w6"}] * PAIRS)
    config, kind = kinds
    trainer = kind(
        model=small_model(0.0), args=settings(config, folder, **section),
        train_dataset=rows, processing_class=tokenizer(),
    )  # fmt: skip
    loss, metrics = trainer.get_batch_loss_metrics(trainer.model.train(), sides(pairs))
    return told(trainer.model, loss, metrics)


def main() -> None:
    data = drawn()
    with tempfile.TemporaryDirectory() as folder:
        values = {name: of_dpo(data, folder, section) for name, section in DPO.items()}
        values["kto"] = of_kto(data, folder)
        values["orpo"] = without_reference((ORPOConfig, ORPOTrainer), data["short"], folder)
        values |= {name: of_reward(data, folder, **section) for name, section in REWARD.items()}
        for name, section in CPO.items():
            values[name] = without_reference((CPOConfig, CPOTrainer), data["pairs"], folder, **section)
    content = {"trl": trl.__version__, "data": data, "values": values}
    VALUES.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
