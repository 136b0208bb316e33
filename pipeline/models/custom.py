"""Models by import path, and the small image model that the package ships."""

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

NON_FP32_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
MAX_LISTED_NAMES = 3  # names of parameters that a message lists
LAZY_LAYER_ADVICE = "give the layer its sizes (nn.Linear in place of nn.LazyLinear)"


def build_custom(config: CustomModelConfig, request: ModelRequest) -> nn.Module:
    """Return the module that the function named by `model.kind` builds from `model.args`.

    Parameters that are fp16, bf16 or fp64 are cast to fp32, except those that ZeRO 3 has sharded.

    Raises:
        ModelError: There is no such function, its arguments do not fit, it raises an error, or it does not
            return a module. Or the module divides the work itself (as DataParallel does), has parameters
            without values, or has expert layers of DeepSpeed.
    """
    build = import_object(config.kind, ModelError)
    if isinstance(build, nn.Module):
        raise ModelError(f"model.kind: {config.kind} is a module; name a function or class that returns it")
    check_signature(build, f"model.args do not fit {config.kind}", ModelError, **config.args)
    is_sharded = request.sharding.zero3_config is not None
    try:
        with request.sharding.construct(), exit_as_error(f"model.kind: {config.kind}", ModelError):
            model = build(**config.args)
            if isinstance(model, nn.Module):
                # Inside of the context, whose end shards parameters and needs their values.
                _refuse_unfilled(model, config.kind)
    except ValueError as error:
        is_lazy_layer = is_sharded and "uninitialized parameter" in str(error)
        if not is_lazy_layer:
            raise
        raise ModelError(
            f"model.kind: {config.kind}: a lazy layer cannot be sharded; {LAZY_LAYER_ADVICE}"
        ) from None
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model.kind: {config.kind} returned a {type(model).__name__}, not an nn.Module; return the model"
        )
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        raise ModelError(
            f"model.kind: {config.kind} returned a {type(model).__name__}; return the module inside it: the "
            "DeepSpeed JSON decides how the work is divided"
        )
    _refuse_expert_layers(model, config.kind)
    if is_sharded:  # parameters are in the run's precision already
        _cast_statistics_to_fp32(model)
    else:
        _cast_to_fp32(model, config.kind)
    return model


def _refuse_expert_layers(model: nn.Module, kind: str) -> None:
    """Refuse layers of deepspeed.moe, which need process groups and optimizers that DeepSpeed creates."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "group_name") or getattr(parameter, "allreduce", True) is False:
            raise ModelError(
                f"model.kind: {kind} has a layer of deepspeed.moe ({name}), whose experts are neither "
                "divided nor saved here; write the experts as modules or as one stacked parameter, or use "
                "kind: causal_lm with architecture: mixtral"
            )


def _refuse_unfilled(model: nn.Module, kind: str) -> None:
    """Refuse a model that has parameters or buffers without values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy_names = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy_names:
        problem = f"are lazy; {LAZY_LAYER_ADVICE}, or call the model once before it is returned"
        raise _build_unfilled_error(kind, lazy_names, problem)
    meta_names = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if meta_names:
        problem = (
            "are on the meta device; build the model on the CPU, or fill them (to_empty, then its weights)"
        )
        raise _build_unfilled_error(kind, meta_names, problem)


def _build_unfilled_error(kind: str, names: list[str], problem: str) -> ModelError:
    listed = ", ".join(names[:MAX_LISTED_NAMES]) + ", ..." * (len(names) > MAX_LISTED_NAMES)
    return ModelError(f"model.kind: {kind} returned a model without values: {listed} {problem}")


def _cast_to_fp32(model: nn.Module, kind: str) -> None:
    """Cast parameters to fp32, and buffers of the same dtypes, since `.half()` casts both. Warn of it.

    The optimizer and checkpoints use fp32, and the DeepSpeed JSON alone decides the dtype of computation.
    Parameters stay the same objects, under the same names.
    """
    parameters = [p for p in model.parameters() if p.dtype in NON_FP32_DTYPES]
    if not parameters:
        return
    dtypes = {p.dtype for p in parameters}
    buffers = [b for b in model.buffers() if b.dtype in dtypes]
    for tensor in (*parameters, *buffers):
        tensor.data = tensor.data.float()
    log.warning(
        "model.kind: %s: %d parameters are %s and were cast to fp32; leave .half() and the like out, since "
        "the DeepSpeed JSON decides the precision",
        kind,
        sum(p.numel() for p in parameters),
        " and ".join(sorted(NON_FP32_DTYPES[dtype] for dtype in dtypes)),
    )


def _cast_statistics_to_fp32(model: nn.Module) -> None:
    """Cast the running statistics of normalization layers to fp32."""
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            for statistic in layer.buffers(recurse=False):
                if statistic.dtype in NON_FP32_DTYPES:
                    statistic.data = statistic.data.float()


class SmallCNN(nn.Module):
    """A small image classifier: two convolutions, average pooling to 2 x 2, one linear layer.

    Args:
        in_channels: The number of channels of the images.
        num_classes: The number of classes K.
        channels: The number of channels after the first convolution; the second has twice as many.
        dropout: The probability of dropout before the linear layer.
    """

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
        """Return logits (B, K) of images (B, C, H, W)."""
        x_BCHW = self.pool(self.features(inputs_BCHW))
        logits_BK: Tensor = self.classifier(self.dropout(x_BCHW.flatten(1)))
        return logits_BK


def build_cnn(config: CNNConfig, request: ModelRequest) -> nn.Module:
    """Return a SmallCNN for the data's classes and channels (one channel if the data does not say).

    Raises:
        ModelError: Neither the recipe nor the data says the number of classes, or the recipe has fewer
            than the data.
    """
    recipe_classes = config.num_classes
    data_classes = request.num_classes
    if recipe_classes is not None and data_classes is not None and recipe_classes < data_classes:
        raise ModelError(
            f"model.num_classes is {recipe_classes}, but the data has {data_classes} classes; raise it, or "
            "leave it out"
        )
    num_classes = recipe_classes or data_classes
    if num_classes is None:
        raise ModelError("model.num_classes is not given, and the data does not say it; write the number")
    with request.sharding.construct():
        return SmallCNN(request.num_channels or 1, num_classes, config.channels, config.dropout)
