"""Answers which features combine, by the checks that a run makes before it starts.

The table below has only the keys that ask for a feature. Whether keys combine is decided by the recipe's
schema, contradictions.py and split_conflicts.py, as for a run.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from string import ascii_lowercase

from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.contradictions import PAIR_OBJECTIVES, UNPAIRED_OBJECTIVE
from pipeline.config.deepspeed_check import check_deepspeed_json
from pipeline.config.loading import ConfigFile, Tree, get_dotted, parse_override, set_dotted
from pipeline.config.optional_packages import MissingPackageError
from pipeline.config.settings import Settings, combine_files
from pipeline.config.split import DEGREES, Device
from pipeline.config.split_conflicts import RULES
from pipeline.errors import ConfigError

_ZERO = "ds.zero_optimization"
_OWN = "your_module"
FEATURES: dict[str, dict[str, str]] = {
    "splits": {
        "single": "ds.torch.parallel=single",
        "dp": "ds.torch.parallel=dp",
        "ddp": "ds.torch.parallel=ddp",
        **{f"zero{stage}": f"{_ZERO}.stage={stage}" for stage in range(4)},
        "offload_optimizer": f"{_ZERO}.offload_optimizer.device=cpu",
        "offload_param": f"{_ZERO}.offload_param.device=cpu",
        "nvme": " ".join(
            f"{_ZERO}.offload_{what}.device=nvme {_ZERO}.offload_{what}.nvme_path=/local_nvme"
            for what in ("optimizer", "param")
        ),
        "hpz": f"{_ZERO}.zero_hpz_partition_size=2",
        "zeropp": f"{_ZERO}.zero_quantized_weights=true {_ZERO}.zero_quantized_gradients=true",
        "tensor": "ds.tensor_parallel.autotp_size=2",
        "pipeline": "ds.pipeline.stages=2",
        "sequence": "ds.sequence_parallel_size=2",
    },
    "precision": {
        "fp32": "ds.bf16.enabled=false ds.fp16.enabled=false",
        "bf16": "ds.bf16.enabled=true",
        "fp16": "ds.fp16.enabled=true",
        "fp8": "model.fp8=tensorwise",
        "bf16_states": "ds.bf16.enabled=true ds.bf16.bf16_master_weights_and_grads=true "
        "ds.bf16.bf16_optimizer_states=true",
        "fp32_accumulation": "ds.data_types.grad_accum_dtype=fp32",
    },
    "objectives": {
        "pretraining": "objective.kind=causal_lm data.kind?=text",
        "chat": "objective.kind=causal_lm data.kind=chat",
        **{
            kind: f"objective.kind={kind} data.kind?=preference"
            for kind in (*PAIR_OBJECTIVES, UNPAIRED_OBJECTIVE)
        },
        "classification": "objective.kind=classification data.kind?=digits model.kind?=cnn",
        "own_loss": f"objective.kind={_OWN}:loss",
    },
    "models": {
        "own_model": f"model.kind={_OWN}:build_model objective.kind?=model_loss",
        "router_loss": "model.architecture=mixtral model.extra.output_router_logits=true",
        "freeze": 'model.freeze=["model.embed_tokens.*"]',
        "neftune": "model.neftune_alpha=5",
        "activation_checkpointing": "model.activation_checkpointing=full",
        "activation_offload": "model.activation_checkpointing=full model.activation_offload=true",
        "compile": "ds.compile.enabled=true",
        "eager_attention": "model.attention=eager",
        "flash_attention": "model.attention=flash_attention_2",
    },
    "adapters": {
        **{kind: f"adapter.kind={kind}" for kind in ("lora", "rslora", "dora")},
        "qlora": "adapter.quantize=nf4",
    },
    "data": {
        "packed": "data.packing=best_fit",
        "padded": "data.packing=none",
        "streamed": 'data.sources=[{"dataset":"OWNER/NAME","streaming":true}]',
        "weighted": 'data.sources=[{"paths":["a"],"weight":3},{"paths":["b"],"weight":1}]',
        "curriculum": f'data.curriculum={_OWN}:weights data.sources?=[{{"paths":["a"]}},{{"paths":["b"]}}]',
        "images": "data.kind=images model.kind?=cnn",
        "own_data": f"data.kind={_OWN}:dataset",
    },
    "optimizers": {
        "adamw": "optimizer.kind=adamw",
        "sgd": "optimizer.kind=sgd",
        "adafactor": "optimizer.kind=adafactor",
        "muon": 'optimizer.groups=[{"patterns":["*_proj*weight"],"kind":"muon"}]',
        "lion": "optimizer.kind=lion",
        "adam8bit": "optimizer.kind=adamw_8bit",
        "own_optimizer": f"optimizer.kind={_OWN}:optimizer",
    },
    "the run": {
        "micro_batch_auto": "batch.micro_batch_size=auto batch.global_batch_size=64",
        "skip": "watch.on_nonfinite=skip watch.on_spike=skip",
        "rollback": "watch.on_nonfinite=rollback watch.on_spike=rollback checkpoint.every?=100",
        "eval_tasks": 'eval.tasks=["arc_easy"]',
        "early_stopping": "early_stopping.patience=3 eval.every?=100",
    },
}
"""Group -> feature -> keys that ask for it, as on a command line.

