"""The repeated blocks of a model, and their compilation: one compiled function for all blocks of a kind.

Blocks are compiled, not the model. If the whole model were compiled, transformers would build the dense mask
and flash attention would be lost. ZeRO's hooks would break the graph into pieces, and DDP would get all
gradients at the end. So hooks of DeepSpeed and buckets of DistributedDataParallel stay outside of the
compiled functions. The recomputation of a block under activation checkpointing is part of its compiled
function. A block that cannot be compiled runs uncompiled, and one line of the log says why.
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

log = logging.getLogger(__name__)

MODULE_LISTS = (nn.ModuleList, nn.Sequential)
ALIGNMENT_BYTES = 16  # Inductor's kernels read several values at a time, from multiples of this address


def find_repeated_blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield each group of repeated blocks: two or more modules of one list that differ only in their values.

    The modules of a group are of one class, contain modules, and have parameters of the same names, shapes
    and dtypes. If groups are nested, only the outermost is yielded.
    """
    yielded: set[nn.Module] = set()
    if isinstance(model, MODULE_LISTS):
        by_structure: dict[Any, list[nn.Module]] = {}
        for child in dict.fromkeys(model):
            has_children = any(True for _ in child.children())
            if has_children and not isinstance(child, MODULE_LISTS):
                by_structure.setdefault(_describe_structure(child), []).append(child)
        for blocks in by_structure.values():
            if len(blocks) > 1:
                yielded.update(blocks)
                yield blocks
    for child in model.children():
        if child not in yielded:
            yield from find_repeated_blocks(child)


