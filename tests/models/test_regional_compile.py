"""The repeated blocks, compiled once for all of them: by a backend that keeps the graphs, without code."""

from __future__ import annotations

import logging

import pytest
import torch
from support.tiny import recipe
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from pipeline.config.model_schema import CausalLMConfig
from pipeline.errors import DataError
from pipeline.models import build_model
from pipeline.models.blocks import compile_blocks, find_repeated_blocks
from pipeline.models.sharding import ModelRequest, NoSharding
from pipeline.models.transforms import TransformContext, apply_transforms
from pipeline.objectives.model_call import ModelCall

pytestmark = pytest.mark.slow

GPT2 = {"intermediate_size": None, "extra": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}


class Graphs(list):
    """A backend: keeps what it is given, and runs it as it is."""

    def __init__(self):
        super().__init__()
        self.options = []

    def __call__(self, graph, inputs, options=None):
        self.append(graph)
        self.options.append(options)
        return graph.forward


def language_model(architecture="llama", num_layers=4, **changes):
    stated = {"architecture": architecture, "num_layers": num_layers, "vocab_size": 50, "attention": "sdpa"}
    tree = recipe()["model"] | stated | changes
    config = CausalLMConfig(**{key: value for key, value in tree.items() if value is not None})
    model = build_model(config, ModelRequest(NoSharding()), 0).train()
    return apply_transforms(model, config, TransformContext(torch.device("cpu")))


def batch(rows=2, length=12):
    ids = torch.arange(rows * length).view(rows, length) % 50
    return {"input_ids": ids, "position_ids": torch.arange(length).remainder(5).repeat(rows, 1)}


def gradients(model, given):
    model.zero_grad()
    logits = model(**given).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.endswith("models.blocks")]


def compiled(model):
    graphs = Graphs()
    compile_blocks(model, graphs)
    return graphs


@pytest.mark.parametrize(("architecture", "more"), [("llama", {}), ("gpt2", GPT2)])
def test_blocks_of_any_number_share_one_graph_and_give_what_they_gave(architecture, more):
    for num_layers in (2, 4):
        model = language_model(architecture, num_layers, **more)
        expected = gradients(model, batch())
        graphs = compiled(model)
        for _ in range(2):
            torch.testing.assert_close(gradients(model, batch()), expected)
        assert len(graphs) == 1


@pytest.mark.daily("selective-1", "2-2")
@pytest.mark.parametrize(("mode", "kinds"), [("full", 1), ("selective", 1), (2, 2)])
def test_what_a_block_recomputes_is_in_its_graph(mode, kinds):
    expected = gradients(language_model(), batch())
    model = language_model(activation_checkpointing=mode)
    graphs = compiled(model)
    calls = []
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(2):
        torch.testing.assert_close(gradients(model, batch()), expected)
    assert len(calls) == 2 * 4, "hooks stay outside of what is computed again"
    assert len(graphs) == kinds
    assert sum("tag_activation_checkpoint" in graph.code for graph in graphs) == 1


def put_in_one_tensor(blocks, gap):
    """Make parameters views of one tensor, as ZeRO does, with a parameter of `gap` numbers between blocks."""
    parts = [part for block in blocks for part in (*block.parameters(), nn.Parameter(torch.zeros(gap)))]
    flat = torch.cat([part.detach().flatten() for part in parts])
    for part, view in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.data = view.view(part.shape)


@pytest.mark.parametrize(("gap", "found"), [(4, [None]), (1, [None, {"triton.divisible_by_16": False}])])
def test_kernels_assume_no_alignment_that_another_block_has_not(gap, found, caplog):
    """The first block begins at a multiple of 16 bytes; behind 4 bytes the second one does not."""
    caplog.set_level(logging.INFO, "pipeline")
    model = language_model(num_layers=3)
    put_in_one_tensor(model.model.layers, gap)
    expected = gradients(model, batch())
    graphs = compiled(model)
    for _ in range(2):
        torch.testing.assert_close(gradients(model, batch()), expected)
    assert graphs.options == found
    assert len([line for line in lines(caplog) if "multiple of 16 bytes" in line]) == len(found) - 1
    assert not [line for line in lines(caplog) if "compiled again for training" in line]


