"""The formula behind perf/mfu against torch's own count of the operations of a forward and backward."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from pipeline.models.activation_checkpointing import compute_recomputed_share, enable_activation_checkpointing
from pipeline.models.huggingface import get_reward_model_class
from pipeline.models.sizes import block_flops_per_token, flops_per_token

pytestmark = pytest.mark.slow

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
KINDS = ["sliding_attention", "full_attention"]
LATENT = SHAPE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        LlamaConfig(**SHAPE, tie_word_embeddings=True),
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, bos_token_id=1, eos_token_id=1),
        Qwen3Config(**SHAPE, head_dim=32),
        MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2),
        Qwen2MoeConfig(
            **SHAPE,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
        ),
        DeepseekV3Config(**LATENT),
    ],
    ids=["llama", "tied", "gpt2", "wide heads", "experts", "shared expert", "latent attention"],
)
def test_as_many_as_torch_counts(config: PretrainedConfig):
    how = {"attn_implementation": "eager"}  # torch does not count fused attention on a CPU
    if config.model_type in ("mixtral", "qwen2_moe", "deepseek_v3"):
        how["experts_implementation"] = "eager"
    model = AutoModelForCausalLM.from_config(config, **how)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(256, (1, T)), use_cache=False).logits.sum().backward()
    assert flops_per_token(model, T) == pytest.approx(counted(counter) / T, rel=1e-6)


@pytest.mark.parametrize(("mode", "share"), [("full", 1.0), (2, 0.5)])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_is_recomputed_is_what_torch_counts(kind: str, mode, share: float):
    """All of a block's forward; as torch runs it, it ends before the last product, which nobody needs."""
    config = LlamaConfig(**SHAPE)
    if kind == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, bos_token_id=1, **no_dropout)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    enable_activation_checkpointing(model, mode)
    assert compute_recomputed_share(model) == share
    expected = flops_per_token(model, T) + share * block_flops_per_token(model, T)
    for early, shown in ((False, 1.0), (True, 0.99)):
        with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(early):
            model(input_ids=torch.randint(256, (1, T)), use_cache=False).logits.sum().backward()
        if early:
            assert flops_per_token(model, T) < counted(counter) / T < shown * expected
        else:
            assert counted(counter) / T == pytest.approx(expected, rel=1e-6)


def counted(counter: FlopCounterMode) -> int:
    """Rotary angles are left out: they have no weights, and older transformers make them by a product."""
    angles = (sum(n.values()) for name, n in counter.get_flop_counts().items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - sum(angles)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LlamaConfig(**SHAPE), [T, T]),
        (MistralConfig(**SHAPE, sliding_window=32), [32, 32]),
        (MistralConfig(**SHAPE, sliding_window=4096), [T, T]),
        (Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=32, layer_types=KINDS), [32, T]),
        (Qwen3Config(**SHAPE, head_dim=16, sliding_window=32, use_sliding_window=False), [T, T]),
    ],
    ids=["no window", "every layer", "longer than a row", "one layer of two", "switched off"],
)
def test_a_window_that_is_shorter_than_the_row_bounds_attention(config: PretrainedConfig, windows: list[int]):
    """torch counts masked scores too: eager attention computes them all."""
    model = AutoModelForCausalLM.from_config(config)
    matrices = flops_per_token(model, T) - 12 * 64 * sum(windows)
    assert matrices == pytest.approx(flops_per_token(model, T, causal=True) - 12 * 64 * seen(windows))
    assert matrices == pytest.approx(flops_per_token(model, 2 * T) - 12 * 64 * sum(further(windows)))


def seen(windows: list[int]) -> float:
    """The mean number of keys before a token, over the row, of all layers; as an integral: no own key."""
    return sum(sum(min(i + 0.5, window) for i in range(T)) / T for window in windows)


def further(windows: list[int]) -> list[int]:
    return [2 * window if window == T else window for window in windows]


def test_of_frozen_matrices_no_gradient_is_worked_out():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), attn_implementation="eager")
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(256, (1, T)), use_cache=False).logits.sum().backward()
    assert flops_per_token(model, T, frozen=True) == pytest.approx(counted(counter) / T, rel=1e-6)


def test_a_reward_model_has_a_head_for_one_number():
    config = LlamaConfig(**SHAPE)
    whole = flops_per_token(AutoModelForCausalLM.from_config(config), T)
    model = get_reward_model_class(config).from_config(config)
    config.architectures = [type(model).__name__]
    assert whole - flops_per_token(model, T) == 6 * (config.vocab_size - 1) * config.hidden_size


def test_what_has_no_such_shape_has_no_figure():
    assert flops_per_token(nn.Linear(2, 2), T) is None
    assert flops_per_token(AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)), None) is None
