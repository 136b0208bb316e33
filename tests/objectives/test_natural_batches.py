"""Batches of users' data sets: which parts go to the model and to the loss, and how a misfit is reported."""

from __future__ import annotations

import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from datasets import Dataset as HubDataset
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

from pipeline.data.batches import (
    BatchOrigin,
    LoadedBatch,
    as_batch,
    collate_items,
    count_samples,
    get_host_batch,
    map_tensors,
)
from pipeline.data.loader import TrainLoader
from pipeline.data.sampler import MixtureOrder, SourceShare
from pipeline.errors import ConfigError, DataError, ModelError
from pipeline.objectives import CausalLM, Classification, CustomLoss, ModelCall, ModelLoss

X = torch.arange(6.0).view(3, 2)
Y = torch.tensor([0, 1, 2])
W = torch.tensor([0.5, 1.0, 2.0])
Sample = namedtuple("Sample", ["image", "width"])


def rows(*columns):
    return list(zip(*columns, strict=True))


def collated(samples):
    return as_batch(collate_items(list(samples)), len(samples))


def loaded(dataset, num_workers=0, collate=collate_items, size=2):
    loader = TrainLoader(
        dataset,
        collate,
        MixtureOrder([SourceShare("train", len(dataset))], 0),
        torch.device("cpu"),
        micro_batch_size=size,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_world_size=1,
        seed=0,
        num_workers=num_workers,
    )
    try:
        return loader.next_group()[0]
    finally:
        loader.close()


# --- samples and batches ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "entries"),
    [
        (rows(X, Y), {"inputs": X, "targets": Y}),
        ([list(row) for row in rows(X, Y)], {"inputs": X, "targets": Y}),
        (rows(X, Y, W), {"inputs": X, "targets": Y, "field_2": W}),
        (rows(X.numpy(), Y.tolist()), {"inputs": X, "targets": Y}),
        (rows(X.tolist(), Y.numpy()), {"inputs": X, "targets": Y}),
        (list(X), {"inputs": X}),
        (list(X.numpy()), {"inputs": X}),
        (([0.0, 1.0], [2.0, 3.0]), {"inputs": torch.tensor([0.0, 2.0]), "targets": torch.tensor([1.0, 3.0])}),
        (rows(rows(X, W), Y), {"inputs": (X, W), "targets": Y}),
        (rows(X, rows(Y, W)), {"inputs": X, "targets": (Y, W)}),
        ([({"a": x, "b": w}, y) for x, w, y in rows(X, W, Y)], {"a": X, "b": W, "targets": Y}),
        ([Sample(x, y) for x, y in rows(X, Y)], {"image": X, "width": Y}),
        ([{"x": x, "name": "a"} for x in X], {"x": X, "name": ["a"] * 3}),
        ([BatchEncoding({"x": x}) for x in X], {"x": X}),
        ([{"ids": [1, 2], "y": np.int64(3)}] * 2, {"ids": torch.tensor([[1, 2]] * 2), "y": Y[:2] * 0 + 3}),
    ],
)  # fmt: skip
def test_samples_of_every_form_become_one_form(samples, entries):
    batch = collated(list(samples))
    assert list(batch) == list(entries)
    assert count_samples(batch) == len(samples)
    for key, expected in entries.items():
        if isinstance(expected, list):
            assert batch[key] == expected
        else:
            torch.testing.assert_close(batch[key], expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_hugging_face_dataset_is_a_data_set(num_workers):
    dataset = HubDataset.from_dict({"x": [[1.0, 2.0]] * 4, "label": [0, 1, 0, 1], "file": ["a"] * 4})
    batch = loaded(dataset, num_workers)
    assert (batch["x"].shape, batch["label"].dtype, batch["file"]) == ((2, 2), torch.int64, ["a", "a"])
    assert batch.num_samples == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_cannot_be_stacked_are_told_by_their_shapes(num_workers):
    samples = [(torch.zeros(1, 8, width), 0) for width in (5, 7)]
    with pytest.raises(DataError, match=r"^inputs of one batch cannot be stacked: \(1, 8, .\) and ") as told:
        loaded(samples, num_workers)
    assert "collate_fn" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([None, None], "gave None for a sample"),
        ([(X[0], 1), (X[0], None)], "targets of one batch differ in type: int, NoneType"),
        ([(X[0], 1), X[0]], "samples of one batch differ in type: tuple, Tensor"),
        ([{"x": X[0], "y": 1}, {"x": X[0]}], "some lack y"),
        ([{"ids": [1, 2]}, {"ids": [1]}], r"ids of one batch cannot be stacked: \(2,\) and \(1,\)"),
        ([(X[0], 1), (X[0], 1, 2)], "samples of one batch cannot be stacked: 2 entries and 3 entries"),
        (["text", "texts"], "gave a str for a sample"),
        ([{"text": "a"}, {"text": "b"}], "without a sample: text .list of str"),
    ],
)
def test_samples_that_make_no_batch(samples, message):
    with pytest.raises(DataError, match=message):
        collated(samples)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "the batch is a NoneType; expected a dict of tensors, a tuple"),
        ([], "the batch is an empty list"),
        ({}, "without a sample: nothing"),
        ((torch.zeros(0, 3), torch.zeros(0)), r"without a sample: inputs \(0, 3\)"),
        ({1: X}, "an entry called 1; names of entries must be strings"),
        (pack_sequence([X[0]]), "PackedSequence, which cannot be divided.* pad_sequence"),
        ({"x": pack_sequence([X[0]])}, "PackedSequence"),
    ],
)
def test_what_a_collate_may_not_return(batch, message):
    with pytest.raises(DataError, match=message):
        as_batch(batch, 3)