def test_evaluation_compiles_for_itself_and_is_told_what_it_changes(caplog):
    caplog.set_level(logging.INFO, "pipeline")
    model = language_model(num_layers=2)
    graphs = compiled(model)
    gradients(model, batch(rows=8))
    model.eval()
    with torch.no_grad():
        for rows in (8, 3, 8, 5, 2, 3):  # a last, smaller batch; others; the length of a prompt
            model(**batch(rows))
        assert len(graphs) == 3  # as they are, and in any number of rows
    gradients(model.train(), batch(rows=8))
    assert len(graphs) == 3
    first, second, third = lines(caplog)
    assert first.startswith("compile: the 2 LlamaDecoderLayer blocks are compiled once for training (")
    assert second.startswith("compile: the 2 LlamaDecoderLayer blocks are compiled once for evaluation (")
    assert third.startswith("compile: the 2 LlamaDecoderLayer blocks are compiled again for evaluation (")
    assert "size mismatch at index 0. expected 8, actual 3" in third


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_hooks_stay_outside_and_each_blocks_gradients_come_before_the_next_blocks_backward():
    """DDP sends a bucket when its last gradient is there; ZeRO's hooks gather, release and reduce."""
    model = language_model(num_layers=3)
    events = []
    for index, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda *_, i=index: events.append((i, torch.compiler.is_compiling())))
        block.register_full_backward_pre_hook(lambda *_, i=index: events.append(f"backward {i}"))
        for p in block.parameters():
            p.register_post_accumulate_grad_hook(lambda _, i=index: events.append(f"gradient {i}"))
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    compile_blocks(model, aot_autograd(fw_compiler=keep))
    for _ in range(2):
        events.clear()
        gradients(model, batch())
        assert len(graphs) == 2, "forward and backward"
        each = [[f"backward {i}", *[f"gradient {i}"] * 9] for i in (2, 1, 0)]
        assert events == [(0, False), (1, False), (2, False), *each[0], *each[1], *each[2]]


def refuses(graph, inputs):
    raise RuntimeError("no C++ compiler\nof several lines")


@pytest.mark.daily("refuses")
@pytest.mark.parametrize("backend", [refuses, aot_autograd(fw_compiler=lambda g, _: g, bw_compiler=refuses)])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_what_cannot_be_compiled_runs_as_it_is_written_and_that_is_said_once(caplog, backend):
    model = language_model(num_layers=2)
    expected = gradients(model, batch())
    compile_blocks(model, backend)
    for _ in range(2):
        torch.testing.assert_close(gradients(model, batch()), expected, rtol=0, atol=0)
    (line,) = lines(caplog)
    assert line == (
        "compile: the 2 LlamaDecoderLayer blocks run uncompiled: RuntimeError: no C++ compiler of "
        "several lines"
    )


class Halves(nn.Module):
    """torch takes it in two pieces."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.other(between(self.one(x)))


@torch.compiler.disable
def between(x):
    return x.relu()


def test_blocks_are_alike_and_outermost():
    inner = nn.ModuleList([Halves(), Halves()])
    odd = nn.TransformerEncoderLayer(8, 2)
    model = nn.ModuleDict(
        {
            "encoder": nn.ModuleList([nn.TransformerEncoderLayer(4, 2) for _ in range(3)] + [odd]),
            "plain": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
            "shared": nn.ModuleList([Halves()] * 2),
            "nested": nn.ModuleList([nn.ModuleDict({"inner": inner})]),
        }
    )
    found = list(find_repeated_blocks(model))
    assert found == [list(model["encoder"])[:3], list(inner)]
    mixtral = {"architecture": "mixtral", "extra": {"num_local_experts": 2, "num_experts_per_tok": 1}}
    experts = language_model(num_layers=2, **mixtral)
    compile_blocks(experts, refuses)
    gradients(experts, batch())


def test_the_first_call_is_looked_at_without_compiling_anything_twice():
    model = language_model(num_layers=2)
    graphs = compiled(model)
    call = ModelCall()
    for _ in range(2):
        call(model, batch())
        assert len(graphs) == 1
    wrong = batch() | {"input_ids": torch.full((2, 12), 50)}
    with pytest.raises(
        DataError, match=r"'input_ids' has 50, but model\.embed_tokens, Embedding.* has 50 rows"
    ):
        ModelCall()(model, wrong)


def test_a_loss_in_the_first_call_of_a_compiled_model_is_looked_at():
    class OwnLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Halves(), Halves())

        def forward(self, x, labels):
            return nn.functional.cross_entropy(self.blocks(x), labels)

    model = OwnLoss()
    compiled(model)
    call = ModelCall(with_targets=True)
    with pytest.raises(DataError, match="'labels' has 7, but the scores of a cross entropy"):
        call(model, {"x": torch.ones(2, 4), "labels": torch.full((2,), 7)})
