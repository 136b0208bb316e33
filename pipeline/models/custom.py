"""Models by import path: a user's own, and the plain ones for images that come along."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from pipeline.config.import_paths import check_signature, exit_as_error, import_object
from pipeline.config.model_schema import CNNConfig, CustomModelConfig
from pipeline.errors import ModelError
from pipeline.models.sharding import ModelRequest

log = logging.getLogger(__name__)

OTHER_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
NAMED = 3  # parameters that a message lists
GIVE_SIZES = "give the layer its sizes (nn.Linear in place of nn.LazyLinear)"


def build_custom(config: CustomModelConfig, request: ModelRequest) -> nn.Module:
    """Return the module that the function `kind` names makes of `args`.

    Raises:
        ModelError: no such function, arguments that do not fit it, another return type, a module that
            divides the work itself, or one whose parameters have no values.
    """
    build = import_object(config.kind, ModelError)
    if isinstance(build, nn.Module):
        raise ModelError(f"model.kind: {config.kind} is a module; name a function or a class that makes it")
    check_signature(build, f"model.args do not fit {config.kind}", ModelError, **config.args)
    is_sharded = request.sharding.zero3_config is not None
    try:
        with request.sharding.construct(), exit_as_error(f"model.kind: {config.kind}", ModelError):
            model = build(**config.args)
            if isinstance(model, nn.Module):
                _refuse_unfilled(model, config.kind)  # here: they cannot be sharded
    except ValueError as error:
        if not is_sharded or "uninitialized parameter" not in str(error):
            raise
        raise ModelError(f"model.kind: {config.kind}: a lazy layer cannot be sharded; {GIVE_SIZES}") from None
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.kind: {config.kind} returned a {type(model).__name__}, not an nn.Module")
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        raise ModelError(
            f"model.kind: {config.kind} returned a {type(model).__name__}; return the module inside: the "
            "DeepSpeed JSON says how the work is divided"
        )
    _refuse_expert_layers(model, config.kind)
    if is_sharded:  # shards are in the run's precision already
        _hold_statistics_in_fp32(model)
    else:
        _hold_in_fp32(model, config.kind)
    return model


def _refuse_expert_layers(model: nn.Module, kind: str) -> None:
    """Refuse layers of deepspeed.moe: they want groups and optimizers that DeepSpeed makes."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "group_name") or getattr(parameter, "allreduce", True) is False:
            raise ModelError(
                f"model.kind: {kind} has a layer of deepspeed.moe ({name}), whose experts are neither "
                "divided nor saved here; write the experts as modules or as one stacked parameter, or use "
                "kind: causal_lm with architecture: mixtral"
            )


def _refuse_unfilled(model: nn.Module, kind: str) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    meta = [name for name, tensor in tensors if tensor.device.type == "meta"]
    for names, cure in (
        (lazy, f"are lazy; {GIVE_SIZES}, or call the model once before it is returned"),
        (
            meta,
            "are on the meta device; make the model on the CPU, or fill them (to_empty, then its weights)",
        ),
    ):
        if names:
            listed = ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)
            raise ModelError(f"model.kind: {kind} returned a model without values: {listed} {cure}")


def _hold_in_fp32(model: nn.Module, kind: str) -> None:
    """Optimizer and checkpoints hold fp32, and the DeepSpeed JSON alone says what it is computed in.

    Buffers of the same type as such parameters come along: `.half()` casts both. Names and objects stay.
    """
    own = [p for p in model.parameters() if p.dtype in OTHER_DTYPES]
    if not own:
        return
    kinds = {p.dtype for p in own}
    for tensor in (*own, *(b for b in model.buffers() if b.dtype in kinds)):
        tensor.data = tensor.data.float()
    log.warning(
        "model.kind: %s: %d parameters are %s; trained from fp32 copies of them (the DeepSpeed JSON decides "
        "the precision: leave .half() and the like out)",
        kind,
        sum(p.numel() for p in own),
        " and ".join(sorted(OTHER_DTYPES[dtype] for dtype in kinds)),
    )


def _hold_statistics_in_fp32(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            for statistic in layer.buffers(recurse=False):
                if statistic.dtype in OTHER_DTYPES:
                    statistic.data = statistic.data.float()


class SmallCNN(nn.Module):
    """Two convolutions, average pooling to 2 x 2, one linear layer: (B, C, H, W) -> logits (B, K)."""

    def __init__(self, in_channels: int, num_classes: int, channels: int, dropout: float):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * channels * 4, num_classes)
        self.pool = nn.AdaptiveAvgPool2d(2)

    def forward(self, inputs_BCHW: Tensor) -> Tensor:
        x_BCHW = self.pool(self.features(inputs_BCHW))
        logits_BK: Tensor = self.classifier(self.dropout(x_BCHW.flatten(1)))
        return logits_BK


def build_cnn(config: CNNConfig, request: ModelRequest) -> nn.Module:
    """Return a SmallCNN for the data's channels (grey if it does not say) and classes.

    Raises:
        ModelError: neither the recipe nor the data says how many classes, or the two differ.
    """
    stated, data = config.num_classes, request.num_classes
    if stated is not None and data is not None and stated < data:
        raise ModelError(f"model.num_classes is {stated}, the data has {data} classes")
    num_classes = stated or data
    if num_classes is None:
        raise ModelError("model.num_classes: the data does not say how many classes it has; write the number")
    with request.sharding.construct():
        return SmallCNN(request.num_channels or 1, num_classes, config.channels, config.dropout)
