"""Pipeline stages: division of a model's layers into stages, and DeepSpeed's PipelineModule of one stage.

Every stage has at least one decoder block. Layers before the blocks belong to the first stage, layers after
the blocks to the last.
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
from pipeline.engine.optim import assign_groups, build_groups
from pipeline.errors import ModelError
from pipeline.models.generation import get_max_positions
from pipeline.models.sharding import allocate_values, free_values
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

    Initial weights depend on the seed only, not on the split. Therefore every rank draws the weights of all
    stages in the same order, module by module, and frees the weights of other stages.
    """

    loads_by_tensor = True
    zero3_config: dict[str, Any] | None = None

    def __init__(self, config: dict[str, Any], split: Split, job: Job):
        """Prepare to divide a model.

        Args:
            config: Resolved DeepSpeed JSON.
            split: Split of the run.
            job: Ranks and process group of the run.
        """
        self._config = config
        self._split = split
        self._stage = job.ranks.rank // split.dp_world_size
        self._stage_parameters: set[nn.Parameter] = set()
        self.bounds: list[int] = []
        """Bounds of the stages: stage s has layers bounds[s] to bounds[s + 1] - 1. Empty before `divide`."""
        self.model: LayeredModel | None = None
        """Whole model as layers; `None` before `divide` has received a model whose buffers have values."""

    def construct(self) -> AbstractContextManager[None]:
        """See Sharding.construct. Nothing is sharded here: `divide` drops the values of other stages."""
        return nullcontext()

    def construct_empty(self) -> AbstractContextManager[None]:
        """See Sharding.construct_empty. Buffers have values."""
        from accelerate import init_empty_weights

        context: AbstractContextManager[None] = init_empty_weights(include_buffers=False)
        return context

    def divide(self, model: nn.Module) -> None:
        """See Sharding.divide. Sets `bounds` and `model`, and does nothing once `model` is set.

        While buffers have no values, the model itself cannot be cut into layers. Then a copy is cut to find
        the parameters of this stage, and a later call cuts the model itself.

        Raises:
            ModelError: the model has fewer blocks than stages, or cannot be cut into layers.
        """
        if self.model is not None:
            return
        has_buffer_values = not any(buffer.is_meta for buffer in model.buffers())
        whole = model if has_buffer_values else copy_without_values(model, self.construct_empty())
        layered = cut_into_layers(whole)
        self.bounds = self.bounds or self._compute_bounds(layered)
        layers = layered.layers[self.bounds[self._stage] : self.bounds[self._stage + 1]]
        if layered.is_tied and layers[-1] is layered.layers[-1]:
            layers = [*layers, layered.layers[0]]
        in_stage = {p for layer in layers for p in layer.parameters()}
        names = {name for name, p in whole.named_parameters(remove_duplicate=False) if p in in_stage}
        self._stage_parameters = {
            p for name, p in model.named_parameters(remove_duplicate=False) if name in names
        }
        for parameter in model.parameters():
            if parameter not in self._stage_parameters and not parameter.is_meta:
                free_values(parameter)
        if has_buffer_values:
            self.model = layered

    def place(self, model: nn.Module, draws: bool) -> None:
        """See Sharding.place."""
        for parameter in self._stage_parameters:
            if parameter.is_meta:
                allocate_values(parameter)

    @contextmanager
    def gather(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """See Sharding.gather."""
        temporary = [p for p in dict.fromkeys(parameters) if p.is_meta]
        for parameter in temporary:
            allocate_values(parameter)
        try:
            yield
        finally:
            for parameter in temporary:
                if parameter not in self._stage_parameters:
                    free_values(parameter)

    def _compute_bounds(self, model: LayeredModel) -> list[int]:
        """Return the bounds of the stages, as `pipeline.partition` in the DeepSpeed JSON says.

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
            block_bounds = split_uniformly(model.num_blocks, stages)
        else:
            sizes: list[float] = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
            block_bounds = split_balanced(_sum_by_block(sizes, model), stages)
        inner = [model.first_block + block for block in block_bounds[1:-1]]
        return [0, *inner, len(model.layers)]


class StageModule(TiedPipelineModule):
    """Computes this rank's stage of the model."""

    def __init__(self, model: LayeredModel, bounds: list[int], compute_output: Callable[[Tensor], Tensor]):
        """Build this rank's stage and the process groups of the pipeline. Collective.

        Args:
            model: Whole model, as layers.
            bounds: Stage s has layers bounds[s] to bounds[s + 1] - 1.
            compute_output: Replaces the output layer: maps the last stage's hidden states to loss or logits.
        """
        self.parts = bounds
        layers: list[Any] = list(model.layers)
        if model.is_tied:
            layers[0] = layers[-1] = _TiedLayer(layers[0])
        super().__init__(layers, num_stages=len(bounds) - 1)
        self._layer_specs: list[Any] = []  # DeepSpeed's list refers to the layers of other stages
        self._compute_output = compute_output
        if self.stage_id == self.num_stages - 1:
            self.forward_funcs.pop()  # the output layer
        self.config = model.config
        self.generation_config = model.generation_config

    def forward(self, forward_input: Any) -> Any:
        """Return the stage's output.

        While gradients are enabled, the output requires a gradient even if this stage trains nothing, since
        the next stage sends a gradient back for it.
        """
        output = super().forward(forward_input)
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()
        return self._compute_output(hidden) if self.stage_id == self.num_stages - 1 else output

    def generate(self, input_ids: Tensor, use_cache: bool, **settings: Any) -> Tensor:
        """Return the tokens that transformers' `generate` yields for the whole model. Collective over stages.

        Args:
            input_ids: Token ids of the prompts, (B, T).
            use_cache: Ignored; stages have no key-value cache.
            **settings: Other arguments of transformers' `generate`.
        """
        model: Any = UncachedGenerator(self, input_ids.device, self._compute_last_logits)
        generated: Tensor = model.generate(input_ids, use_cache=False, synced_gpus=False, **settings)
        return generated

    def _compute_last_logits(self, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
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
        parameter = next(self.parameters())  # has the dtype and device of the hidden states
        stage_input = ids_BT
        if stage > 0:
            stage_input = parameter.new_empty(*ids_BT.shape, self.config.hidden_size)
            dist.recv(stage_input, grid.stage_to_global(stage_id=stage - 1), group=group)
        if mask_BT is None or bool(mask_BT.all()):
            output = self(stage_input)
        else:
            # A position of 0 begins a document, so each padding token is a document of its own.
            # A row that has ended takes part in the others' forwards, also behind the last position.
            last_position = (get_max_positions(self) or mask_BT.shape[1]) - 1
            positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0, max=last_position)
            output = self((stage_input, positions_BT))
        if stage < last:
            hidden = output[0] if isinstance(output, tuple) else output
            dist.send(hidden.contiguous(), grid.stage_to_global(stage_id=stage + 1), group=group)
            logits_BV = parameter.new_empty(len(ids_BT), self.config.vocab_size)
        else:
            logits_BV = output[:, -1].contiguous()
        dist.broadcast(logits_BV, grid.stage_to_global(stage_id=last), group=group)
        return logits_BV[:, None]

    def _partition_layers(self, method: str = "") -> None:  # DeepSpeed calls it in its __init__
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


class _TiedLayer(TiedLayerSpec):
    """Wraps a layer that shares its weight with a layer of another stage.

    DeepSpeed sums the gradients of both over the two stages.
    """

    def __init__(self, module: nn.Module):
        super().__init__("words", type(module), tied_weight_attr="part.weight")
        self._module = module

    def build(self, log: bool = False) -> nn.Module:
        return self._module


def build_stage_groups(
    model: LayeredModel, stage: nn.Module, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return this stage's parameter groups, equal in number on every stage.

    DeepSpeed removes empty groups and reduces norms over stages group by group. Stages with different numbers
    of groups would wait for each other forever. Therefore a group that has no parameter on this stage gets a
    stand-in parameter, which never gets a gradient.

    Args:
        model: Whole model, as layers.
        stage: Module of this rank's stage. Stand-in parameters are added to it as `stand_ins`.
        config: Optimizer section of the recipe.

    Raises:
        ConfigError: see optim.parameter_groups.
        ModelError: see optim.parameter_groups.
    """
    in_stage = {p for _, p in named_layer_parameters(stage.modules())}
    groups = build_groups(
        named_layer_parameters(model.layers),
        assign_groups(named_layer_parameters(model.layers), config),
        config,
    )
    stage.stand_ins = nn.ParameterList()
    for group in groups:
        group["params"] = [p for p in group["params"] if p in in_stage]
        if not group["params"]:
            stand_in = nn.Parameter(torch.zeros(1))
            stand_in.ds_pipe_replicated = False  # type: ignore[attr-defined]
            stage.stand_ins.append(stand_in)
            group["params"] = [stand_in]
    return groups


def named_layer_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of the StageLayers among the modules, with their names in the whole model.

    A parameter that several layers share is yielded once.
    """
    seen = set()
    for layer in modules:
        if isinstance(layer, StageLayer):
            for name, p in layer.part.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    yield f"{layer.name}.{name}", p


def _sum_by_block(sizes: list[float], model: LayeredModel) -> list[float]:
    """Return one size per block, from one size per layer of the model.

    The first block's size includes the layers before it, the last block's size the layers after it.
    """
    first = model.first_block
    end = first + model.num_blocks
    block_sizes = sizes[first:end]
    block_sizes[0] += sum(sizes[:first])
    block_sizes[-1] += sum(sizes[end:])
    return block_sizes