def _describe_structure(block: nn.Module) -> Any:
    """Return a key that is equal for blocks that differ only in their values."""
    parameters = tuple(
        (name, tuple(getattr(p, "ds_shape", p.shape)), p.dtype, p.requires_grad)
        for name, p in block.named_parameters()
    )
    return type(block), getattr(block, "gradient_checkpointing", None), parameters


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters are sharded by ZeRO 3."""
    return any(hasattr(p, "ds_shape") for p in model.parameters())


def has_experts(model: nn.Module) -> bool:
    """Return whether the model is a transformers mixture of experts."""
    return getattr(getattr(model, "config", None), "num_experts_per_tok", None) is not None


def find_leaf_blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the groups of blocks that can be leaf modules of ZeRO 3, which gathers a whole leaf at once.

    Only blocks of transformers' own classes qualify: transformers calls a block as a module, with hidden
    states, and other code may do otherwise. Blocks that share a parameter with another module do not qualify.
    Nor do those of a mixture of experts, which are too large to gather whole.
    """
    if not is_transformers_model(model) or has_experts(model):
        return
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for blocks in find_repeated_blocks(model):
        is_from_transformers = type(blocks[0]).__module__.startswith("transformers.")
        shares_nothing = all(uses[id(p)] == 1 for block in blocks for p in block.parameters())
        if is_from_transformers and shares_nothing:
            yield blocks


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the forward of the repeated blocks, one function for each kind, at their next call.

    Blocks of a mixture of experts are not compiled, since an expert's input differs in size from batch to
    batch. Nor are blocks with synchronized batch normalization, blocks that ZeRO 3 gathers in parts, and
    blocks whose `forward` has been replaced. Settings of dynamo and functorch change for the whole process.

    Args:
        model: The model, whose blocks get a new `forward`.
        backend: A backend of torch.compile.
    """
    # DDP's buckets begin and end between blocks, so dynamo need not split graphs at them.
    dynamo.optimize_ddp = False
    # A backward that cannot be compiled must be found in the forward, where the block can still run
    # uncompiled.
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True
    candidates = find_leaf_blocks(model) if is_sharded(model) else find_repeated_blocks(model)
    kinds = [blocks for blocks in candidates if _is_compilable(model, blocks)]
    for blocks in kinds:
        forward = _CompiledForward(blocks, backend).forward
        for block in blocks:
            block.forward = types.MethodType(forward, block)
    if not kinds:
        log.info("compile: the model has no repeated blocks that can be compiled; it runs uncompiled")


def reset_compilation(model: nn.Module) -> None:
    """Discard all compiled code of the process, so that the next shapes are not compiled as dynamic shapes.

    Otherwise a run would use kernels for changing shapes after trials of micro-batch sizes, and its numbers
    would differ in the last digits.
    """
    torch._dynamo.reset()
    for block in model.modules():
        forward = getattr(vars(block).get("forward"), "__func__", None)
        compiled = getattr(forward, "of_blocks", None)
        if isinstance(compiled, _CompiledForward):
            compiled.forget_calls()


def _is_compilable(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    is_wrapped = any("forward" in vars(block) for block in blocks)
    is_collective = any(is_sync_batch_norm(layer) for layer in blocks[0].modules())
    return not (is_wrapped or is_collective or has_experts(model))


class _CompiledForward:
    """The compiled forward of a group of blocks that differ only in their values."""

    def __init__(self, blocks: Sequence[nn.Module], backend: str | Callable[..., Any]):
        kind = type(blocks[0])
        self._name = f"the {len(blocks)} {kind.__name__} blocks"
        self._kind = kind.__name__
        self._backend = backend
        self._uncompiled_forward: Callable[..., Any] = kind.forward
        self._compiled = self._compile()
        self._assumes_alignment = True
        # Ids of the blocks called in each mode (training, with gradients); they should not compile again.
        self._called: dict[tuple[bool, bool], set[int]] = {}

        @functools.wraps(self._uncompiled_forward)
        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(block, args, kwargs)

        forward.of_blocks = self  # type: ignore[attr-defined]
        self.forward = forward

    def _compile(self, options: dict[str, Any] | None = None) -> dict[bool, Callable[..., Any]]:
        """Return the function for training (`True`) and the one for evaluation (`False`).

        With two functions, a smaller last batch of an evaluation causes no compilation for training.
        """
        return {
            is_training: torch.compile(
                _copy_function(self._uncompiled_forward, f"{self._kind}_{word}"),
                backend=self._backend,
                options=options,
            )
            for is_training, word in ((True, "training"), (False, "evaluation"))
        }

    def _assume_no_alignment(self) -> None:
        """Compile again, for parameters at any address.

        Inductor checks the addresses of parameters once, when it compiles. On a block with unaligned
        parameters, a kernel for aligned ones fails with "misaligned address". Parameters are unaligned under
        ZeRO 3 on one GPU, which places them next to each other in one piece of memory.
        """
        self._assumes_alignment = False
        self.forget_calls()
        self._compiled = self._compile({"triton.divisible_by_16": False})
        log.info(
            "compile: not all parameters of %s begin at a multiple of %d bytes; compiled for any address",
            self._name,
            ALIGNMENT_BYTES,
        )

    def forget_calls(self) -> None:
        """Forget which blocks were called, so that their next compilation is expected."""
        self._called.clear()

    def _call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a block, and log compilations. It is computed uncompiled if one fails."""
        if not self._compiled:  # a compilation has failed
            return self._uncompiled_forward(block, *args, **kwargs)
        with_gradients = torch.is_grad_enabled()
        mode = (block.training, with_gradients)
        is_first_call = id(block) not in self._called.get(mode, ())
        if self._assumes_alignment and is_first_call and not is_aligned(block):
            self._assume_no_alignment()
        called = self._called.setdefault(mode, set())
        if not with_gradients:  # even here transformers makes the first block's input require a gradient
            args = tuple(each.detach() if isinstance(each, Tensor) else each for each in args)
        frames_before = counters["frames"]["total"]
        start = time.perf_counter()
        try:
            result = self._compiled[block.training](block, *args, **kwargs)
        except TorchDynamoException as error:
            self._compiled.clear()
            log.warning("compile: %s run uncompiled: %s", self._name, describe_compile_error(error))
            return self._uncompiled_forward(block, *args, **kwargs)
        has_compiled = counters["frames"]["total"] != frames_before
        if has_compiled:
            mode_name = "training" if block.training else "evaluation"
            purpose = f"for {mode_name} ({time.perf_counter() - start:.0f} s)"
            if id(block) in called:
                log.warning("compile: %s are compiled again %s: %s", self._name, purpose, _read_cause())
            elif not called:
                log.info("compile: %s are compiled once %s", self._name, purpose)
        called.add(id(block))
        return result


def is_aligned(block: nn.Module) -> bool:
    """Return whether each parameter's address is a multiple of ALIGNMENT_BYTES."""
    return all(parameter.data_ptr() % ALIGNMENT_BYTES == 0 for parameter in block.parameters())


def _copy_function(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `forward` with its own code object: torch stores and limits compiled code by code object."""

    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(block, *args, **kwargs)

    return types.FunctionType(run.__code__.replace(co_name=name), globals(), name, None, run.__closure__)


def _read_cause() -> str:
    """Return the change that caused the last compilation."""
    reasons = [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    if not reasons:
        return "torch gives no reason"
    return " ".join(reasons[-1].partition(": ")[2].split())[:200]


def describe_compile_error(error: TorchDynamoException) -> str:
    """Return the reason for a failed compilation, in one line."""
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    return f"{type(inner).__name__}: {summarize_error(inner)}"
