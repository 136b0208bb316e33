"""Documents in one row get what each of them gets alone; a model that cannot do that says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from pipeline.errors import ModelError
from pipeline.models.attention import choose_attention, refuse_document_leaks
from pipeline.models.document_attention import ATTENTION_NAME
from pipeline.models.staging import cut_into_layers

LENGTHS = (5, 1, 9, 3)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
ARCHITECTURES = {
    "llama": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def make(architecture: str, attention: str | None = "auto", **fields):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **(SMALL | ARCHITECTURES.get(architecture, {}) | fields))
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=None if attention == "auto" else attention
    )
    if attention == "auto":
        choose_attention(model, True, torch.device("cpu"))
        assert model.config._attn_implementation == ATTENTION_NAME
    return model


def packed_rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two rows of documents in another order: ids and positions, (2, T)."""
    ids = torch.randint(0, 64, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in (LENGTHS, LENGTHS[::-1])]
    return ids, torch.stack(positions)


def gradients(model, logits: Tensor) -> list[Tensor]:
    """Gradients of a sum that weighs every logit differently."""
    weights = torch.linspace(-1, 1, logits.shape[-1])
    return list(torch.autograd.grad((logits.sin() * weights).sum(), list(model.parameters())))


def each_alone(model, ids: Tensor) -> Tensor:
    """The logits of each document of `packed_rows`, put together as they are."""
    return torch.stack(
        [
            torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in row.split(lengths)])
            for row, lengths in zip(ids, (LENGTHS, LENGTHS[::-1]), strict=True)
        ]
    )


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logits_and_gradients_are_those_of_each_document_alone(architecture, attention):
    model = make(architecture, attention)
    ids, positions = packed_rows()
    together = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = each_alone(model, ids)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients(model, together), gradients(model, alone), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


TAKEN = ("mistral", "gemma2", "codegen", "cwm")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *TAKEN])
def test_models_that_keep_documents_apart_are_taken(architecture):
    """The last two configurations have no `pad_token_id`, and refuse `bos_token_id: null`."""
    extra = {"gemma2": {"head_dim": 8}, "codegen": {"rotary_dim": 4}}.get(architecture, {"pad_token_id": 0})
    model = make(architecture, None, num_key_value_heads=4, **extra).train()
    refuse_document_leaks(model)
    assert model.training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("mamba", "takes no position_ids|passes a state on"),
        ("bloom", "whatever the position_ids"),
        ("opt", "whatever the position_ids"),
        ("falcon", "whatever the position_ids"),
        ("jamba", "passes a state on"),
        ("lfm2", "passes a state on"),
    ],
)
def test_models_that_leak_are_refused_in_one_line(architecture, why):
    fields = {
        "lfm2": {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 4},
        "jamba": {"num_key_value_heads": 4, "use_mamba_kernels": False, "mamba_dt_rank": 4, "num_experts": 2},
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    }
    model = make(architecture, None, **fields.get(architecture, {}))
    with pytest.raises(ModelError, match=why) as error:
        refuse_document_leaks(model)
    assert "data.separate_documents=false" in str(error.value)
    assert "\n" not in str(error.value)


class OfThreeLayers(LlamaForCausalLM):
    """A class whose configuration does not let itself be cut."""

    def __init__(self, config):
        assert config.num_hidden_layers == 3
        super().__init__(config)


@pytest.mark.slow
@pytest.mark.parametrize("refuse", [refuse_document_leaks, cut_into_layers])
def test_a_model_that_cannot_be_tried_on_a_small_copy_is_refused(refuse):
    model = OfThreeLayers(AutoConfig.for_model("llama", **SMALL | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match="small copy"):
        refuse(model)
