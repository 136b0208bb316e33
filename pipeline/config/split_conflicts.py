"""What cannot work together, why, and the nearest thing that does. docs/splits.md shows the same table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.config.loading import ConfigFile, Tree, get_dotted
from pipeline.config.schema import RunConfig
from pipeline.config.split import Device, Split
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """Everything that was chosen, filled in."""

    config: RunConfig
    deepspeed: Tree
    """The dict DeepSpeed gets; empty for plain PyTorch."""
    split: Split
    device: Device
    compile: bool

    def zero(self, dotted: str) -> Any:
        """A key of the zero_optimization section, None where it is not given."""
        return get_dotted(self.deepspeed, f"zero_optimization.{dotted}")

    def offloads(self, what: str) -> bool:
        """Whether `param` or `optimizer` lies elsewhere than on the device."""
        return self.zero(f"offload_{what}.device") in ("cpu", "nvme")

    @property
    def has_several_optimizers(self) -> bool:
        optimizer = self.config.optimizer
        return any(group.kind not in (None, optimizer.kind) for group in optimizer.groups or [])

    @property
    def is_language_model(self) -> bool:
        return self.config.model.language_model is not None

    @property
    def multiplies_in_fp8(self) -> bool:
        return self.model("fp8") not in (None, "none")

    @property
    def quantizes_base(self) -> bool:
        return self.config.adapter is not None and self.config.adapter.quantize is not None

    def model(self, field: str) -> Any:
        """A number of the recipe's model, None where it is not stated."""
        return getattr(self.config.model, field, None)

    def divides(self, degree: int, *fields: str) -> bool:
        """Whether the degree divides every stated one of the model's numbers."""
        return all((self.model(field) or degree) % degree == 0 for field in fields)


@dataclass(frozen=True)
class Rule:
    """One line of the table."""

    what: str
    reason: str
    instead: str
    broken: Callable[[Choice], bool]