A key with `?=` has this value unless another feature chooses it.
"""
WORDS = {name: words for group in FEATURES.values() for name, words in group.items()}
SPLIT_COLUMNS = (
    *("single", "dp", "ddp", "zero0", "zero1", "zero2", "zero3", "zero2 offload_optimizer"),
    *("zero3 offload_optimizer offload_param", "zero3 nvme", "zero3 hpz"),
    *("zero1 tensor", "zero1 pipeline", "zero3 sequence"),
)
"""Columns of the table: features of a split."""
GPU = Device("cuda", bf16=True, fp16=True, fp8=True)
# Recipe of which a feature changes some keys.
_LANGUAGE_MODEL = {"architecture": "llama", "num_layers": 4, "num_heads": 4, "hidden_size": 64}
_DATA_PATHS = {
    **{kind: {"paths": ["data"]} for kind in ("text", "chat", "preference")},
    "images": {"path": "data"},
}


@dataclass(frozen=True)
class Combined:
    """Keys that ask for several features together."""

    keys: dict[str, str]
    """Dotted key, with `ds.` for the DeepSpeed JSON -> value as on a command line."""

    def build(self) -> tuple[Tree, Tree | None]:
        """Return a recipe and, if one is needed, a DeepSpeed JSON with these keys."""
        trees: dict[bool, Tree] = {False: {"max_steps": 100}, True: {}}
        for key, value in self.keys.items():
            parts, parsed = parse_override(f"{key}={value}")
            in_json = parts[0] == "ds"
            set_dotted(trees[in_json], parts[in_json:], parsed, "features")
        recipe = trees[False]
        model = recipe.setdefault("model", {})
        if model.setdefault("kind", "causal_lm") == "causal_lm":
            recipe["model"] = _LANGUAGE_MODEL | model
        data = recipe.setdefault("data", {})
        paths = _DATA_PATHS.get(data.setdefault("kind", "text"), {})
        recipe["data"] = ({} if "sources" in data else paths) | data
        return recipe, trees[True] or None

    def count_ranks(self, deepspeed: Tree | None) -> int:
        """Return a number of ranks that the split can use."""
        if deepspeed is None or get_dotted(deepspeed, "torch.parallel") in ("single", "dp"):
            return 1
        return 2 * math.prod(get_dotted(deepspeed, key) or 1 for key in DEGREES)

    def check(self, device: Device) -> int:
        """Check the features as a run would, and return the number of ranks of the check.

        Raises:
            ConfigError: A run with these features is refused. The message has no file or line.
        """
        recipe, deepspeed = self.build()
        ranks = self.count_ranks(deepspeed)
        file = ConfigFile(Path("recipe"), recipe)
        split = None if deepspeed is None else ConfigFile(Path("JSON"), deepspeed)
        try:
            if split is not None:
                check_deepspeed_json(split)
            Settings(combine_files(file, split), file.path, split).resolve(ranks, device)
        except MissingPackageError:
            raise
        except ConfigError as error:
            lines = [line.removeprefix("recipe: ").removeprefix("JSON: ") for line in str(error).splitlines()]
            raise ConfigError("; ".join(lines)) from None
        return ranks

    def __str__(self) -> str:
        return shlex.join(f"{key}={value}" for key, value in self.keys.items())


def combine_features(names: Sequence[str]) -> Combined:
    """Return the keys that ask for these features.

    Raises:
        ConfigError: A name is unknown, or two features choose different values of a key.
    """
    chosen: dict[str, tuple[str, str]] = {}
    defaults: dict[str, str] = {}
    for name in dict.fromkeys(names):
        if name not in WORDS:
            near = " or ".join(get_close_matches(name, WORDS, n=3))
            hint = f"did you mean {near}?" if near else f"{format_pipeline_command('supports')} lists all"
            raise ConfigError(f"{name!r} is no known feature; {hint}")
        for word in WORDS[name].split():
            key, _, value = word.partition("=")
            if key.endswith("?"):
                defaults.setdefault(key.removesuffix("?"), value)
                continue
            other, other_value = chosen.setdefault(key, (name, value))
            if other_value != value:
                key = key.removeprefix("ds.")
                raise ConfigError(f"{other} and {name}: both choose {key}; name one of them")
    keys = {key: value for key, (_, value) in chosen.items()}
    return Combined(keys | {key: value for key, value in defaults.items() if key not in keys})


def format_features_table() -> str:
    """Return the table of features and splits, with a note for each refusal.

    It is the table for GPUs with every optional package. A feature that every split refuses is left out, and
    so are reasons that the table of rules has.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in [name for group, features in FEATURES.items() if group != "splits" for name in features]:
        refusals = tuple(_find_refusal([*split.split(), name]) for split in SPLIT_COLUMNS)
        rows.setdefault(refusals, []).append(name)
    letters: dict[str, str] = {}
    lines = []
    for refusals, names in rows.items():
        if all(refusals):
            continue
        cells = [
            letters.setdefault(each, ascii_lowercase[len(letters)]) if each else "yes" for each in refusals
        ]
        lines.append(f"| {', '.join(names)} | {' | '.join(cells)} |")
    head = f"| feature | {' | '.join(split.replace(' ', ', ') for split in SPLIT_COLUMNS)} |"
    rules = {f"{rule.combination}: {rule.reason}; use {rule.alternative}": rule for rule in RULES}
    notes = [
        f"- {letter}: {rules[refusal].combination if refusal in rules else refusal}"
        for refusal, letter in letters.items()
    ]
    return "\n".join([head, "|---" * (len(SPLIT_COLUMNS) + 1) + "|", *lines, "", *notes])


def _find_refusal(names: list[str]) -> str:
    """Return the refusal of these features on a GPU; empty if there is none."""
    try:
        combine_features(names).check(GPU)
    except MissingPackageError:
        return ""
    except ConfigError as error:
        return str(error)
    return ""
