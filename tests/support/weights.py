"""Builds small models of every kind, and loads weights into them."""

from __future__ import annotations

import pytest
import torch
from parity.measure import ALONE
from support.tiny import VOCABULARY
from torch import nn

from pipeline.checkpoint.initial_weights import open_checkpoint
from pipeline.config.model_schema import CausalLMConfig, CNNConfig, ModelSection
from pipeline.errors import ModelError
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.models.weights import load_weights

SIZES = {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 64}


def llama(seed=0, vocabulary=VOCABULARY, **changes):
    """Build a Llama of two layers; `changes` sets further keys of `model`."""
    request = ModelRequest(NoSharding(), vocab_size=vocabulary, sequence_length=24)
    return build_model(CausalLMConfig(architecture="llama", **SIZES, **changes), request, seed)


def cnn(seed=0):
    """Build a convolutional network for ten classes."""
    return build_model(CNNConfig(kind="cnn", channels=4), ModelRequest(NoSharding(), num_classes=10), seed)


class Small(nn.Module):
    """Model with a parameter, a buffer, BatchNorm statistics, and a submodule that is named `module`."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.module = nn.Linear(4, 2)
        self.register_buffer("scale", torch.rand(()))


def small(seed=0):
    """Build a `Small` whose values follow from the seed."""
    torch.manual_seed(seed)
    return Small()


def load(model, path, **keys):
    """Load `model.weights: path` into the model, and return the model."""
    load_weights(model, ModelSection(weights=str(path), **keys), NoSharding(), ALONE, open_checkpoint)
    return model


def refusal_message(model, path, **keys):
    """Return the message with which the weights are refused, and assert that the model has not changed."""
    before = copy_state(model)
    with pytest.raises(ModelError) as caught:
        load(model, path, **keys)
    message = str(caught.value)
    assert message.startswith("model.")
    assert "\n" not in message
    assert len(message) < 700
    assert_same(model, before)
    return message


def assert_same(model, expected):
    """Assert that the model's state equals `expected`, bit for bit."""
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def copy_state(model):
    """Return a copy of the model's state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}
