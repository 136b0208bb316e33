"""Loss sums and counts against the means of transformers and torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_outputs import CausalLMOutput

from pipeline.config.contradictions import find_contradictions
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.objectives import (
    CausalLM,
    Classification,
    CustomLoss,
    ModelCall,
    ModelLoss,
    build_objective,
)
from pipeline.objectives.interface import list_extra_sums
from pipeline.objectives.model_call import get_logits, get_loss

VOCABULARY = 61


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture
def tokens():
    """(input_ids, labels) of shape (3, 10); half of the labels are left out."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, VOCABULARY, (3, 10), generator=generator)
    labels = input_ids.clone()
    labels[torch.rand(3, 10, generator=generator) < 0.5] = -100
    return input_ids, labels


def assert_mean(loss, expected):
    torch.testing.assert_close(loss.loss_sum / loss.count, expected, rtol=1e-5, atol=1e-6)


# --- CausalLM -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_causal_lm_has_transformers_loss_and_gradient(model, tokens, name):
    input_ids, labels = tokens
    weight = model.lm_head.weight
    batch = {"input_ids": input_ids, name: labels}
    loss = CausalLM()(model, batch)
    expected = model(**{"labels": labels} | batch).loss
    assert_mean(loss, expected)
    counted = labels[:, 1:] if name == "labels" else labels
    assert loss.count == CausalLM().count(batch) == (counted != -100).sum()
    (mine,) = torch.autograd.grad(loss.loss_sum / loss.count, weight)
    (theirs,) = torch.autograd.grad(expected, weight)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def test_a_batch_without_a_valid_label_counts_nothing_and_is_told_once(model, tokens, caplog):
    batch = {"input_ids": tokens[0], "labels": torch.full_like(tokens[0], -100)}
    loss = CausalLM()(model, batch)
    assert (loss.loss_sum.item(), loss.count.item()) == (0.0, 0)
    for objective in (CausalLM(), Classification(), Classification([1.0, 2.0])):
        assert [int(objective.count(batch)) for _ in range(2)] == [0, 0]
    assert caplog.text.count("no label of the first micro-batch counts: all of 'labels' are -100") == 3


# --- Classification -----------------------------------------------------------------------------------


class Logits(nn.Module):
    """Returns the logits it was made with."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, inputs):
        return self.logits


@pytest.fixture
def classes():
    """(model, batch) with 5 classes and 40 samples."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 5, (40,), generator=generator)
    logits = torch.randn(40, 5, generator=generator) + F.one_hot(labels, 5)
    return Logits(logits), {"inputs": torch.zeros(40, 1), "labels": labels}


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("class_weights", [None, [1.0, 2.0, 0.5, 0.0, 3.0]])
@pytest.mark.parametrize("ignored", [0, 7])
def test_classification_is_torchs_loss(classes, class_weights, label_smoothing, ignored):
    model, batch = classes
    batch["labels"][:ignored] = -100
    weight = None if class_weights is None else torch.tensor(class_weights)
    expected = nn.CrossEntropyLoss(weight, label_smoothing=label_smoothing)(model.logits, batch["labels"])
    objective = Classification(class_weights, label_smoothing)
    loss = objective(model, batch)
    assert_mean(loss, expected)
    torch.testing.assert_close(objective.count(batch), loss.count)


def test_classification_counts_the_correct_ones(classes):
    model, batch = classes
    loss = Classification([1.0, 2.0, 3.0, 4.0, 5.0])(model, batch)
    correct = (model.logits.argmax(1) == batch["labels"]).sum()
    assert 0 < correct < 40
    assert loss.extras == {"correct": correct, "samples": torch.tensor(40)}
    assert set(loss.extras) == set(list_extra_sums(Classification.means))


def test_class_weights_are_exact_in_half_precision(classes):
    model, batch = classes
    weights = [1.0, 1.001, 0.999, 1.0, 1.0]
    loss = Classification(weights)(Logits(model.logits.detach().bfloat16()), batch)
    assert loss.loss_sum.dtype == loss.count.dtype == torch.float32
    assert loss.count == torch.tensor(weights)[batch["labels"]].sum()