def test_samples_are_counted_whatever_stands_first():
    time_first = as_batch((torch.zeros(7, 3, 4), torch.zeros(3)), 3)
    assert count_samples(time_first) == 3
    assert count_samples(as_batch((torch.zeros(2, 4), torch.zeros(2)), 3)) == 2  # a collate left one out
    assert count_samples(map_tensors(time_first, lambda _, tensor: tensor * 1)) == 3
    assert pickle.loads(pickle.dumps(time_first)).num_samples == 3


def test_an_entry_that_is_not_there_is_told_with_those_that_are():
    batch = LoadedBatch(inputs=X, targets=Y)
    with pytest.raises(
        DataError, match=r"no entry 'target'; it has: inputs \(3, 2\) float32, targets \(3,\)"
    ):
        batch["target"]
    with pytest.raises(KeyError):
        batch["target"]
    assert batch.get("target") is None


# --- what goes to the model ---------------------------------------------------------------------------


class Recorder(nn.Module):
    """Its forward has the signature of a function, and gives back what it is called with."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def image_and_width(image, width):
    return {"image": image, "width": width}


def optional_lengths(x, lengths=None):
    return {"x": x, "lengths": lengths}


def position_only(x, /, lengths=None):
    return {"x": x, "lengths": lengths}


def any_names(**named):
    return named


def first_and_any(x, **named):
    return {"x": x, **named}


def reversed_order(lengths, x):
    return {"x": x, "lengths": lengths}


def pair(a, b):
    return {"a": a, "b": b}


def one(ab):
    return {"ab": ab}


def own_loss(x, labels=None):
    return {"x": x, "labels": labels}


@pytest.mark.parametrize(
    ("forward", "batch", "expected"),
    [
        (image_and_width, "image width labels name", {"image": "image", "width": "width"}),
        (optional_lengths, "inputs targets", {"x": "inputs", "lengths": None}),
        (optional_lengths, "inputs lengths targets", {"x": "inputs", "lengths": "lengths"}),
        (optional_lengths, "x weight label", {"x": "x", "lengths": None}),
        (optional_lengths, "image label name", {"x": "image", "lengths": None}),
        (position_only, "inputs lengths", {"x": "inputs", "lengths": "lengths"}),
        (any_names, "ids mask labels name", {"ids": "ids", "mask": "mask"}),
        (first_and_any, "inputs mask labels", {"x": "inputs", "mask": "mask"}),
        (reversed_order, "inputs lengths", {"x": "inputs", "lengths": "lengths"}),
        (pair, "pair targets", {"a": "inputs.0", "b": "inputs.1"}),
        (one, "pair targets", {"ab": "inputs"}),
    ],
)
def test_the_forwards_signature_says_what_goes_in(forward, batch, expected):
    entries = {key: torch.zeros(2, 1) for key in batch.split()}
    if "name" in entries:
        entries["name"] = ["a", "b"]
    if "pair" in entries:
        entries = {"inputs": (torch.zeros(2), torch.ones(2)), "targets": entries["targets"]}
    known = {id(value): key for key, value in entries.items()}
    for place, value in enumerate(entries["inputs"] if isinstance(entries.get("inputs"), tuple) else ()):
        known[id(value)] = f"inputs.{place}"
    call = ModelCall()
    model = Recorder(forward)
    for wrapped in (model, DataParallel(model), DataParallel(DataParallel(model))):
        given = call(wrapped, entries)
        assert {name: known.get(id(value)) for name, value in given.items()} == expected
    used = {str(name).partition(".")[0] for name in expected.values() if name}
    assert call.entries(model, entries) == used


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (["image", "size"], {"x": "image", "lengths": "size"}),
        (["size", "image"], {"x": "size", "lengths": "image"}),
        (["lengths", "image"], {"x": "image", "lengths": "lengths"}),
        (["image", "labels"], {"x": "image", "lengths": "labels"}),
        (["image"], {"x": "image", "lengths": None}),
    ],
)
def test_the_recipes_list_says_what_goes_in(stated, expected):
    entries = {key: torch.zeros(2, 1) for key in ("labels", "size", "lengths", "image")}
    known = {id(value): key for key, value in entries.items()}
    given = ModelCall(stated)(Recorder(optional_lengths), entries)
    assert {name: known.get(id(value)) for name, value in given.items()} == expected


@pytest.mark.parametrize(
    ("forward", "batch", "expected"),
    [
        (own_loss, {"inputs": X, "targets": Y}, {"x": X, "labels": Y}),
        (own_loss, {"inputs": X, "labels": Y}, {"x": X, "labels": Y}),
        (own_loss, {"image": X, "label": Y}, {"x": X, "labels": Y}),
        (pair, {"inputs": X, "targets": Y}, {"a": X, "b": Y}),
        (pair, {"image": X, "label": Y}, {"a": X, "b": Y}),
        (one, {"inputs": X, "targets": Y}, {"ab": X}),
        (one, {"inputs": X}, {"ab": X}),
    ],
)
def test_a_model_that_computes_its_loss_gets_the_targets_too(forward, batch, expected):
    given = ModelCall(with_targets=True)(Recorder(forward), batch)
    assert given.keys() == expected.keys()
    assert all(given[key] is expected[key] for key in expected)


def test_transformers_models_get_what_they_have_arguments_for():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=9, num_labels=3, **sizes))
    ids = torch.ones(3, 4, dtype=torch.long)
    batch = as_batch(({"input_ids": ids, "attention_mask": ids, "idx": Y}, Y), 3)
    assert ModelCall().entries(model, batch) >= {"input_ids", "attention_mask"}
    assert "targets" not in ModelCall().entries(model, batch)
    by_itself = ModelLoss()(model.eval(), batch)
    outside = Classification()(model, batch)
    torch.testing.assert_close(by_itself.loss_sum, outside.loss_sum)
    batch["labels"] = batch.pop("targets") + 3
    with pytest.raises(DataError, match=r"'labels' has 3, but the scores of .* 3 classes: expected 0 to 2"):
        ModelLoss()(model, batch)


def test_arguments_that_do_not_fit_are_told_with_both_sides():
    with pytest.raises(ModelError) as told:
        ModelCall()(Recorder(image_and_width), {"pixels": X, "size": Y, "labels": Y})
    for part in ("Recorder.forward(image, width)", "pixels (3, 2) float32, size (3,) int64", "'image'"):
        assert part in str(told.value)
    assert "model.inputs=[...]" in str(told.value)
    for wants, message in (("labels", r"needs labels, .* objective\.kind: model_loss"), ("mask", "'mask'")):
        with pytest.raises(ModelError, match=message):
            ModelCall()(Recorder(eval(f"lambda inputs, {wants}: inputs")), {"inputs": X, "labels": Y})
    with pytest.raises(
        ModelError,
        match=r"^model\.inputs names 'image', but the batch has x \(3, 2\) float32; name entries of the "
        r"batch$",
    ):
        ModelCall(["image"])(nn.Linear(2, 1), {"x": X})


def test_a_list_of_no_tensors_goes_to_the_model_where_the_recipe_says_so():
    batch = {"texts": ["a", "b", "c"], "image": X}
    model = Recorder(lambda texts, image: {"texts": texts, "image": image})
    with pytest.raises(
        ModelError, match=r"missing .*'texts'; .* go to a model by themselves.*model\.inputs="
    ):
        ModelCall()(model, batch)
    assert ModelCall(["texts", "image"])(model, batch) == batch
    assert ModelCall().entries(Recorder(optional_lengths), {"x": X, "inputs": ["a", "b", "c"]}) == {"x"}


# --- what does not fit --------------------------------------------------------------------------------


LINEAR = nn.Linear(2, 3)


def test_labels_are_looked_at_on_the_host_whatever_is_on_the_device():
    wrong = torch.tensor([0, 1, 7])
    batch = as_batch((X, wrong), 3)
    on_device = map_tensors(batch, lambda key, tensor: torch.zeros_like(tensor))
    assert get_host_batch(on_device) is batch
    with pytest.raises(DataError, match="'targets' has 7, but the model has 3 outputs"):
        Classification()(LINEAR, on_device)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1, 3]), "'labels' has 3, but the model has 3 outputs: expected 0 to 2"),
        (torch.tensor([0, -1, -100]), "'labels' has -1, but the model has 3 outputs"),
        (torch.tensor([0.0, 1.0, 2.0]), r"class numbers .integers from 0. .* labels \(3,\) float32"),
        (["cat", "dog", "cat"], r"class numbers .* labels .list of str"),
        (torch.zeros(3, 1, dtype=torch.long), r"returned logits \(3, 3\), and 'labels' has \(3, 1\)"),
        (torch.zeros(2, dtype=torch.long), r"returned logits \(3, 3\), and 'labels' has \(2,\)"),
    ],
)
def test_labels_that_do_not_fit(labels, message):
    with pytest.raises((DataError, ModelError), match=message):
        Classification()(LINEAR, {"inputs": X, "labels": labels})


def test_labels_that_are_not_there():
    for objective in (Classification(), CausalLM()):
        with pytest.raises(DataError, match=r"reads 'labels', but the batch has inputs \(3, 2\) float32"):
            objective.count({"inputs": X})


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.int16])
def test_labels_of_any_integer_type_and_name(dtype):
    expected = Classification()(LINEAR, {"inputs": X, "labels": Y})
    for name in ("labels", "label", "target", "targets"):
        loss = Classification()(LINEAR, {"inputs": X, name: Y.to(dtype)})
        assert torch.equal(loss.loss_sum, expected.loss_sum)


def test_a_class_for_each_token():
    tokens = nn.Linear(2, 3)
    batch = {"inputs": X[None], "labels": torch.tensor([[0, -100, 2]])}
    loss = Classification()(tokens, batch)
    assert (loss.count, loss.extras["samples"]) == (2, 2)


def test_a_language_models_labels():
    model = Recorder(lambda input_ids: torch.zeros(*input_ids.shape, 5))
    ids = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(DataError, match="has 5, but the model has 5 outputs"):
        CausalLM()(model, {"input_ids": ids, "labels": ids + 4})
    with pytest.raises(ModelError, match=r"returned logits \(2, 4, 5\) for labels \(2, 3\)"):
        CausalLM()(model, {"input_ids": ids, "labels": ids[:, :3]})
    with pytest.raises(DataError, match="a label for each token"):
        CausalLM()(model, {"input_ids": ids, "labels": ids[:, 0]})


class Later(nn.Module):
    def forward(self, ids):
        return ids + 3


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (nn.Linear(2, 3), X.long(), r"Linear\(in_features=2.* int64 of shape \(3, 2\); .* x\.float\(\)"),
        (nn.Linear(5, 3), X, r"float32 of shape \(3, 2\); expected in_features 5 in dimension -1"),
        (nn.Sequential(nn.ReLU(), nn.Linear(5, 3)), X, r"model: 1, Linear"),
        (nn.Embedding(4, 3), X, r"expected integers: .* x\.long\(\)"),
        (
            nn.Sequential(Later(), nn.Embedding(4, 3)),
            Y,
            "indices are 3 to 5, but 1, .* rows: expected 0 to 3",
        ),
        (nn.Conv2d(3, 4, 3), torch.zeros(2, 1, 8, 8), "expected in_channels 3 in dimension -3"),
        (nn.Conv2d(1, 4, 3), torch.zeros(2, 1, 8, 8, dtype=torch.uint8), r"uint8 .* x\.float\(\)"),
        (nn.LSTM(4, 5), torch.zeros(2, 3, 6), "expected input_size 4 in dimension -1"),
    ],
)
def test_a_layer_that_its_input_does_not_fit(model, inputs, message):
    with pytest.raises((ModelError, DataError), match=message):
        ModelCall()(model, {"inputs": inputs})
    assert not torch.nn.modules.module._global_forward_pre_hooks


def batch_read(**entries):
    """A batch as a loader gives it: samples 0 to 2 are of `one`, the next of `other`."""
    batch = as_batch(entries)
    batch.origin = BatchOrigin([4, 0, 3], [("one", 3), ("other", 2)])
    return batch


def test_what_an_entry_indexes_in_the_first_call_later_batches_are_held_to():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Embedding(4, 2), nn.Embedding(9, 2)

        def forward(self, ids, kinds, shifted, same):
            x = self.small(ids.view(-1)) + self.large(ids)
            return x + self.large(kinds) + self.large(shifted + 1) + self.small(same)

    call = ModelCall()
    model = Words()

    def given(ids, kinds=Y, shifted=Y, too=Y):
        clones = {"ids": ids.clone(), "kinds": kinds.clone(), "shifted": shifted.clone()}
        return call(model, batch_read(**clones, same=Y, too=too))

    given(Y)
    given(Y + 1, Y + 6, Y - 1, Y - 100)
    with pytest.raises(
        DataError, match=r"^'ids' has 4, but small, Embedding\(4, 2\), has 4 rows: expected 0 to 3 "
    ):
        given(Y + 2)
    with pytest.raises(DataError, match=r"'kinds' has -1, .* expected 0 to 8 \(sample 1 of other\)$"):
        given(Y, Y - 1)


def test_labels_of_ones_own_loss_are_held_to_its_classes_in_every_batch():
    def loss(outputs, batch):
        labels = batch["targets"].reshape(-1)
        return nn.functional.cross_entropy(outputs, labels, reduction="sum", ignore_index=7)

    objective = CustomLoss(loss)
    for targets in (Y, torch.tensor([0, 7, 2])):
        objective(LINEAR, batch_read(inputs=X, targets=targets))
    with pytest.raises(DataError, match=r"'targets' has -100, but .* 3 classes: .* \(sample 0 of one\)$"):
        objective(LINEAR, batch_read(inputs=X, targets=torch.tensor([0, -100, 7])))


def test_a_loss_of_ones_own_sees_outputs_in_fp32():
    seen = []
    model = Recorder(lambda x: {"logits": x.bfloat16(), "pair": (x.half(), 3)})
    CustomLoss(lambda outputs, batch: seen.append(outputs) or X.sum())(model, {"inputs": X})
    assert (seen[0]["logits"].dtype, seen[0]["pair"][0].dtype) == (torch.float32, torch.float32)


def test_the_users_own_error_keeps_its_type():
    def broken(x):
        raise TypeError("missing a required argument: 'x'")

    with pytest.raises(TypeError):
        ModelCall()(Recorder(broken), {"inputs": X})
    with pytest.raises(ZeroDivisionError):
        CustomLoss(lambda outputs, batch: 1 / 0)(LINEAR, {"inputs": X})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda outputs: outputs, "cannot be called with .outputs, batch.: too many positional"),
        (lambda a, b, c: a, "missing a required argument: 'c'"),
        (nn.CrossEntropyLoss, "CrossEntropyLoss is torch's and takes no batch; write def loss"),
        (dict, "dict is a class; write a function"),
    ],
)
def test_a_loss_that_cannot_be_called(function, message):
    with pytest.raises(ConfigError, match=message):
        CustomLoss(function)
