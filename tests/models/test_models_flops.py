"""The formula behind perf/mfu against torch's own count of the operations of a forward and backward."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig

from pipeline.models.flops import flops_per_token

T = 96
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 4096,  # no row is that long
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        LlamaConfig(**SHAPE, head_dim=32),
        MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2),
    ],
    ids=["llama", "wide heads", "experts"],
)
def test_as_many_as_torch_counts(config: PretrainedConfig):
    how = {"attn_implementation": "eager"}  # torch does not count fused attention on a CPU
    if config.model_type == "mixtral":
        how["experts_implementation"] = "eager"
    model = AutoModelForCausalLM.from_config(config, **how)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(256, (1, T)), use_cache=False).logits.sum().backward()
    lookup = 6 * model.get_input_embeddings().weight.numel()  # in N by convention, and no multiplication
    counted = counter.get_total_flops() / T + lookup
    assert flops_per_token(model, T) == pytest.approx(counted, rel=0.01)  # norms are no matrix products


def test_what_has_no_such_shape_has_no_figure():
    assert flops_per_token(nn.Linear(2, 2), T) is None
    assert flops_per_token(AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)), None) is None