def test_class_weights_of_another_number_are_told(classes):
    model, batch = classes
    for number in (4, 6):
        with pytest.raises(
            ConfigError,
            match=rf"^objective\.class_weights has {number} weights, but the model has 5 classes; write one",
        ):
            Classification([1.0] * number)(model, batch)
    with pytest.raises(
        ConfigError,
        match=r"^objective\.class_weights has 4 weights, but a label is 4; write one weight for each class$",
    ):
        Classification([1.0] * 4).count(batch)


# --- Custom -------------------------------------------------------------------------------------------


def squares(outputs, batch):
    return ((outputs - batch["targets"]) ** 2).sum()


def squares_of_some(outputs, batch):
    return (batch["weight"] * (outputs - batch["targets"]) ** 2).sum()


squares_of_some.count = lambda batch: batch["weight"].sum()


def mean_of_squares(outputs, batch):
    return (outputs - batch["targets"]) ** 2


def test_a_custom_objective_counts_samples():
    batch = {"inputs": torch.ones(6, 1), "targets": torch.zeros(6, 1)}
    loss = CustomLoss(squares)(lambda inputs: 2 * inputs, batch)
    assert (loss.loss_sum.item(), loss.count.item()) == (24.0, 6)
    assert CustomLoss(squares).count(batch) == 6


def test_a_custom_objective_may_count_for_itself():
    weight = torch.tensor([[1.0], [0.0], [0.5]])
    batch = {"inputs": torch.ones(3, 1), "targets": torch.zeros(3, 1), "weight": weight}
    objective = CustomLoss(squares_of_some)
    loss = objective(lambda inputs, weight: 2 * inputs, batch)
    assert (loss.loss_sum.item(), loss.count.item()) == (6.0, 1.5)
    assert objective.count(batch) == 1.5


@pytest.mark.parametrize("function", [mean_of_squares, lambda outputs, batch: 3.0])
def test_a_custom_objective_returns_one_sum(function):
    batch = {"inputs": torch.ones(6, 1), "targets": torch.zeros(6, 1)}
    with pytest.raises(ConfigError, match="expected one 0-dim tensor: the sum of the loss over the samples"):
        CustomLoss(function)(lambda inputs: inputs, batch)


def with_metrics(outputs, batch):
    return outputs.square().sum(), batch["metrics"]


with_metrics.metrics = ["accuracy", "top@5"]


@pytest.mark.parametrize("make", [tuple, list, lambda pair: tuple(map(torch.tensor, pair))])
def test_a_custom_objective_reports_sums_and_counts_of_metrics(make):
    pairs = {"accuracy": make((3, 4)), "top@5": make((0.5, 8))}
    objective = CustomLoss(with_metrics, call=ModelCall(["inputs"]))
    loss = objective(lambda inputs: inputs, {"inputs": torch.ones(6, 1), "metrics": pairs})
    assert set(list_extra_sums(objective.means)) == set(loss.extras)
    for name, expected in (("accuracy", (3, 4)), ("top@5", (0.5, 8))):
        assert tuple(loss.extras[key].item() for key in objective.means[name]) == expected
    assert all(each.dtype == torch.float64 and each.dim() == 0 for each in loss.extras.values())


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({}, r"returned the metrics \[\], but with_metrics.metrics names \['accuracy', 'top@5'\]"),
        ({"accuracy": (1, 2)}, r"write with_metrics.metrics = \['accuracy'\] below the function"),
        (torch.ones(2), r"returned the metrics a tensor of shape \(2,\)"),
        ({"accuracy": 0.5, "top@5": (1, 2)}, r"a float as metric 'accuracy'; expected \(sum, count\)"),
        ({"accuracy": (torch.ones(2), 2), "top@5": (1, 2)}, r"metric 'accuracy'; expected \(sum, count\)"),
        ({"accuracy": (1, 2), "top@5": (1, 2, 3)}, r"metric 'top@5'; expected \(sum, count\)"),
    ],
)
def test_metrics_of_another_form_are_one_line(metrics, words):
    with pytest.raises(ConfigError, match=words):
        CustomLoss(with_metrics, call=ModelCall(["inputs"]))(
            lambda inputs: inputs, {"inputs": torch.ones(6, 1), "metrics": metrics}
        )


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["loss"], "metrics has 'loss', a built-in metric"),
        (["perplexity"], "metrics has 'perplexity', a built-in metric"),
        (["a/b"], "metrics has 'a/b'; name a metric by letters"),
        (3, "metrics has 3; name a metric by letters"),
    ],
)
def test_names_that_no_metric_can_have_are_one_line(names, words):
    def named(outputs, batch):
        return outputs.sum()

    named.metrics = names
    with pytest.raises(ConfigError, match=words):
        CustomLoss(named)


