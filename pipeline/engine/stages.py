"""Where a row of layers is cut into pipeline stages, and DeepSpeed's PipelineModule over the cut.

Every stage holds at least one decoder block: what stands before the blocks goes with the first, what stands
after them with the last.
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
    """See pipeline.models.sharding.Sharding: this rank has values for the parameters of its stage alone.

    Every rank draws the weights of all stages, module by module, so that random numbers stay in step, and
    lets go of what another stage has.
    """

    loads_by_tensor = True
    zero3_config: dict[str, Any] | None = None

    def __init__(self, config: dict[str, Any], split: Split, job: Job):
        """Prepare to cut a model.

        Args:
            config: The DeepSpeed JSON, filled in.
        """
        self._config = config
        self._split = split
        self._stage = job.ranks.rank // split.dp_world_size
        self._kept: set[nn.Parameter] = set()
        self.bounds: list[int] = []
        """Stage s holds layers bounds[s] up to bounds[s + 1]."""
        self.model: LayeredModel | None = None

    def construct(self) -> AbstractContextManager[None]:
        """See Sharding.construct: a module that draws its own weights is made whole first."""
        return nullcontext()

    def construct_empty(self) -> AbstractContextManager[None]:
        """See Sharding.construct_empty. Buffers have values."""
        from accelerate import init_empty_weights

        context: AbstractContextManager[None] = init_empty_weights(include_buffers=False)
        return context

    def divide(self, model: nn.Module) -> None:
        """See Sharding.divide. Once a model is cut, another call does nothing.

        While buffers have no values, the model is not complete: one like it is cut to say what this stage
        keeps, and the model itself by the next call.
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
        """Return the bounds, by the section's `partition`.

        Raises:
            ModelError: fewer blocks than stages.
        """
        stages, how = self._split.pipeline_stages, self._config["pipeline"].get("partition", "parameters")
        if model.num_blocks < stages:
            raise ModelError(
                f"pipeline.stages is {stages}, but the model has {model.num_blocks} blocks, and a stage "
                f"without one has nothing to do; ask for {model.num_blocks} stages at most"
            )
        if how == "uniform":
            units = split_uniformly(model.num_blocks, stages)
        else:
            sizes: list[float] = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
            units = split_balanced(_by_block(sizes, model), stages)
        inner = [model.first_block + unit for unit in units[1:-1]]
        return [0, *inner, len(model.layers)]


class StageModule(TiedPipelineModule):
    """This rank's stage of the model."""

    def __init__(self, model: LayeredModel, bounds: list[int], last: Callable[[Tensor], Tensor]):
        """Build the process groups of the pipeline. Collective.

        Args:
            bounds: Stage s holds layers bounds[s] up to bounds[s + 1].
            last: What the last stage does with hidden states, in place of the head.
        """
        self.parts = bounds
        layers: list[Any] = list(model.layers)
        if model.is_tied:
            layers[0] = layers[-1] = _TiedLayer(layers[0])
        super().__init__(layers, num_stages=len(bounds) - 1)
        self._layer_specs: list[Any] = []  # they hold the other stages' layers
        self._last = last
        if self.stage_id == self.num_stages - 1:
            self.forward_funcs.pop()
        self.config = model.config
        self.generation_config = model.generation_config

    def forward(self, forward_input: Any) -> Any:
        """Return the stage's output. The next stage sends a gradient back for it, also where nothing here
        trains.
        """
        output = super().forward(forward_input)
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()
        return self._last(hidden) if self.stage_id == self.num_stages - 1 else output

    def generate(self, input_ids: Tensor, use_cache: bool, **how: Any) -> Tensor:
        """Do as transformers' `generate` of the whole model, without its cache. Collective over stages."""
        model: Any = UncachedGenerator(self, input_ids.device, self._last_logits)
        written: Tensor = model.generate(input_ids, use_cache=False, synced_gpus=False, **how)
        return written

    def _last_logits(self, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Return the last position's logits (B, 1, V), on every rank of a pipeline. Collective over its
        ranks.

        Args:
            mask_BT: 0 where a row is padded on the left.
        """
        grid, group = self._grid, self._grid.get_pipe_parallel_group()
        stage, last = self.stage_id, self.num_stages - 1
        like = next(self.parameters())
        carried = ids_BT
        if stage > 0:
            carried = like.new_empty(*ids_BT.shape, self.config.hidden_size)
            dist.recv(carried, grid.stage_to_global(stage_id=stage - 1), group=group)
        if mask_BT is None or bool(mask_BT.all()):
            output = self(carried)
        else:
            # Positions that start again begin a document, and padding is a row of documents of one token.
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
    """A layer whose weight another stage holds too, already built. DeepSpeed adds up both gradients."""

    def __init__(self, module: nn.Module):
        super().__init__("words", type(module), tied_weight_attr="part.weight")
        self._module = module

    def build(self, log: bool = False) -> nn.Module:
        return self._module


def build_stage_groups(
    model: LayeredModel, stage: nn.Module, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the parameter groups, as many on every stage: DeepSpeed adds norms up over stages group by
    group.

    It drops an empty group, so where a stage has nothing of one, something that gets no gradient stands in.

    Raises:
        ConfigError, ModelError: see optim.parameter_groups.
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
    """Yield the layers' parameters under the names of the whole model, a tied one once."""
    seen = set()
    for layer in modules:
        if isinstance(layer, StageLayer):
            for name, p in layer.part.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    yield f"{layer.name}.{name}", p


def _by_block(weights: list[float], model: LayeredModel) -> list[float]:
    """Return one weight a block: the first's with all before it, the last's with all after it."""
    first, end = model.first_block, model.first_block + model.num_blocks
    blocks = weights[first:end]
    blocks[0] += sum(weights[:first])
    blocks[-1] += sum(weights[end:])
    return blocks
