"""The repeated blocks of a model, and their compilation: once for all of them; the rest stays as it is.

What hangs on modules (DeepSpeed's hooks, DistributedDataParallel's buckets) stays outside of what is
compiled and is called block by block. What cannot be compiled runs as it is written, with one line.
"""

from __future__ import annotations

import functools
import logging
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._functorch import config as functorch

from pipeline.errors import summarize_error
from pipeline.models.batch_norm import is_sync_batch_norm
from pipeline.models.transformers_facts import is_transformers_model

MODULE_LISTS = (nn.ModuleList, nn.Sequential)


def find_repeated_blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield two or more modules of a list that differ in their values alone; the outermost ones.

    They are of one class, have modules inside and parameters of the same names, shapes and dtypes.
    """
    taken: set[nn.Module] = set()
    if isinstance(model, MODULE_LISTS):
        alike: dict[Any, list[nn.Module]] = {}
        for child in dict.fromkeys(model):
            if any(True for _ in child.children()) and not isinstance(child, MODULE_LISTS):
                alike.setdefault(_likeness(child), []).append(child)
        for blocks in alike.values():
            if len(blocks) > 1:
                taken.update(blocks)
                yield blocks
    for child in model.children():
        if child not in taken:
            yield from find_repeated_blocks(child)


def _likeness(block: nn.Module) -> Any:
    parameters = tuple(
        (name, tuple(getattr(p, "ds_shape", p.shape)), p.dtype, p.requires_grad)
        for name, p in block.named_parameters()
    )
    return type(block), getattr(block, "gradient_checkpointing", None), parameters


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters are in ZeRO 3's shards."""
    return any(hasattr(p, "ds_shape") for p in model.parameters())


def has_experts(model: nn.Module) -> bool:
    """Return whether it is a mixture: what each expert computes on differs in size from batch to batch."""
    return getattr(getattr(model, "config", None), "num_experts_per_tok", None) is not None


def find_leaf_blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the repeated blocks of which ZeRO 3 can gather all parameters at once, when one is called.

    transformers calls its blocks as modules, with hidden states, which others need not do. A parameter of
    several modules is gathered with one of them. Experts make a block too large.
    """
    if is_transformers_model(model) and not has_experts(model):
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        for blocks in find_repeated_blocks(model):
            is_theirs = type(blocks[0]).__module__.startswith("transformers.")
            if is_theirs and all(uses[id(p)] == 1 for block in blocks for p in block.parameters()):
                yield blocks


log = logging.getLogger(__name__)

ALIGNMENT = 16  # bytes, of addresses that Inductor's kernels read several values at a time from


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Let the repeated blocks compute by one compiled function each kind, from their next call on.

    Blocks of a mixture of experts stay as they are: what an expert is given differs in size from batch to
    batch. So do those whose batch normalisation asks other ranks, and those that ZeRO 3 gathers in parts.
    """
    # DDP's buckets lie between blocks, none inside; and a backward that cannot be compiled has to be known in
    # the forward, where the block can still run as it is written.
    dynamo.optimize_ddp = False
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True
    wholes = find_leaf_blocks(model) if is_sharded(model) else find_repeated_blocks(model)
    kinds = [blocks for blocks in wholes if _is_compilable(model, blocks)]
    for blocks in kinds:
        forward = _CompiledForward(blocks, backend).forward
        for block in blocks:
            block.forward = types.MethodType(forward, block)
    if not kinds:
        log.info("compile: no blocks of the model are alike and can be compiled; it runs as it is written")


def reset_compilation(model: nn.Module) -> None:
    """Forget what was compiled, so that the next shapes get kernels of their own, and not for any shape."""
    torch._dynamo.reset()
    for block in model.modules():
        shared = getattr(getattr(vars(block).get("forward"), "__func__", None), "of_blocks", None)
        if isinstance(shared, _CompiledForward):
            shared.forget()


