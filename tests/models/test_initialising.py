"""Where a model's first weights lie while they are made: a few in host memory, and those that are wanted."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch
from parity.measure import ALONE
from parity.splits import LARGE
from support.memory import anonymous_bytes, held_bytes, most_anonymous
from support.tiny import recipe, resolve, token_bundle
from support.weights import SIZES, assert_same, llama

from pipeline.build_engine import build_engine
from pipeline.config.model_schema import CausalLMConfig
from pipeline.engine.host_memory import freed_at_once
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, Placed, Whole, runnable

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")  # the second has no host memory, as a GPU has none
ARCHITECTURES = ["llama", "gpt2", "mixtral"]


def built(architecture, sharding, **changes):
    config = CausalLMConfig(architecture=architecture, **SIZES)
    return build_model(config, ModelRequest(sharding, vocab_size=257, sequence_length=24, **changes), 3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_of_a_whole_model_in_the_precision_that_trains(architecture):
    expected = built(architecture, Whole())
    for p in expected.parameters():
        p.data = p.data.bfloat16()
    assert_same(built(architecture, Placed(CPU, torch.bfloat16)), expected.state_dict())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_checkpoint_will_fill_draws_nothing(architecture):
    model = built(architecture, Placed(CPU, torch.bfloat16), draws=False)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state())
    expected = built(architecture, Whole())
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in expected.named_parameters()
    }
    for (name, mine), (_, its) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(mine, its), name  # no checkpoint has all of them
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("how", ["resumes", "weights"])
def test_an_engine_that_will_be_filled_draws_nothing(how, tmp_path):
    llama().save_pretrained(tmp_path)
    model = recipe()["model"] | {"attention": "eager"}  # what another is tried on draws from a fork
    config, resolved = resolve(
        recipe(model=model | ({"weights": str(tmp_path)} if how == "weights" else {}), seed=3), None, 1
    )
    build_engine(config, resolved, ALONE, token_bundle(), resumes=how == "resumes")
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state())


@freed_at_once()
def most_while_drawn(config):
    """Host memory at the most while a model is made for another device, in sizes of the fp32 model."""
    gc.collect()
    before = anonymous_bytes()
    with most_anonymous() as most:
        model = build_model(config, ModelRequest(Placed(ELSEWHERE, torch.bfloat16), vocab_size=257), 0)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    return (most[0] - before) / sum(4 * p.numel() for p in model.parameters())


def test_host_memory_has_a_module_of_a_new_model_at_a_time():
    """The three matrices of an MLP are an eighth of it; what else a process of tests holds moves as well."""
    most_while_drawn(CausalLMConfig(**LARGE | SIZES))  # what is imported and allocated once
    # What other threads take for a moment is not there each time.
    assert min(most_while_drawn(CausalLMConfig(**LARGE)) for _ in range(3)) < 0.7


class Watched(Placed):
    """Counts what all tensors hold, at every 16th time that it lends some."""

    held = times = 0

    @contextmanager
    def whole(self, parameters):
        with super().whole(parameters):
            yield
            self.times += 1
            if self.times % 16 == 0:
                self.held = max(self.held, held_bytes())


def test_host_memory_has_a_tensor_of_a_pretrained_model_at_a_time(tmp_path):
    config = CausalLMConfig(architecture="llama", **SIZES | {"num_layers": 16})
    build_model(config, ModelRequest(Whole(), vocab_size=257), 0).save_pretrained(tmp_path)
    gc.collect()
    before, watched = held_bytes(), Watched(ELSEWHERE, torch.bfloat16)
    model = build_model(CausalLMConfig(pretrained=str(tmp_path)), ModelRequest(watched), 0)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    # The largest, an embedding, is a twentieth: as it was read, and where it is lent to the model.
    assert 0 < watched.held - before < 0.2 * sum(4 * p.numel() for p in model.parameters())


def test_a_placed_model_can_be_tried_in_fp32():
    model, expected = built("llama", Placed(CPU, torch.bfloat16)), built("llama", Whole())
    for p in expected.parameters():
        p.data = p.data.bfloat16().float()
    ids = torch.arange(8)[None]
    with runnable(model), torch.no_grad():
        assert torch.equal(model(ids).logits, expected.eval()(ids).logits)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
