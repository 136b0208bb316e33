"""Where a row of layers is cut into pipeline stages, and DeepSpeed's PipelineModule over the cut.

Every stage holds at least one decoder block: what stands before the blocks goes with the first, what stands
after them with the last.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from torch import Tensor, nn

from pipeline.config.schema import OptimizerConfig
from pipeline.distributed.process_group import Job
from pipeline.errors import ConfigError, ModelError
from pipeline.models.staging import Layer, LayeredModel, tied_head
from pipeline.optim import assigned, grouped


class Stages(PipelineModule):
    """This rank's stage of the model."""

    def __init__(self, model: LayeredModel, bounds: list[int], loss: Callable[[Tensor, Any], Tensor]):
        """Builds the process groups of the pipeline. Collective.

        Args:
            bounds: Stage s holds layers bounds[s] up to bounds[s + 1].
            loss: Called on the last stage with its logits and the batch.
        """
        self.parts = bounds
        layers: list[Any] = list(model.layers)
        if model.is_tied:
            layers[0] = _Shared(layers[0], None)
            layers[-1] = _Shared(model.layers[0], tied_head)
        super().__init__(layers, num_stages=len(bounds) - 1, loss_fn=loss)
        self._layer_specs: list[Any] = []  # they hold the other stages' layers
        self.config = model.config
        self.generation_config = model.generation_config

    def forward(self, forward_input: Any) -> Any:
        """The stage's output; the next stage sends a gradient back for it, also where nothing here trains."""
        output = super().forward(forward_input)
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()
        return output

    def _partition_layers(self, method: str = "") -> None:
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    @torch.no_grad()  # DeepSpeed leaves it off, and backward would find a broadcast on its way
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()


class _Shared(TiedLayerSpec):
    """A layer whose weight another stage holds too, already built. DeepSpeed adds up both gradients."""

    def __init__(self, module: nn.Module, forward: Callable[[Any, Any], Any] | None):
        super().__init__("words", type(module), forward_fn=forward, tied_weight_attr="part.weight")
        self._module = module

    def build(self, log: bool = False) -> nn.Module:
        return self._module


def cut_points(
    model: LayeredModel, stages: int, how: str, micro_batch: tuple[int, int], dtype: torch.dtype, job: Job
) -> list[int]:
    """Stage s holds layers [s] up to [s + 1] of this. Collective: every rank cuts alike.

    Args:
        how: `parameters`, `uniform` (equal numbers of blocks) or `time` (measured).
        micro_batch: (samples, tokens) of a micro-batch.
        dtype: What the layers compute in.

    Raises:
        ModelError: fewer blocks than stages.
    """
    if model.num_blocks < stages:
        raise ModelError(
            f"pipeline.stages is {stages}, but the model has {model.num_blocks} blocks, and a stage without "
            f"one has nothing to do; ask for {model.num_blocks} stages at most"
        )
    if how == "uniform":
        units = partition_uniform(model.num_blocks, stages)
    else:
        weights: list[float] = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
        if how == "time":
            measured = job.ranks.is_main_process
            weights = job.broadcast_object(
                _seconds(model, micro_batch, dtype, job.device) if measured else []
            )
        units = partition_balanced(_by_block(weights, model), stages)
    inner = [model.first_block + int(unit) for unit in units[1:-1]]
    return [0, *inner, len(model.layers)]


def stage_groups(model: LayeredModel, stage: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """A stage's parameter groups, as many on every stage: DeepSpeed adds up norms over stages group by group.

    It drops an empty group, so a stage that lacks one has another in two.

    Raises:
        ConfigError: the stage has fewer parameters than there are groups; see also parameter_groups.
    """
    keys = assigned(_named(model.layers), config)
    groups = grouped(_named(stage.modules()), keys, config)
    wanted = len(set(keys.values()))
    while len(groups) < wanted:
        at = max(range(len(groups)), key=lambda index: len(groups[index]["params"]))
        first, *rest = groups[at]["params"]
        if not rest:
            raise ConfigError(
                f"optimizer.groups makes {wanted} groups of parameters, and a pipeline stage has "
                f"{len(groups)} parameters; give fewer groups, or fewer pipeline.stages"
            )
        groups[at : at + 1] = [groups[at] | {"params": [first]}, groups[at] | {"params": rest}]
    return groups


def _named(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The layers' parameters under the names of the whole model; a tied one once."""
    seen = set()
    for layer in modules:
        if isinstance(layer, Layer):
            for name, p in layer.part.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    yield f"{layer.name}.{name}", p


def _by_block(weights: list[float], model: LayeredModel) -> list[float]:
    """One weight a block: the first's with all before it, the last's with all after it."""
    first, end = model.first_block, model.first_block + model.num_blocks
    blocks = weights[first:end]
    blocks[0] += sum(weights[:first])
    blocks[-1] += sum(weights[end:])
    return blocks


def _seconds(
    model: LayeredModel, micro_batch: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Each layer's forward and backward on random tokens: the second of two, the first one warms up."""
    carried: Any = torch.randint(model.config.vocab_size, micro_batch, device=device)
    seconds = []
    for layer in model.layers:
        trial = (
            copy.deepcopy(layer).to(device=device, dtype=dtype).train()
        )  # one at a time, gone after its turn
        for _ in range(2):
            start = _now(device)
            if carried.is_floating_point():
                carried = carried.detach().requires_grad_()
            output = trial(carried)
            if output.requires_grad:
                output.backward(torch.ones_like(output))
            elapsed = _now(device) - start
        seconds.append(elapsed)
        carried = output.detach()
    return seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
