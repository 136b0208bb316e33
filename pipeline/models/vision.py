"""Plain nn.Modules for images. Shapes: B batch, C channels, H height, W width, K classes."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.config.model_schema import CNNConfig
from pipeline.errors import ModelError
from pipeline.models.sharding import ModelRequest


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
    """A SmallCNN for the data's channels (grey where it does not say) and as many outputs as it has classes.

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
