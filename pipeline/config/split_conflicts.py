"""Combinations of settings that do not work, each with its reason and the nearest alternative.

docs/reference/splits.md has the same table; `format_rules_table` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.config.deepspeed_check import (
    MASTER_WEIGHT_KEYS,
    has_16bit_master_weights,
    has_16bit_optimizer_states,
)
from pipeline.config.loading import ConfigFile, Tree, get_dotted
from pipeline.config.schema import RunConfig
from pipeline.config.split import Device, Split
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Combination:
    """Resolved settings of a job, which every rule of the table checks."""

    config: RunConfig
    deepspeed: Tree
    """Dict that DeepSpeed gets; empty for plain PyTorch."""
    split: Split
    device: Device
    compile: bool
    """Whether torch.compile compiles the blocks."""

    def json_value(self, dotted: str) -> Any:
        """Return a value of the DeepSpeed JSON; `None` if it is not given."""
        return get_dotted(self.deepspeed, dotted)

    def zero_value(self, dotted: str) -> Any:
        """Return a value of the zero_optimization section; `None` if it is not given."""
        return get_dotted(self.deepspeed, f"zero_optimization.{dotted}")

    def offloads(self, what: str) -> bool:
        """Return whether `param` or `optimizer` (state) is offloaded to host memory or NVMe."""
        return self.zero_value(f"offload_{what}.device") in ("cpu", "nvme")

    @property
    def has_several_optimizers(self) -> bool:
        """Return whether groups of parameters have different kinds of optimizers."""
        optimizer = self.config.optimizer
        return any(group.kind not in (None, optimizer.kind) for group in optimizer.groups or [])

    @property
    def multiplies_in_fp8(self) -> bool:
        """Return whether linear layers multiply in fp8."""
        return self.model_value("fp8") not in (None, "none")

    @property
    def quantizes_base(self) -> bool:
        """Return whether the base of an adapter is stored in 4 bits."""
        return self.config.adapter is not None and self.config.adapter.quantize is not None

    def model_value(self, field: str) -> Any:
        """Return a value of the model section; `None` if it is not stated."""
        return getattr(self.config.model, field, None)

    def divides(self, degree: int, *fields: str) -> bool:
        """Return whether the degree divides these fields of the model section; `None` counts as divided."""
        return all((self.model_value(field) or degree) % degree == 0 for field in fields)


@dataclass(frozen=True)
class ConflictRule:
    """One row of the table: a combination that does not work."""

    combination: str
    """Description of the combination."""
    reason: str
    """Reason why the combination does not work."""
    alternative: str
    """Settings to use instead; they follow the word "use"."""
    is_broken: Callable[[Combination], bool]
    """Function that returns whether the settings of a job are such a combination."""


RULES: list[ConflictRule] = [
    ConflictRule(
        "`parallel: single` or `dp` on several ranks",
        "both use one process; every rank would train a separate model",
        "one process, or parallel: ddp",
        lambda c: c.split.parallel in ("single", "dp") and c.split.world_size > 1,
    ),
    ConflictRule(
        "pipeline stages with ZeRO 2 or 3",
        "a stage sums the gradients of its micro-batches, so it cannot shard them after each",
        "zero_optimization.stage 1",
        lambda c: c.split.pipeline_stages > 1 and c.split.zero_stage >= 2,
    ),
    ConflictRule(
        "two of pipeline stages, tensor and sequence parallelism",
        "DeepSpeed builds the process groups of only one of them",
        "one of them, with ZeRO for the rest",
        lambda c: (
            sum(n > 1 for n in (c.split.pipeline_stages, c.split.tensor_parallel, c.split.sequence_parallel))
            > 1
        ),
    ),
    ConflictRule(
        "pipeline stages with offloading",
        "the pipeline engine keeps its optimizer on the device",
        "ZeRO 3 with offloading and no stages",
        lambda c: c.split.pipeline_stages > 1 and (c.offloads("optimizer") or c.offloads("param")),
    ),
    ConflictRule(
        "tensor, pipeline or sequence parallelism with a model that is no `causal_lm`",
        "they are implemented for language models",
        "ZeRO 3, which shards any nn.Module",
        lambda c: c.split.dp_world_size < c.split.world_size and c.config.model.language_model is None,
    ),
    ConflictRule(
        "tensor or sequence parallelism over ranks that do not divide the heads",
        "each rank has whole attention heads (num_heads, with tensor parallelism also num_key_value_heads)",
        "a degree that divides them",
        lambda c: (
            not (
                c.divides(c.split.tensor_parallel, "num_heads", "num_key_value_heads")
                and c.divides(c.split.sequence_parallel, "num_heads")
            )
        ),
    ),
    ConflictRule(
        "sequence parallelism whose degree neither divides the key-value heads nor is a multiple of them",
        "key-value heads are divided or repeated evenly (num_key_value_heads)",
        "a degree that divides num_key_value_heads, or a multiple of it",
        lambda c: not _shares_evenly(c.split.sequence_parallel, c.model_value("num_key_value_heads")),
    ),
    ConflictRule(
        "sequence parallelism over ranks that do not divide `data.sequence_length`",
        "every rank has an equal part of a sequence",
        "a sequence_length that the degree divides",
        lambda c: (
            c.config.data.text is not None
            and c.config.data.text.sequence_length % c.split.sequence_parallel != 0
        ),
    ),
    ConflictRule(
        "sequence parallelism with `attention: eager`",
        "it would need the mask of the whole sequence on every rank",
        "attention: auto",
        lambda c: c.split.sequence_parallel > 1 and c.model_value("attention") == "eager",
    ),
    ConflictRule(
        "pipeline stages with `objective.kind: kto`",
        "its baseline needs a forward of all micro-batches before the first backward, which a pipeline of "
        "stages does not run",
        "ZeRO, or dpo",
        lambda c: c.split.pipeline_stages > 1 and c.config.objective.kind == "kto",
    ),
    ConflictRule(
        "`model.extra.output_router_logits` with pipeline stages or tensor parallelism",
        "the routers' loss is not computed with these splits",
        "ZeRO or sequence parallelism, or output_router_logits: false, which trains without that loss",
        lambda c: bool(
            c.model_value("balances_experts") and (c.split.pipeline_stages > 1 or c.split.tensor_parallel > 1)
        ),
    ),
    ConflictRule(
        "more pipeline stages than `num_layers`",
        "a stage without a block has nothing to do",
        "fewer stages",
        lambda c: c.split.pipeline_stages > (c.model_value("num_layers") or c.split.pipeline_stages),
    ),
    ConflictRule(
        "`data_types.grad_accum_dtype: fp32` in half precision without ZeRO",
        "DeepSpeed does not sum half-precision gradients in fp32 at stage 0",
        "zero_optimization.stage 1, 2 or 3",
        lambda c: _sums_in_fp32(c) and c.split.zero_stage == 0 and c.split.precision != "fp32",
    ),
    ConflictRule(
        "`data_types.grad_accum_dtype: fp32` with sequence parallelism at ZeRO 1 in bf16",
        "DeepSpeed's bf16 optimizer finds no gradients there on all but the first rank of a sequence",
        "zero_optimization.stage 2",
        lambda c: (
            _sums_in_fp32(c)
            and c.split.sequence_parallel > 1
            and c.split.zero_stage == 1
            and c.split.precision == "bf16"
        ),
    ),
    ConflictRule(
        "`micro_batch_size: auto` with `parallel: dp`",
        "the search for the size tests one device for each rank, and nn.DataParallel uses several",
        "ddp, or micro_batch_size as a number",
        lambda c: c.config.batch.micro_batch_size == "auto" and c.split.parallel == "dp",
    ),
    ConflictRule(
        "`compile` with tensor or sequence parallelism, `parallel: dp`, or `offload_param` to NVMe",
        "collectives, reads of parameters or copies of blocks would be inside the compiled code",
        "ZeRO, ddp, pipeline stages, or offload_param to cpu; or no compile",
        lambda c: (
            c.compile
            and (
                c.split.tensor_parallel * c.split.sequence_parallel > 1
                or c.split.parallel == "dp"
                or c.zero_value("offload_param.device") == "nvme"
            )
        ),
    ),
    ConflictRule(
        "`model.fp8` with tensor parallelism or an adapter",
        "AutoTP and peft replace the linear layers by their own",
        "ZeRO 3, sequence parallelism or pipeline stages, and no adapter; or model.fp8: none",
        lambda c: c.multiplies_in_fp8 and (c.split.tensor_parallel > 1 or c.config.adapter is not None),
    ),
    # ZeRO 3 would have to gather the scales with each weight, and they are no parameters. It would save
    # little: at four ranks it shards bf16 weights of two bytes to half a byte, the size of a 4-bit weight
    # on every rank.
    ConflictRule(
        "`adapter.quantize` with ZeRO 3, tensor parallelism, pipeline stages or `parallel: dp`",
        "4-bit weights cannot be sharded or copied without their scales",
        "ZeRO 0, 1 or 2, ddp, or no adapter.quantize",
        lambda c: c.quantizes_base and _cuts_or_copies_weights(c),
    ),
    ConflictRule(
        "`offload_param`, or `offload_optimizer` to NVMe, without ZeRO 3",
        "only ZeRO 3 moves parameters, and optimizer states on NVMe, to the device and back in a step",
        "zero_optimization.stage 3, or offload_optimizer to cpu alone",
        lambda c: (
            c.split.zero_stage < 3
            and (c.offloads("param") or c.zero_value("offload_optimizer.device") == "nvme")
        ),
    ),
    ConflictRule(
        "`offload_optimizer` without ZeRO",
        "stage 0 runs the optimizer on the device",
        "zero_optimization.stage 1, 2 or 3",
        lambda c: c.offloads("optimizer") and c.split.zero_stage == 0,
    ),
    ConflictRule(
        "`optimizer.kind: adafactor`, or several kinds, with ZeRO 1 to 3, tensor parallelism or pipeline "
        "stages in bf16",
        "adafactor and muon need whole matrices, and DeepSpeed steps sharded ones with a single optimizer",
        "one kind (adamw, sgd), zero_optimization.stage 0, or plain PyTorch",
        lambda c: (
            c.split.cuts_matrices and (c.config.optimizer.kind == "adafactor" or c.has_several_optimizers)
        ),
    ),
    ConflictRule(
        "`offload_optimizer.ratio` below 1 without ZeRO 3, or with another `optimizer.kind` than adamw",
        "only ZeRO 3 offloads a part, and DeepSpeed always steps that part with Adam",
        "ratio 1.0, or ZeRO 3 with optimizer.kind: adamw",
        lambda c: (
            c.zero_value("offload_optimizer.ratio") not in (None, 1)
            and (c.split.zero_stage < 3 or (c.config.optimizer.kind != "adamw" and c.offloads("optimizer")))
        ),
    ),
    ConflictRule(
        "`offload_optimizer` or `offload_param` with device nvme and without `nvme_path`",
        "nvme needs a folder on a local NVMe disk",
        "nvme_path beside device",
        lambda c: any(
            c.zero_value(f"offload_{what}.device") == "nvme" and not c.zero_value(f"offload_{what}.nvme_path")
            for what in ("optimizer", "param")
        ),
    ),
    ConflictRule(
        "`prescale_gradients` or `gradient_predivide_factor` with ZeRO 3, or with ZeRO 2 and reduce_scatter",
        "DeepSpeed does not scale gradients before their reduction there",
        "zero_optimization.stage 1, or stage 2 with zero_optimization.reduce_scatter: false",
        lambda c: (
            bool(
                c.json_value("prescale_gradients")
                or c.json_value("gradient_predivide_factor") not in (None, 1)
            )
            and (
                c.split.zero_stage == 3
                or (c.split.zero_stage == 2 and c.zero_value("reduce_scatter") is not False)
            )
        ),
    ),
    ConflictRule(
        "`bf16_master_weights_and_grads` or `fp16_master_weights_and_grads` in another precision, without "
        "ZeRO, or with pipeline stages",
        "only ZeRO has master weights other than fp32, and only in the precision of the run",
        "neither key, or bf16.enabled or fp16.enabled at zero_optimization.stage 1, 2 or 3",
        lambda c: (
            has_16bit_master_weights(c.deepspeed)
            and (not _master_key_fits(c) or c.split.zero_stage == 0 or c.split.pipeline_stages > 1)
        ),
    ),
    ConflictRule(
        "`bf16_master_weights_and_grads` at ZeRO 1 with `data_types.grad_accum_dtype: fp32`",
        "ZeRO 1 with fp32 gradient sums keeps fp32 master weights",
        "zero_optimization.stage 2, or no data_types.grad_accum_dtype",
        lambda c: bool(c.json_value(MASTER_WEIGHT_KEYS[0])) and _sums_in_fp32(c) and c.split.zero_stage == 1,
    ),
    ConflictRule(
        "`bf16_master_weights_and_grads` or `fp16_master_weights_and_grads` with fp32 states, unless all "
        "are adamw's and in host memory",
        "with fp32 states, only DeepSpeed's CPU Adam can step such weights",
        "bf16_optimizer_states: true with no offloading, or zero_optimization.offload_optimizer.device: cpu "
        "with optimizer.kind: adamw",
        lambda c: has_16bit_master_weights(c.deepspeed) and not _steps_half_masters(c),
    ),
    ConflictRule(
        "`bf16_optimizer_states` without `bf16_master_weights_and_grads`",
        "fp32 master weights need fp32 states",
        "both keys, or neither",
        lambda c: has_16bit_optimizer_states(c.deepspeed) and not c.json_value(MASTER_WEIGHT_KEYS[0]),
    ),
    ConflictRule(
        "`watch.on_nonfinite: rollback` or `stop` in fp16",
        "fp16 finds its loss scale by steps without a finite gradient",
        "watch.on_nonfinite skip, which accepts these steps, or bf16",
        lambda c: c.split.precision == "fp16" and c.config.watch.on_nonfinite in ("rollback", "stop"),
    ),
    ConflictRule(
        "`watch` with a rollback, without checkpoints",
        "a rollback needs a checkpoint",
        "checkpoint.every",
        lambda c: (
            "rollback" in (c.config.watch.on_nonfinite, c.config.watch.on_spike)
            and not (c.config.checkpoint.every or c.config.checkpoint.every_minutes)
        ),
    ),
    ConflictRule(
        "`pipeline_read` or `pipeline_write` with NVMe",
        "DeepSpeed 0.19 runs out of its buffers there",
        "neither key",
        lambda c: (
            c.zero_value("offload_optimizer.device") == "nvme"
            and bool(
                c.zero_value("offload_optimizer.pipeline_read")
                or c.zero_value("offload_optimizer.pipeline_write")
            )
        ),
    ),
    ConflictRule(
        "ZeRO++ (`zero_hpz_partition_size`, `zero_quantized_*`) without ZeRO 3",
        "it reduces the cost of gathering parameters, which only ZeRO 3 does",
        "zero_optimization.stage 3, or none of these keys",
        lambda c: c.split.zero_stage < 3 and (_hpz_ranks(c) > 1 or _quantizes(c)),
    ),
    ConflictRule(
        "`zero_hpz_partition_size` that does not divide the ranks",
        "each group of that many ranks holds one copy of the parameters",
        "the number of GPUs of one machine",
        lambda c: c.split.world_size % _hpz_ranks(c) != 0,
    ),
    ConflictRule(
        "`zero_quantized_weights` or `zero_quantized_gradients` without a GPU",
        "DeepSpeed's quantization kernels exist for CUDA only",
        "neither key; zero_hpz_partition_size works on every device",
        lambda c: _quantizes(c) and c.device.kind == "cpu",
    ),
]


def _shares_evenly(degree: int, heads: int | None) -> bool:
    """Return whether ranks of this degree can share the heads, or `heads` is unknown."""
    return heads is None or heads % degree == 0 or degree % heads == 0


def _sums_in_fp32(combination: Combination) -> bool:
    """Return whether the JSON asks for gradient sums in fp32."""
    return combination.json_value("data_types.grad_accum_dtype") == "fp32"


def _master_key_fits(combination: Combination) -> bool:
    """Return whether no key asks for half-precision master weights of another precision than the run's."""
    others = [key for key in MASTER_WEIGHT_KEYS if not key.startswith(combination.split.precision)]
    return not any(combination.json_value(key) for key in others)