RULES = [
    Rule(
        "`parallel: single` or `dp` on several ranks",
        "both are one process; every rank would train a model of its own",
        "one process, or parallel: ddp",
        lambda c: c.split.parallel in ("single", "dp") and c.split.world_size > 1,
    ),
    Rule(
        "pipeline stages with ZeRO 2 or 3",
        "a stage adds up the gradients of its micro-batches, so they cannot be given away after each",
        "zero_optimization.stage 1",
        lambda c: c.split.pipeline_stages > 1 and c.split.zero_stage >= 2,
    ),
    Rule(
        "pipeline stages with tensor or sequence parallelism",
        "DeepSpeed cuts matrices and sequences of whole models only",
        "pipeline.stages 1, or only pipeline stages",
        lambda c: c.split.pipeline_stages > 1 and c.split.tensor_parallel * c.split.sequence_parallel > 1,
    ),
    Rule(
        "tensor with sequence parallelism",
        "DeepSpeed builds the process groups of one or the other",
        "one of the two, with ZeRO for the rest",
        lambda c: c.split.tensor_parallel > 1 and c.split.sequence_parallel > 1,
    ),
    Rule(
        "pipeline stages with offloading",
        "the pipeline engine keeps its optimizer on the device",
        "ZeRO 3 with offloading and no stages",
        lambda c: c.split.pipeline_stages > 1 and (c.offloads("optimizer") or c.offloads("param")),
    ),
    Rule(
        "tensor, pipeline or sequence parallelism with a model that is no `causal_lm`",
        "those cuts are made for language models",
        "ZeRO 3, which divides any nn.Module",
        lambda c: c.split.dp_world_size < c.split.world_size and not c.is_language_model,
    ),
    Rule(
        "tensor parallelism over ranks that do not divide the heads",
        "each rank computes whole attention heads (num_heads, num_key_value_heads)",
        "a degree that divides both",
        lambda c: not c.divides(c.split.tensor_parallel, "num_heads", "num_key_value_heads"),
    ),
    Rule(
        "sequence parallelism over ranks that do not divide the heads",
        "Ulysses gives each rank whole attention heads (num_heads)",
        "a degree that divides num_heads",
        lambda c: not c.divides(c.split.sequence_parallel, "num_heads"),
    ),
    Rule(
        "sequence parallelism over ranks that fit no number of key-value heads",
        "key-value heads are given out or repeated evenly (num_key_value_heads)",
        "a degree that divides num_key_value_heads, or a multiple of it",
        lambda c: not _shares_evenly(c.split.sequence_parallel, c.model("num_key_value_heads")),
    ),
    Rule(
        "sequence parallelism over ranks that do not divide `data.sequence_length`",
        "every rank holds an equal part of a sequence",
        "a sequence_length that the degree divides",
        lambda c: (
            c.config.data.text is not None
            and c.config.data.text.sequence_length % c.split.sequence_parallel != 0
        ),
    ),
    Rule(
        "sequence parallelism with `attention: eager`",
        "it would need the mask of the whole sequence on every rank",
        "attention: auto",
        lambda c: c.split.sequence_parallel > 1 and c.model("attention") == "eager",
    ),
    Rule(
        "pipeline stages with `objective.kind: kto`",
        "its baseline takes a forward of all micro-batches before the first backward, which a pipeline of "
        "stages does not make",
        "ZeRO, or dpo",
        lambda c: c.split.pipeline_stages > 1 and c.config.objective.kind == "kto",
    ),
    Rule(
        "more pipeline stages than `num_layers`",
        "a stage without a block has nothing to do",
        "fewer stages",
        lambda c: c.split.pipeline_stages > (c.model("num_layers") or c.split.pipeline_stages),
    ),
    Rule(
        "`data_types.grad_accum_dtype: fp32` in half precision without ZeRO",
        "DeepSpeed does not mix the two at stage 0",
        "zero_optimization.stage 1, 2 or 3",
        lambda c: _sums_in_fp32(c) and c.split.zero_stage == 0 and c.split.precision != "fp32",
    ),
    Rule(
        "`data_types.grad_accum_dtype: fp32` with sequence parallelism at ZeRO 1 in bf16",
        "DeepSpeed's bf16 optimizer finds no gradients there on all but the first rank of a sequence",
        "zero_optimization.stage 2",
        lambda c: (
            _sums_in_fp32(c)
            and (c.split.sequence_parallel > 1, c.split.zero_stage, c.split.precision) == (True, 1, "bf16")
        ),
    ),
    Rule(
        "`micro_batch_size: auto` with `parallel: dp`",
        "what fits is found by a rank on its one device, and nn.DataParallel has several",
        "ddp, or micro_batch_size as a number",
        lambda c: c.config.batch.micro_batch_size == "auto" and c.split.parallel == "dp",
    ),
    Rule(
        "`compile` with tensor or sequence parallelism or with `parallel: dp`",
        "ranks talk to each other inside of a block there, and nn.DataParallel copies blocks in every step",
        "ZeRO, ddp or pipeline stages, or no compile",
        lambda c: (
            c.compile
            and (c.split.tensor_parallel * c.split.sequence_parallel > 1 or c.split.parallel == "dp")
        ),
    ),
    Rule(
        "`compile` with `offload_param` to NVMe",
        "parameters are read in between the modules of a block, a few at a time",
        "offload_param to cpu, or no compile",
        lambda c: c.compile and c.zero("offload_param.device") == "nvme",
    ),
    Rule(
        "`model.fp8` with tensor parallelism",
        "AutoTP puts layers of its own in the place of the linear ones",
        "ZeRO 3, sequence parallelism or pipeline stages",
        lambda c: c.multiplies_in_fp8 and c.split.tensor_parallel > 1,
    ),
    Rule(
        "`model.fp8` with an adapter",
        "torchao would multiply in fp8 by narrow matrices too, and by a base that peft holds",
        "model.fp8: none",
        lambda c: c.multiplies_in_fp8 and c.config.adapter is not None,
    ),
    Rule(
        "`adapter.quantize` with ZeRO 3, tensor parallelism, pipeline stages or `parallel: dp`",
        "weights of 4 bits cannot be cut or copied apart from their scales",
        "ZeRO 0, 1 or 2, ddp, or no adapter.quantize",
        lambda c: c.quantizes_base and _cuts_or_copies_weights(c),
    ),
    Rule(
        "`offload_param` without ZeRO 3",
        "below it every rank needs every parameter on its device at all times",
        "zero_optimization.stage 3, or offload_optimizer alone",
        lambda c: c.offloads("param") and c.split.zero_stage < 3,
    ),
    Rule(
        "`offload_optimizer` without ZeRO",
        "stage 0 updates on the device",
        "zero_optimization.stage 1, 2 or 3",
        lambda c: c.offloads("optimizer") and c.split.zero_stage == 0,
    ),
    Rule(
        "offloading to NVMe below ZeRO 3",
        "only ZeRO 3 swaps its parts in and out",
        "zero_optimization.stage 3, or device cpu",
        lambda c: c.zero("offload_optimizer.device") == "nvme" and c.split.zero_stage < 3,
    ),
    Rule(
        "`optimizer.kind: adafactor` with ZeRO 1 to 3, tensor parallelism or pipeline stages in bf16",
        "it looks at the rows and columns of whole matrices, and those are cut up there",
        "optimizer.kind: sgd, zero_optimization.stage 0, or plain PyTorch",
        lambda c: c.config.optimizer.kind == "adafactor" and c.split.cuts_matrices,
    ),
    Rule(
        "several kinds of optimizer with ZeRO 1 to 3, tensor parallelism or pipeline stages in bf16",
        "muon needs whole matrices, and DeepSpeed's cut-up groups have one optimizer",
        "optimizer.groups without a kind, zero_optimization.stage 0, or plain PyTorch",
        lambda c: c.has_several_optimizers and c.split.cuts_matrices,
    ),
    Rule(
        "`offload_optimizer.ratio` below 1 with another `optimizer.kind` than adamw",
        "DeepSpeed steps with Adam there, whatever it was given",
        "ratio 1.0, or optimizer.kind: adamw",
        lambda c: (
            c.config.optimizer.kind != "adamw"
            and c.offloads("optimizer")
            and c.zero("offload_optimizer.ratio") not in (None, 1)
        ),
    ),
    Rule(
        "`flops_profiler` with `compile`, or it or `wall_clock_breakdown` with pipeline stages",
        "a compiled block shows no modules, and stages do the passes of several micro-batches in turns",
        "no compile and no stages for the steps that are profiled",
        lambda c: (
            (
                bool(get_dotted(c.deepspeed, "flops_profiler.enabled"))
                and (c.compile or c.split.pipeline_stages > 1)
            )
            or (bool(c.deepspeed.get("wall_clock_breakdown")) and c.split.pipeline_stages > 1)
        ),
    ),
    Rule(
        "`watch.on_nonfinite: rollback` or `stop` in fp16",
        "a step without a finite gradient is how fp16 finds its loss scale",
        "watch.on_nonfinite skip, which passes over those, or bf16",
        lambda c: c.split.precision == "fp16" and c.config.watch.on_nonfinite in ("rollback", "stop"),
    ),
    Rule(
        "`watch` with a rollback, without checkpoints",
        "there would be nothing to go back to",
        "checkpoint.every",
        lambda c: (
            "rollback" in (c.config.watch.on_nonfinite, c.config.watch.on_spike)
            and not (c.config.checkpoint.every or c.config.checkpoint.every_minutes)
        ),
    ),
    Rule(
        "`pipeline_read` or `pipeline_write` with NVMe",
        "DeepSpeed 0.19 runs out of its own buffers there",
        "neither key",
        lambda c: (
            c.zero("offload_optimizer.device") == "nvme"
            and bool(c.zero("offload_optimizer.pipeline_read") or c.zero("offload_optimizer.pipeline_write"))
        ),
    ),
    Rule(
        "ZeRO++ (`zero_hpz_partition_size`, `zero_quantized_*`) without ZeRO 3",
        "it shortens the gathering of parameters, which only ZeRO 3 does",
        "zero_optimization.stage 3, or none of these keys",
        lambda c: c.split.zero_stage < 3 and (_hpz(c) > 1 or _quantizes(c)),
    ),
    Rule(
        "`zero_hpz_partition_size` that does not divide the ranks",
        "each group of that many ranks holds the parameters once",
        "the number of GPUs of one machine",
        lambda c: c.split.world_size % _hpz(c) != 0,
    ),
    Rule(
        "`zero_quantized_weights` or `zero_quantized_gradients` without a GPU",
        "DeepSpeed's quantisation kernels exist for CUDA only",
        "neither key; zero_hpz_partition_size works everywhere",
        lambda c: _quantizes(c) and c.device.kind == "cpu",
    ),
]