def _is_compilable(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    is_wrapped = any("forward" in vars(block) for block in blocks)
    talks = any(is_sync_batch_norm(layer) for layer in blocks[0].modules())
    return not (is_wrapped or talks or has_experts(model))


class _CompiledForward:
    """The forward of blocks that differ in their values alone."""

    def __init__(self, blocks: Sequence[nn.Module], backend: str | Callable[..., Any]):
        kind = type(blocks[0])
        self._name = f"the {len(blocks)} {kind.__name__} blocks"
        self._kind = kind.__name__
        self._backend = backend
        self._as_written: Callable[..., Any] = kind.forward
        self._compiled = self._compile()
        self._is_aligned = True
        # By (training, with gradients): the blocks that were called, and may cause no compilation any more.
        self._called: dict[tuple[bool, bool], set[int]] = {}

        @functools.wraps(self._as_written)
        def forward(block: nn.Module, *args: Any, **named: Any) -> Any:
            return self._call(block, args, named)

        forward.of_blocks = self  # type: ignore[attr-defined]
        self.forward = forward

    def _compile(self, options: dict[str, Any] | None = None) -> dict[bool, Callable[..., Any]]:
        """Return the function for training and the one for evaluation.

        They are two, so that what evaluation brings (a last, smaller batch) changes nothing for training.
        """
        return {
            is_training: torch.compile(
                _copied(self._as_written, f"{self._kind}_{word}"), backend=self._backend, options=options
            )
            for is_training, word in ((True, "training"), (False, "evaluation"))
        }

    def _assume_no_alignment(self) -> None:
        """Compile anew for parameters at any address.

        Inductor looks at the addresses of the parameters once, when it compiles: a kernel for aligned ones
        fails at another block's ("misaligned address"). ZeRO 3 on one GPU has parameters in one piece of
        memory, one behind the other.
        """
        self._is_aligned = False
        self.forget()
        self._compiled = self._compile({"triton.divisible_by_16": False})
        log.info(
            "compile: not all parameters of %s begin at a multiple of %d bytes; compiled for any address",
            self._name,
            ALIGNMENT,
        )

    def forget(self) -> None:
        """Forget which blocks were called."""
        self._called.clear()

    def _call(self, block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not self._compiled:
            return self._as_written(block, *args, **named)
        mode = (block.training, torch.is_grad_enabled())
        if self._is_aligned and id(block) not in self._called.get(mode, ()) and not is_aligned(block):
            self._assume_no_alignment()
        called = self._called.setdefault(mode, set())
        if not mode[1]:  # transformers makes the first block's input require a gradient even here
            args = tuple(each.detach() if isinstance(each, Tensor) else each for each in args)
        frames, start = counters["frames"]["total"], time.perf_counter()
        try:
            result = self._compiled[block.training](block, *args, **named)
        except TorchDynamoException as error:
            self._compiled.clear()
            log.warning("compile: %s run as they are written: %s", self._name, describe_compile_error(error))
            return self._as_written(block, *args, **named)
        if counters["frames"]["total"] != frames:
            word = "training" if block.training else "evaluation"
            how = f"for {word} ({time.perf_counter() - start:.0f} s)"
            if id(block) in called:
                log.warning("compile: %s are compiled again %s: %s", self._name, how, _cause())
            elif not called:
                log.info("compile: %s are compiled once %s", self._name, how)
        called.add(id(block))
        return result


def is_aligned(block: nn.Module) -> bool:
    """Return whether each parameter begins at an address that Inductor's kernels may assume."""
    return all(parameter.data_ptr() % ALIGNMENT == 0 for parameter in block.parameters())


def _copied(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `forward` with code of its own: torch keeps, and limits, what it compiled by code object."""

    def run(block: nn.Module, *args: Any, **named: Any) -> Any:
        return forward(block, *args, **named)

    return types.FunctionType(run.__code__.replace(co_name=name), globals(), name, None, run.__closure__)


def _cause() -> str:
    """Return what the last compilation found changed."""
    told = [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    return " ".join(told[-1].partition(": ")[2].split())[:200] if told else "torch does not say why"


def describe_compile_error(error: TorchDynamoException) -> str:
    """Return why something could not be compiled, in one line."""
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    return f"{type(inner).__name__}: {summarize_error(inner)}"