def _steps_half_masters(combination: Combination) -> bool:
    """Return whether an optimizer of DeepSpeed can step master weights in half precision."""
    device = combination.zero_value("offload_optimizer.device")
    if device == "cpu":
        is_whole = combination.zero_value("offload_optimizer.ratio") in (None, 1)
        return is_whole and combination.config.optimizer.kind == "adamw"
    return device != "nvme" and has_16bit_optimizer_states(combination.deepspeed)


def _cuts_or_copies_weights(combination: Combination) -> bool:
    """Return whether the split cuts the model, or nn.DataParallel copies it."""
    split = combination.split
    cuts = split.zero_stage == 3 or split.tensor_parallel > 1 or split.pipeline_stages > 1
    return cuts or split.parallel == "dp"


def _hpz_ranks(combination: Combination) -> int:
    """Return the number of ranks of a ZeRO++ group that has a copy of the parameters; 1 for no groups."""
    size = combination.zero_value("zero_hpz_partition_size")
    return size if isinstance(size, int) and size > 0 else 1


def _quantizes(combination: Combination) -> bool:
    """Return whether ZeRO++ quantizes weights or gradients for communication."""
    return any(combination.zero_value(f"zero_quantized_{what}") for what in ("weights", "gradients"))


def check_combination(combination: Combination, file: ConfigFile | None) -> None:
    """Check resolved settings against every rule.

    Args:
        combination: Resolved settings of a job.
        file: DeepSpeed JSON, for the location in the error; `None` for plain PyTorch.

    Raises:
        ConfigError: The settings break a rule. The message has the combination, the reason and the
            alternative.
    """
    for rule in RULES:
        if rule.is_broken(combination):
            location = f"{_locate(rule, file)}: " if file is not None else ""
            raise ConfigError(f"{location}{rule.combination}: {rule.reason}; use {rule.alternative}")


def _locate(rule: ConflictRule, file: ConfigFile) -> str:
    """Return the location of the first key in the rule's text that the file has, else the file's path."""
    for word in re.findall(r"[a-z][a-z0-9_.]{4,}", rule.combination):
        for dotted, location in file.locations.items():
            if dotted == word or dotted.endswith(f".{word}"):
                return location
    return str(file.path)


def format_rules_table() -> str:
    """Return the rules as the table of docs/reference/splits.md."""
    rows = [f"| {rule.combination} | {rule.reason} | {rule.alternative} |" for rule in RULES]
    return "\n".join(["| together | why not | use instead |", "|---|---|---|", *rows])
