"""The loss as compiled kernels, of logits and without them: the numbers of blocks, a graph for any batch."""

from __future__ import annotations

import json
from functools import partial
from unittest.mock import patch

import pytest
import torch
from parity.measure import ALONE
from support.tiny import TOLERANCES, recipe, resolve, token_bundle

from pipeline import objectives
from pipeline.data.batches import IGNORE_INDEX
from pipeline.models.blocks import compile_blocks
from pipeline.objectives.linear_cross_entropy import linear_cross_entropy_sum, linear_token_losses
from pipeline.objectives.logits_cross_entropy import FusedKernels, cross_entropy_sum
from pipeline.planner import model as chunks
from pipeline.training import assemble as building
from pipeline.training.assemble import assemble
from pipeline.training.loop import TrainLoop

WORDS = 1000

pytestmark = pytest.mark.slow


class Graphs(list):
    """A backend: keeps what it is given, and runs it as it is."""

    def __call__(self, graph, inputs):
        self.append(graph)
        return graph.forward


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def make(tokens, dtype, spread=3.0):
    generator = torch.Generator().manual_seed(tokens)
    logits = (spread * torch.randn(tokens, WORDS, generator=generator)).to(dtype)
    labels = torch.randint(0, WORDS, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.2] = IGNORE_INDEX
    return logits, labels


def both(logits, labels, kernels=None, scale=0.37):
    leaf = logits.clone().requires_grad_()
    total = cross_entropy_sum(leaf, labels, kernels)
    (total * scale).backward()
    return total.detach(), leaf.grad


def compare(logits, labels, kernels):
    total, gradient = both(logits, labels, kernels)
    expected, wanted = both(logits, labels)
    assert (total.dtype, total.shape) == (torch.float32, ())
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-5)
    # In half precision what lies between two numbers may be rounded to the other one.
    rounding = 2e-6 if logits.dtype == torch.float32 else 2 * torch.finfo(logits.dtype).eps
    torch.testing.assert_close(gradient, wanted, rtol=rounding, atol=1e-7)
    assert not gradient[labels == IGNORE_INDEX].any()


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("pipeline")]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_tokens_has_one_graph_and_the_blocks_numbers(dtype):
    graphs = Graphs()
    kernels = FusedKernels(graphs)
    for tokens, spread in ((600, 3.0), (261, 100.0), (2, 3.0), (600, 3.0)):
        compare(*make(tokens, dtype, spread), kernels)
    with torch.no_grad():
        logits, labels = make(77, dtype)
        total = cross_entropy_sum(logits, labels, kernels)
        torch.testing.assert_close(total, cross_entropy_sum(logits, labels))
    assert len(graphs) == 2, "the loss, and its gradient"


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_token_or_none(tokens):
    compare(*make(tokens, torch.float32), FusedKernels(Graphs()))


def of_linear(dtype, kernels, tokens=130, bias=False, of_tokens=False):
    """Return the loss of a linear layer's outputs, in chunks of 50 tokens, and its gradients."""
    generator = torch.Generator().manual_seed(tokens)
    drawn = [torch.randn(n, 32, generator=generator, dtype=torch.float64) for n in (tokens, WORDS)]
    leaves = [each.to(dtype).requires_grad_() for each in drawn]
    offset = torch.linspace(-1, 1, WORDS).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(0, WORDS, (tokens,), generator=generator)
    labels[::3] = IGNORE_INDEX
    loss = linear_token_losses if of_tokens else linear_cross_entropy_sum
    with patch.object(chunks, "CPU_LOGITS_CHUNK", (1, 50)):
        found = loss(*leaves, offset, labels, dtype, None, kernels)
        (found * torch.linspace(0.5, 1, tokens) if of_tokens else found * 0.37).sum().backward()
    return [found.detach(), *(leaf.grad for leaf in (*leaves, offset) if leaf is not None)]


@pytest.mark.daily("torch.float32-False-sum", "torch.float64-True-tokens", "torch.bfloat16-True-sum")
@pytest.mark.parametrize("of_tokens", [False, True], ids=["sum", "tokens"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_a_linear_layers_loss_has_the_blocks_numbers(dtype, bias, of_tokens):
    graphs = Graphs()
    kernels = FusedKernels(graphs)
    for tokens in (130, 200, 77):
        found = of_linear(dtype, kernels, tokens, bias, of_tokens)
        expected = of_linear(dtype, None, tokens, bias, of_tokens)
        rounding = {torch.float64: 1e-12, torch.float32: 5e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= rounding * other.abs().max()
    assert len(graphs) == 2, "the loss, and its gradient, for any chunk"


@pytest.mark.parametrize("fails_at", ["loss", "gradient"])
def test_a_linear_layers_loss_that_cannot_be_compiled_is_computed_in_blocks(caplog, fails_at):
    backend = refuses if fails_at == "loss" else refuses_the_second()
    kernels = FusedKernels(backend)
    for one, other in zip(of_linear(torch.float32, kernels), of_linear(torch.float32, None), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not kernels.is_compiled
    assert lines(caplog) == [
        "compile: the loss of logits runs uncompiled: RuntimeError: no C++ compiler of several lines"
    ]


def refuses(graph, inputs):
    raise RuntimeError("no C++ compiler\nof several lines")


def refuses_the_second():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward if len(graphs) == 1 else refuses(graph, inputs)

    return backend


def test_a_run_that_compiles_has_them_where_a_model_changes_its_logits(tmp_path, monkeypatch):
    """Cohere scales them. Evaluation has another number of tokens, and a smaller last batch."""
    model = recipe()["model"] | {"architecture": "cohere", "extra": {"logit_scale": 0.5}}

    def losses(compiled):
        changes = {"model": model, "max_steps": 2, "log": {"every": 1}, "eval": {"every": 2}}
        config, resolved = resolve(recipe(**changes, engine={"compile": compiled}), None, 1)
        folder = tmp_path / str(compiled)
        run = assemble(config, resolved, ALONE, token_bundle(), folder)
        with run.trackers, TrainLoop(run) as loop:
            while loop.step() is not None:
                pass
        run.loader.close()
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row[key] for row in rows for key in ("train/loss", "eval/loss") if key in row]

    graphs = Graphs()
    monkeypatch.setattr(objectives, "FusedKernels", partial(FusedKernels, graphs))
    monkeypatch.setattr(building, "compile_blocks", partial(compile_blocks, backend=Graphs()))
    expected = losses(False)
    assert len(expected) == 4
    assert not graphs
    found = losses(True)
    assert len(graphs) == 2
    assert found == pytest.approx(expected, rel=TOLERANCES["fp32"][0])