def test_one_name_of_a_metric_may_be_a_text():
    def named(outputs, batch):
        return outputs.sum()

    named.metrics = "accuracy"
    assert list(CustomLoss(named).means) == ["accuracy"]


def cross_entropy_sum(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, -2), batch["targets"].flatten(), reduction="sum")


cross_entropy_sum.count = lambda batch: (batch["targets"] != -100).sum()


def cross_entropy_mean(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, -2), batch["targets"].flatten())


def of_global_batch(objective, batch, size):
    """Loss and gradient of a global batch in micro-batches of `size` samples."""
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    losses = []
    for start in range(0, len(batch["targets"]), size):
        micro_batch = {key: value[start : start + size] for key, value in batch.items()}
        losses.append(objective(model, micro_batch))
        assert losses[-1].count == objective.count(micro_batch)
    loss_sum = sum(loss.loss_sum for loss in losses)
    count = sum(loss.count for loss in losses)
    (loss_sum / count).backward()
    return (loss_sum / count).detach(), model.weight.grad


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_mean_is_weighted_by_its_targets(size):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(5, (6, 4), generator=generator)
    targets[0] = targets[1, 1:] = targets[3, 3] = -100  # a micro-batch of one sample has no target at all
    batch = {"inputs": torch.randn(6, 4, 3, generator=generator), "targets": targets}
    expected = of_global_batch(CustomLoss(cross_entropy_sum), batch, 6)
    found = of_global_batch(CustomLoss(cross_entropy_mean, reduction="mean"), batch, size)
    torch.testing.assert_close(found, expected)


def test_a_mean_over_something_else_than_the_targets_says_what_to_write():
    def masked(outputs, batch):
        return (outputs - batch["targets"])[batch["mask"]].square().mean()

    def weighted(outputs, batch):
        return F.cross_entropy(outputs, batch["targets"].long().flatten(), torch.arange(3.0))

    batch = {"inputs": torch.ones(4, 3), "targets": torch.ones(4, 1), "mask": torch.arange(4) > 0}
    for function in (masked, weighted):
        with pytest.raises(ConfigError, match=r"not over the micro-batch's 4 targets .* attribute `count`"):
            CustomLoss(function, reduction="mean")(nn.Linear(3, 3 if function is weighted else 1), batch)
    masked.count = lambda batch: batch["mask"].sum()
    assert CustomLoss(masked, reduction="mean")(nn.Linear(3, 1), batch).count == 3


def test_probabilities_in_a_cross_entropy_of_ones_own_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1))
    batch = {"inputs": torch.randn(4, 3), "targets": torch.tensor([0, 1, 2, 0])}
    for objective in (CustomLoss(cross_entropy_sum), Classification()):
        with pytest.raises(ModelError, match=r"outputs are probabilities .* leave the model's softmax out"):
            objective(model, batch)


