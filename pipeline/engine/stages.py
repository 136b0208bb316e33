"""Pipeline stages: the cut of a model's layers, and DeepSpeed's PipelineModule over it.

Every stage has at least one decoder block. Layers before the blocks belong to the first stage, layers after
them to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.split import Split
from pipeline.distributed.process_group import Job
from pipeline.engine.deepspeed_patches import TiedPipelineModule
from pipeline.engine.optim import assign_groups, group_parameters
from pipeline.errors import ModelError
from pipeline.models.sharding import allocate_values, drop_values
from pipeline.models.staging import (
    LayeredModel,
    StageLayer,
    UncachedGenerator,
    copy_without_values,
    cut_into_layers,
)
from pipeline.planner.rank import split_balanced, split_uniformly


class StageSharding:
    """Implements pipeline.models.sharding.Sharding: a rank has values only for the parameters of its stage.

    Initial weights depend on the seed alone. Therefore every rank draws the weights of all stages in the same
    order, module by module, and frees those of other stages.
    """

    loads_by_tensor = True
    zero3_config: dict[str, Any] | None = None

    def __init__(self, config: dict[str, Any], split: Split, job: Job):
        """Prepare to cut a model.

        Args:
            config: Resolved DeepSpeed JSON.
            split: Split of the run.
            job: Ranks and process group of the run.
        """
        self._config = config
        self._split = split
        self._stage = job.ranks.rank // split.dp_world_size
        self._kept: set[nn.Parameter] = set()
        self.bounds: list[int] = []
        """Bounds of the stages: stage s has layers bounds[s] to bounds[s + 1] - 1."""
        self.model: LayeredModel | None = None

    def construct(self) -> AbstractContextManager[None]:
        """See Sharding.construct. A module that draws its own weights is whole first."""
        return nullcontext()

    def construct_empty(self) -> AbstractContextManager[None]:
        """See Sharding.construct_empty. Buffers have values."""
        from accelerate import init_empty_weights

        context: AbstractContextManager[None] = init_empty_weights(include_buffers=False)
        return context

    def divide(self, model: nn.Module) -> None:
        """See Sharding.divide. Does nothing after the model was cut.

        A model whose buffers have no values is not complete. Then a copy of it is cut to find the parameters
        of this stage, and the next call cuts the model itself.
        """
        if self.model is not None:
            return
        is_complete = not any(buffer.is_meta for buffer in model.buffers())
        whole = model if is_complete else copy_without_values(model, self.construct_empty())
        layered = cut_into_layers(whole)
        self.bounds = self.bounds or self._cut_points(layered)
        layers = layered.layers[self.bounds[self._stage] : self.bounds[self._stage + 1]]
        if layered.is_tied and layers[-1] is layered.layers[-1]:
            layers = [*layers, layered.layers[0]]
        own = {p for layer in layers for p in layer.parameters()}
        names = {name for name, p in whole.named_parameters(remove_duplicate=False) if p in own}
        self._kept = {p for name, p in model.named_parameters(remove_duplicate=False) if name in names}
        for parameter in model.parameters():
            if parameter not in self._kept and not parameter.is_meta:
                drop_values(parameter)
        if is_complete:
            self.model = layered

    def place(self, model: nn.Module, draws: bool) -> None:
        """See Sharding.place."""
        for parameter in self._kept:
            if parameter.is_meta:
                allocate_values(parameter)

    @contextmanager
    def gather(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """See Sharding.gather."""
        lent = [p for p in dict.fromkeys(parameters) if p.is_meta]
        for parameter in lent:
            allocate_values(parameter)
        try:
            yield
        finally:
            for parameter in lent:
                if parameter not in self._kept:
                    drop_values(parameter)

    def _cut_points(self, model: LayeredModel) -> list[int]:
        """Return the bounds of the stages for the section's `partition`.

        Raises:
            ModelError: the model has fewer blocks than stages.
        """
        stages = self._split.pipeline_stages
        partition = self._config["pipeline"].get("partition", "parameters")
        if model.num_blocks < stages:
            raise ModelError(
                f"pipeline.stages is {stages}, but the model has {model.num_blocks} blocks, and each stage "
                f"needs one; set pipeline.stages to {model.num_blocks} at most"
            )
        if partition == "uniform":
            units = split_uniformly(model.num_blocks, stages)
        else:
            sizes: list[float] = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
            units = split_balanced(_sum_by_block(sizes, model), stages)
        inner = [model.first_block + unit for unit in units[1:-1]]
        return [0, *inner, len(model.layers)]


class StageModule(TiedPipelineModule):
    """Computes this rank's stage of the model."""

    def __init__(self, model: LayeredModel, bounds: list[int], last: Callable[[Tensor], Tensor]):
        """Build the process groups of the pipeline. Collective.

        Args:
            model: Model whose layers are cut.
            bounds: Stage s has layers bounds[s] to bounds[s + 1] - 1.
            last: Replaces the head; maps the last stage's hidden states to loss or logits.
        """
        self.parts = bounds
        layers: list[Any] = list(model.layers)
        if model.is_tied:
            layers[0] = layers[-1] = _TiedLayer(layers[0])
        super().__init__(layers, num_stages=len(bounds) - 1)
        self._layer_specs: list[Any] = []  # they refer to the layers of other stages
        self._last = last
        if self.stage_id == self.num_stages - 1:
            self.forward_funcs.pop()
        self.config = model.config
        self.generation_config = model.generation_config

    def forward(self, forward_input: Any) -> Any:
        """Return the stage's output, which requires a gradient while gradients are enabled.

        The next stage sends a gradient back for it, even if this stage trains nothing.
        """
        output = super().forward(forward_input)
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()
        return self._last(hidden) if self.stage_id == self.num_stages - 1 else output

    def generate(self, input_ids: Tensor, use_cache: bool, **how: Any) -> Tensor:
        """Return the tokens that transformers' `generate` yields for the whole model.

        It uses no key-value cache. Collective over stages.
        """
        model: Any = UncachedGenerator(self, input_ids.device, self._last_logits)
        generated: Tensor = model.generate(input_ids, use_cache=False, synced_gpus=False, **how)
        return generated

    def _last_logits(self, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Return the logits of the last position (B, 1, V) on every rank of a pipeline.

        Collective over the pipeline's ranks.

        Args:
            ids_BT: Token ids, (B, T).
            mask_BT: Attention mask, 0 for padding on the left.
        """
        grid = self._grid
        group = grid.get_pipe_parallel_group()
        stage = self.stage_id
        last = self.num_stages - 1
        like = next(self.parameters())  # its dtype and device are those of the hidden states
        carried = ids_BT
        if stage > 0:
            carried = like.new_empty(*ids_BT.shape, self.config.hidden_size)
            dist.recv(carried, grid.stage_to_global(stage_id=stage - 1), group=group)
        if mask_BT is None or bool(mask_BT.all()):
            output = self(carried)
        else:
            # A position of 0 begins a document, so each padding token is a document of its own.
            output = self((carried, (mask_BT.cumsum(1) - 1).clamp(min=0)))
        if stage < last:
            hidden = output[0] if isinstance(output, tuple) else output
            dist.send(hidden.contiguous(), grid.stage_to_global(stage_id=stage + 1), group=group)
            logits_BV = like.new_empty(len(ids_BT), self.config.vocab_size)
        else:
            logits_BV = output[:, -1].contiguous()
        dist.broadcast(logits_BV, grid.stage_to_global(stage_id=last), group=group)
        return logits_BV[:, None]

    def _partition_layers(self, method: str = "") -> None:
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


class _TiedLayer(TiedLayerSpec):
    """Wraps a layer whose weight is on another stage too. DeepSpeed adds up the gradients of both."""

    def __init__(self, module: nn.Module):
        super().__init__("words", type(module), tied_weight_attr="part.weight")
        self._module = module

    def build(self, log: bool = False) -> nn.Module:
        return self._module


def build_stage_groups(
    model: LayeredModel, stage: nn.Module, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return this stage's parameter groups, equal in number on every stage.

    DeepSpeed drops empty groups and reduces norms over stages group by group. Stages with unequal numbers of
    groups would wait for each other forever. A group without parameters on this stage gets a stand-in
    parameter, which never gets a gradient.

    Raises:
        ConfigError: see optim.parameter_groups.
        ModelError: see optim.parameter_groups.
    """
    own = {p for _, p in named_layer_parameters(stage.modules())}
    groups = group_parameters(
        named_layer_parameters(model.layers),
        assign_groups(named_layer_parameters(model.layers), config),
        config,
    )
    stage.stand_ins = nn.ParameterList()
    for group in groups:
        group["params"] = [p for p in group["params"] if p in own]
        if not group["params"]:
            stand_in = nn.Parameter(torch.zeros(1))
            stand_in.ds_pipe_replicated = False  # type: ignore[attr-defined]
            stage.stand_ins.append(stand_in)
            group["params"] = [stand_in]
    return groups


def named_layer_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the layers' parameters with their names in the whole model. A tied one is yielded once."""
    seen = set()
    for layer in modules:
        if isinstance(layer, StageLayer):
            for name, p in layer.part.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    yield f"{layer.name}.{name}", p


def _sum_by_block(weights: list[float], model: LayeredModel) -> list[float]:
    """Return one weight per block. The first includes the layers before it, the last those after it."""
    first = model.first_block
    end = first + model.num_blocks
    blocks = weights[first:end]
    blocks[0] += sum(weights[:first])
    blocks[-1] += sum(weights[end:])
    return blocks
