"""Memory of a model's first weights while they are made: only a few are in host memory at a time."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch
from parity.splits import LARGE
from support.launch import run_python
from support.memory import reachable_tensor_bytes
from support.weights import SIZES, assert_same

from pipeline.config.model_schema import CausalLMConfig
from pipeline.models import build_model
from pipeline.models.sharding import DevicePlacement, ModelRequest, NoSharding

pytestmark = pytest.mark.slow

# the second has no host memory, as a GPU has none
CPU = torch.device("cpu")
ELSEWHERE = torch.device("meta")
ARCHITECTURES = ["llama", "mixtral"]


def built(architecture, sharding, **changes):
    config = CausalLMConfig(architecture=architecture, **SIZES)
    return build_model(config, ModelRequest(sharding, vocab_size=257, sequence_length=24, **changes), 3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_of_a_whole_model_in_the_precision_that_trains(architecture):
    expected = built(architecture, NoSharding())
    for p in expected.parameters():
        p.data = p.data.bfloat16()
    assert_same(built(architecture, DevicePlacement(CPU, torch.bfloat16)), expected.state_dict())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_checkpoint_will_fill_draws_nothing(architecture):
    model = built(architecture, DevicePlacement(CPU, torch.bfloat16), draws=False)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state())
    expected = built(architecture, NoSharding())
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in expected.named_parameters()
    }
    for (name, mine), (_, its) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(mine, its), name  # no checkpoint has all of them
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_host_memory_has_a_module_of_a_new_model_at_a_time(tmp_path):
    """Run in a process of its own, since resident memory includes what earlier tests took and freed."""
    (tmp_path / "program.py").write_text(PROGRAM.format(model=LARGE, small=LARGE | SIZES))
    done = run_python(str(tmp_path / "program.py"))
    assert done.returncode == 0, done.stderr
    assert 0.1 < float(done.stdout) < 0.2  # the three matrices of an MLP are an eighth of it


# Prints host memory at the most while a model is made for another device, in sizes of the fp32 model.
PROGRAM = """
import gc, torch
from pathlib import Path
from pipeline.config.model_schema import CausalLMConfig
from pipeline.engine.memory import unmap_freed_tensors
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, DevicePlacement

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def made(sizes):
    placed = DevicePlacement(torch.device("meta"), torch.bfloat16)  # it has no host memory, as a GPU has none
    return build_model(CausalLMConfig(**sizes), ModelRequest(placed, vocab_size=257), 0)

with unmap_freed_tensors():
    made({small})  # what is imported and allocated once
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's mark of the most starts again
    before = resident("VmRSS:")
    model = made({model})
assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
print((resident("VmHWM:") - before) / sum(4 * p.numel() for p in model.parameters()))
"""


class Watched(DevicePlacement):
    """Counts what all tensors hold, at every 48th time that it lends some."""

    held = times = 0

    @contextmanager
    def gather(self, parameters):
        with super().gather(parameters):
            yield
            self.times += 1
            if self.times % 48 == 0:
                self.held = max(self.held, reachable_tensor_bytes())


def test_host_memory_has_a_tensor_of_a_pretrained_model_at_a_time(tmp_path):
    config = CausalLMConfig(architecture="llama", **SIZES | {"num_layers": 16})
    build_model(config, ModelRequest(NoSharding(), vocab_size=257), 0).save_pretrained(tmp_path)
    gc.collect()
    before = reachable_tensor_bytes()
    watched = Watched(ELSEWHERE, torch.bfloat16)
    model = build_model(CausalLMConfig(pretrained=str(tmp_path)), ModelRequest(watched), 0)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    # The largest, an embedding, is a twentieth: as it was read, and where it is lent to the model.
    assert 0 < watched.held - before < 0.2 * sum(4 * p.numel() for p in model.parameters())
