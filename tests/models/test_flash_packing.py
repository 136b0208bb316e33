"""flash_attention_2 and packed rows: transformers is told where documents are; a trial finds a leak.

Its kernels stand in as products on a CPU; all of transformers' way to them is its own.
"""

from __future__ import annotations

import pytest
import torch
from test_packed_attention import make
from torch.nn import functional as F
from transformers import modeling_flash_attention_utils as flash

from pipeline.errors import ModelError
from pipeline.models import attention
from pipeline.models.attention import choose_attention, refuse_document_leaks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def one_document(query, key, value, *_, softmax_scale=None, **__):
    """(B, T, heads, width), causal."""
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale).transpose(1, 2)


def documents(query, key, value, cu_seqlens_q, softmax_scale=None, **_):
    """(tokens, heads, width)."""
    sizes = cu_seqlens_q.diff().tolist()
    parts = zip(*(each[None].split(sizes, 1) for each in (query, key, value)), strict=True)
    return torch.cat([one_document(*part, softmax_scale=softmax_scale)[0] for part in parts])


@pytest.fixture
def flash_model(monkeypatch):
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: (one_document, documents, None, None, None))
    monkeypatch.setattr(flash, "_loaded_implementation", None)  # and so again after the test
    model = make("llama", "sdpa").eval()
    model.config._attn_implementation = "flash_attention_2"
    return model


def test_two_packed_rows_leak_where_flash_attention_is_left_to_find_documents(flash_model, monkeypatch):
    monkeypatch.setattr(attention, "register_bounds_hooks", lambda *_: None)
    with pytest.raises(ModelError, match="attends to other documents whatever the position_ids"):
        refuse_document_leaks(flash_model, CPU)


def test_it_is_told_where_documents_are(flash_model):
    refuse_document_leaks(flash_model, CPU)
    choose_attention(flash_model, False, CPU)
    rows = attention.build_trial_rows(CPU)
    with torch.no_grad():
        one, other = flash_model(**rows).logits[:, 4:]
    torch.testing.assert_close(one, other)
