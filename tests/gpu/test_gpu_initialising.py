"""First weights that go to a GPU as they are drawn or read (python -m pytest -m gpu)."""

from __future__ import annotations

import pytest
import torch

from pipeline.config.model_schema import CausalLMConfig
from pipeline.models import build_model
from pipeline.models.sharding import DevicePlacement, ModelRequest, NoSharding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 64}


def built(sharding, draws=True, **named):
    request = ModelRequest(sharding, vocab_size=257, sequence_length=24, draws=draws)
    return build_model(CausalLMConfig(**named), request, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])  # the second ties its embeddings
def test_they_are_those_of_a_cpu(tmp_path, architecture, dtype):
    new = {"architecture": architecture, **SIZES}
    expected = built(NoSharding(), **new)
    there = DevicePlacement(torch.device("cuda"), dtype)
    expected.save_pretrained(tmp_path)
    for named in (new, {"pretrained": str(tmp_path)}):
        found = dict(built(there, **named).named_parameters())
        assert found.keys() == dict(expected.named_parameters()).keys()
        for name, p in expected.named_parameters():
            assert found[name].is_cuda
            assert torch.equal(found[name].cpu(), p.to(dtype)), name
    assert all(p.is_cuda and p.dtype == dtype for p in built(there, draws=False, **new).parameters())