class Recomputed(nn.Module):
    """Its loss is inside what is computed again in the backward, where nothing is looked at."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, inputs, targets):
        def loss(inputs):
            return F.cross_entropy(self.linear(inputs), targets)

        return checkpoint(loss, inputs, use_reentrant=False)


def test_a_look_at_a_loss_leaves_nothing_to_recompute():
    model = Recomputed()
    result = ModelLoss()(model, {"inputs": torch.randn(4, 3), "targets": torch.tensor([0, 1, 2, 3])})
    result.loss_sum.backward()
    assert model.linear.weight.grad.abs().sum() > 0


def test_a_cross_entropy_of_no_sample_is_one():
    def of_none(outputs, batch):
        return outputs.sum() + F.cross_entropy(outputs[:0], batch["targets"][:0], reduction="sum")

    result = CustomLoss(of_none)(
        nn.Linear(3, 4), {"inputs": torch.randn(2, 3), "targets": torch.tensor([0, 1])}
    )
    assert result.loss_sum.isfinite()


# --- what goes into a model and comes out of it ---------------------------------------------------------


def test_logits_are_found_in_what_models_return():
    logits = torch.ones(2)
    for output in (logits, CausalLMOutput(logits=logits), {"logits": logits}, (logits, None), [logits]):
        assert get_logits(output) is logits
    for output in (None, {"hidden": logits}, (), (None, logits), CausalLMOutput()):
        with pytest.raises(
            ModelError, match=r"expected logits: a tensor, \.logits, \['logits'\], or the first"
        ):
            get_logits(output)


def test_a_loss_where_logits_are_wanted_says_what_to_write():
    loss = torch.tensor(2.0)
    for output in (loss, {"loss": loss}, CausalLMOutput(loss=loss), (loss, torch.ones(2)), [loss]):
        with pytest.raises(ModelError, match=r"returned its own loss.* write objective.kind: model_loss"):
            get_logits(output)


def test_a_models_own_loss_is_found_in_what_it_returns():
    loss = torch.tensor(2.0)
    outputs = (loss, {"loss": loss}, CausalLMOutput(loss=loss, logits=torch.ones(2)), (loss, None), [loss])
    for output in outputs:
        assert get_loss(output) is loss
    for output in (
        None,
        {"logits": loss},
        (),
        (None, loss),
        CausalLMOutput(logits=torch.ones(2)),
        torch.ones(2, 2),
    ):
        with pytest.raises(ModelError, match=r"objective.kind is model_loss, but the model returned "):
            get_loss(output)


def test_a_models_own_loss_is_a_mean_over_the_samples():
    batch = {"inputs": torch.ones(6, 1), "labels": torch.zeros(6)}
    loss = ModelLoss()(lambda images, labels: (images[:, 0] - labels).mean(), batch)
    assert (loss.loss_sum.item(), loss.count.item()) == (6.0, 6)
    assert ModelLoss().count(batch) == 6


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 8])
def test_the_means_that_data_parallel_gathers_are_weighted_by_their_samples(num_gpus):
    """nn.DataParallel scatters with torch.chunk and gathers 0-dim results into one dimension."""

    def gathered(inputs, labels):
        parts = inputs.chunk(num_gpus)
        return torch.stack([part.mean() for part in parts])

    for num_samples in range(1, 14):
        x = torch.randn(num_samples, generator=torch.Generator().manual_seed(num_samples))
        loss = ModelLoss()(gathered, {"inputs": x, "labels": torch.zeros(num_samples)})
        torch.testing.assert_close(loss.loss_sum, x.sum())


# --- the recipe's words -------------------------------------------------------------------------------


def config(model, **objective):
    return RunConfig.model_validate(
        {"max_steps": 1, "model": model, "data": {"kind": "digits"}, "objective": objective}
    )


LANGUAGE_MODEL = {"kind": "causal_lm", "architecture": "llama"}
OWN = {"kind": "my.model:build"}


@pytest.mark.parametrize(
    ("model", "kind", "expected"),
    [
        (LANGUAGE_MODEL, "auto", CausalLM),
        ({"kind": "cnn"}, "auto", Classification),
        (OWN, "causal_lm", CausalLM),
        (OWN, "classification", Classification),
        (OWN, "model_loss", ModelLoss),
        (OWN, "test_objectives:squares", CustomLoss),
    ],
)
def test_the_objective_follows_the_recipe(model, kind, expected):
    assert type(build_objective(config(model, kind=kind))) is expected


def test_auto_with_a_model_of_ones_own_is_refused_before_the_start():
    (keys, message), *_ = find_contradictions(config(OWN))
    assert keys[0] == "objective.kind"
    assert message.startswith("objective.kind is auto, but a model of your own has no default objective; ")