def _shares_evenly(degree: int, heads: int | None) -> bool:
    return heads is None or heads % degree == 0 or degree % heads == 0


def _sums_in_fp32(choice: Choice) -> bool:
    return get_dotted(choice.deepspeed, "data_types.grad_accum_dtype") == "fp32"


def _cuts_or_copies_weights(choice: Choice) -> bool:
    split = choice.split
    cuts = split.zero_stage == 3 or split.tensor_parallel > 1 or split.pipeline_stages > 1
    return cuts or split.parallel == "dp"


def _hpz(choice: Choice) -> int:
    size = choice.zero("zero_hpz_partition_size")
    return size if isinstance(size, int) and size > 0 else 1


def _quantizes(choice: Choice) -> bool:
    return any(choice.zero(f"zero_quantized_{what}") for what in ("weights", "gradients"))


def refuse_impossible(choice: Choice, file: ConfigFile | None) -> None:
    """Holds a choice to every rule.

    Raises:
        ConfigError: one breaks; says which, why, and what to do instead.
    """
    for rule in RULES:
        if rule.broken(choice):
            place = f"{_place(rule, file)}: " if file is not None else ""
            raise ConfigError(f"{place}{rule.what}: {rule.reason}; use {rule.instead}")


def _place(rule: Rule, file: ConfigFile) -> str:
    """The line of the first key in the rule's words that the file has, or the file."""
    for word in re.findall(r"[a-z_.]+", rule.what):
        for dotted, place in file.places.items():
            if dotted == word or dotted.endswith(f".{word}"):
                return place
    return str(file.path)


def as_markdown() -> str:
    """The rules as the table of docs/splits.md."""
    rows = [f"| {rule.what} | {rule.reason} | {rule.instead} |" for rule in RULES]
    return "\n".join(["| together | why not | use instead |", "|---|---|---|", *rows])
