"""Faults of a user's own data, model and loss in a run: one line and exit code 2."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipeline.cli.train import main

pytestmark = pytest.mark.slow

X = torch.randn(8, 3)
Y = torch.arange(8) % 4


class Endless(IterableDataset):
    def __len__(self):
        return 8

    def __iter__(self):
        return iter(X)


class NegativeLength(list):
    length = -1

    def __len__(self):
        return self.length


class Normalised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4))


PICTURE = Image.new("RGB", (4, 4))
DATA = {
    "good": lambda split: TensorDataset(X, Y),
    "uneven": lambda split: [(torch.zeros(3 + i), 0) for i in range(8)],
    "nothing": lambda split: [None] * 8,
    "too_large": lambda split: TensorDataset(X, Y + 1),
    "too_large_to_evaluate": lambda split: TensorDataset(X, Y + (split == "eval")),
    "floats": lambda split: TensorDataset(X, Y.float()),
    "nothing_to_learn": lambda split: TensorDataset(X, torch.full_like(Y, -100)),
    "columns": lambda split: TensorDataset(X, Y[:, None]),
    "unlabelled": lambda split: list(X),
    "integers": lambda split: TensorDataset(X.long(), Y),
    "narrow": lambda split: TensorDataset(X[:, :2], Y),
    "pairs": lambda split: [{"first": x, "second": x, "labels": y} for x, y in zip(X, Y, strict=True)],
    "one_in_ten": lambda split: TensorDataset(X, torch.tensor([0, 1, 2, 3, 0, 1, 2, 9])),
    "endless": lambda split: Endless(),
    "loaders": lambda split: DataLoader(TensorDataset(X, Y)),
    "arrays": lambda split: (X, Y),
    "pictures": lambda split: [(PICTURE, y) for y in Y],
    "named_pictures": lambda split: [{"input": PICTURE, "labels": y} for y in Y],
    "only_texts": lambda split: ["text"] * 8,
    "empty_dicts": lambda split: [{}] * 8,
    "negative_length": lambda split: NegativeLength(X),
    "ends": lambda split: sys.exit(0),
    "broken": lambda split: {}["not there"],
}


def data(split, name):
    return DATA[name](split)


def linear():
    return nn.Linear(3, 4)


def lazy():
    return nn.LazyLinear(4)


def on_meta():
    return nn.Linear(3, 4, device="meta")


def in_parallel():
    return nn.DataParallel(nn.Linear(3, 4))


def in_half():
    return nn.Linear(3, 4).half()


def probabilities():
    return nn.Sequential(nn.Linear(3, 4), nn.Softmax(dim=-1))


def normalised():
    return Normalised()


def ends_the_program():
    sys.exit("no GPU")


def without_split():
    return TensorDataset(X, Y)


def split_by_name(*, split):
    return TensorDataset(X, Y)


async def awaited(split):
    return TensorDataset(X, Y)


made = nn.Linear(3, 4)
torchs_loss = nn.MSELoss()


def packed(samples):
    return pack_sequence([x for x, _ in samples])


def left_out(samples):
    return torch.stack([x for x, y in samples if y > 9] or [torch.zeros(0)])[:0]


def of_two(samples, more):
    return samples


def detached(outputs, batch):
    return F.cross_entropy(outputs, batch["targets"], reduction="sum").detach()


def misnamed(outputs, batch):
    return F.cross_entropy(outputs, batch["target"], reduction="sum")


def own_cross_entropy(outputs, batch):
    return F.cross_entropy(outputs, batch["targets"], reduction="sum")


def torchs_mean(outputs, batch):
    return nn.CrossEntropyLoss()(outputs, batch["targets"])


def plain_mean(outputs, batch):
    return (outputs.sum(-1) - batch["targets"]).square().mean()


def counting(counted):
    def loss(outputs, batch):
        return own_cross_entropy(outputs, batch)

    loss.count = counted
    return loss


counting_text = counting(lambda batch: "four")
counting_many = counting(lambda batch: torch.ones(4))
counting_without_a_function = counting(4)


def loss_that_ends(outputs, batch):
    sys.exit(0)


def of_one(outputs):
    return outputs.sum()


def raising(outputs, batch):
    return {}["mine"]


@pytest.fixture
def ends(tmp_path, capfd, monkeypatch):
    """`ends(code, "key=value", ...)` -> what the run wrote on stderr."""
    monkeypatch.chdir(tmp_path)
    tree = {
        "max_steps": 3,
        "model": {"kind": "test_bad_code:linear"},
        "data": {"kind": "test_bad_code:data", "args": {"name": "good"}},
        "objective": {"kind": "classification"},
        "batch": {"global_batch_size": 4},
        "wandb": {"mode": "disabled"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))

    def function(code, *overrides):
        assert main(["--config", "recipe.yaml", *overrides]) == code
        return capfd.readouterr().err

    return function


def own(section, name):
    return f"data.args.name={name}" if section == "data" else f"{section}.kind=test_bad_code:{name}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([own("data", "uneven")], "inputs of one batch cannot be stacked: ("),
        ([own("data", "uneven"), "loader.num_workers=1"], "inputs of one batch cannot be stacked: ("),
        ([own("data", "nothing")], "the data set gave None for a sample"),
        ([own("data", "too_large")], "'targets' has 4, but the model has 4 outputs: expected 0 to 3"),
        ([own("data", "too_large_to_evaluate")], "'targets' has 4, but the model has 4 outputs"),
        ([own("data", "one_in_ten"), "eval.max_samples=4"], "'targets' has 9, but the model has 4 outputs"),
        ([own("data", "floats")], "reads class numbers (integers from 0) from 'targets'"),
        ([own("data", "columns")], "returned logits (4, 4), and 'targets' has (4, 1)"),
        ([own("data", "unlabelled")], "reads 'labels', but the batch has inputs (4, 3) float32"),
        ([own("data", "integers")], "is given int64 of shape (4, 3); expected floating-point"),
        ([own("data", "narrow")], "is given float32 of shape (4, 2); expected in_features 3 in"),
        ([own("data", "pairs")], "Linear.forward(input) does not fit the batch: missing"),
        ([own("data", "pairs"), "model.inputs=[third]"], "model.inputs names 'third', but the batch has"),
        ([own("data", "endless")], "returned a Endless for \"train\"; expected a map-style torch Dataset"),
        ([own("data", "loaders")], "return the data set, and the batches are made for you"),
        ([own("data", "arrays")], "returned a tuple for \"train\"; expected a map-style"),
        (["data.collate_fn=test_bad_code:packed"], "the batch contains a PackedSequence"),
        (["data.collate_fn=test_bad_code:left_out"], "a batch without a sample: inputs (0,"),
        (["data.collate_fn=test_bad_code:of_two"], "missing a required argument: 'more'"),
        (["data.collate_fn=test_bad_code:no_such"], "has no 'no_such'"),
        ([own("model", "made")], "is a module; name a function or class that returns it"),
        ([own("objective", "detached")], "the loss does not depend on any parameter that is trained"),
        ([own("objective", "misnamed")], "the batch has no entry 'target'; it has: inputs"),
        ([own("objective", "of_one")], "of_one(outputs) cannot be called with (outputs, batch)"),
        ([own("objective", "own_cross_entropy"), own("data", "too_large")], "a cross entropy are for 4"),
        (["objective.kind=causal_lm"], "reads 'labels', but the batch has inputs"),
        ([own("data", "pictures")], "only tensors, arrays and numbers go to a model by themselves"),
        ([own("data", "named_pictures")], "missing a required argument: 'input'; the batch has input (list"),
        ([own("data", "only_texts")], "the data set gave a str for a sample; expected a dict, a tuple or a"),
        ([own("data", "empty_dicts")], "the data set gave a dict without entries for a sample; expected"),
        ([own("data", "negative_length")], "__len__() should return >= 0; its __len__ must return the"),
        ([own("data", "ends")], "data.kind test_bad_code:data ended the program (SystemExit: 0); put its"),
        (["data.kind=test_bad_code:without_split", "data.args={}"], "def without_split(split)"),
        (["data.kind=test_bad_code:split_by_name", "data.args={}"], "as split_by_name(\"train\"): write def"),
        (["data.kind=test_bad_code:awaited", "data.args={}"], "is an async function; write def in place of"),
        ([own("model", "lazy")], "without values: weight, bias are lazy; give the layer its sizes"),
        (
            [own("model", "on_meta")],
            "without values: weight, bias are on the meta device; build the model on",
        ),
        ([own("model", "in_parallel")], "returned a DataParallel; return the module inside"),
        ([own("model", "ends_the_program")], "ended the program (SystemExit: no GPU); put its script part"),
        ([own("model", "normalised"), "batch.global_batch_size=1"], "raise batch.micro_batch_size"),
        (["objective.kind=torch.nn.functional:cross_entropy"], 'return F.cross_entropy(outputs, batch["targ'),
        (["objective.kind=torch.nn:MSELoss"], 'return nn.MSELoss(reduction="sum")(outputs, batch["targ'),
        ([own("objective", "torchs_loss")], 'return nn.MSELoss(reduction="sum")(outputs, batch["targets"])'),
        ([own("objective", "counting_text")], "the function's count returned a str; expected one number"),
        ([own("objective", "counting_many")], "count returned a tensor of shape (4,); expected one number"),
        (
            [own("objective", "counting_without_a_function")],
            "loss.count is not a function; make it a function of the batch",
        ),
        ([own("objective", "loss_that_ends")], "objective.kind: the function ended the program (SystemExit"),
        (["objective.kind=model_loss"], "objective.kind is model_loss, but the model returned a tensor of"),
    ],
)  # fmt: skip
def test_it_is_one_line(ends, overrides, message):
    told = ends(2, *overrides)
    assert "Traceback" not in told
    (line,) = [line for line in told.splitlines() if line.startswith("error:")]
    assert message in line
    if "step 1/3" not in told and "one_in_ten" not in str(overrides):  # which a later step has
        assert not Path("runs").exists(), "refused before its first step"


def test_a_run_that_was_refused_takes_nothing_of_the_user_with_it(ends, tmp_path):
    """A directory that was there stays, with what is in it; so do the folders above one that was made."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    wrong = own("data", "too_large")
    ends(2, wrong, "run_dir=mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    ends(2, wrong, "run_dir=mine/deep/run")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "mine" / "deep").exists()


def test_a_run_that_goes_on_and_is_refused_stays(ends, tmp_path):
    ends(0, "run_dir=run", "checkpoint.every=1")
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    ends(2, "run_dir=run", "max_steps=5", own("objective", "detached"))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before


@pytest.mark.nightly
def test_a_refused_run_leaves_no_files_of_weights_and_biases(ends, tmp_path, monkeypatch):
    """W&B's folder exists from before the first step on, and WANDB_DIR may put it elsewhere."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    told = ends(2, own("data", "too_large"), "wandb={mode: offline}")
    assert "W&B is offline" in told
    assert not (tmp_path / "runs").exists()
    assert not list((tmp_path / "elsewhere").rglob("*.wandb"))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("train_mine.py:model", "write train_mine:model, and start in {here}"),
        ("./train_mine.py:model", "write train_mine:model, and start in {here}"),
        ("sub/train_mine.py:model", "write sub.train_mine:model, and start in {here}"),
        ("{here}/sub/train_mine.py:model", "write train_mine:model, and start in {here}/sub"),
    ],
)
def test_the_path_of_a_file_is_told_as_the_import_path_that_works(ends, tmp_path, monkeypatch, path, says):
    code = "from torch import nn\ndef model(): return nn.Linear(3, 4)\n"
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / "train_mine.py").write_text(code)
    kind = path.format(here=tmp_path)
    says = says.format(here=tmp_path)
    told = ends(2, f"model.kind={kind}")
    assert told.splitlines()[-1].endswith(f": {kind}: is the path of a file; {says}")
    advised, folder = re.search(r"write (\S+), and start in (.*)", told).groups()
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(folder)
    assert main(["--config", str(tmp_path / "recipe.yaml"), f"model.kind={advised}", "max_steps=1"]) == 0
    sys.modules.pop("train_mine", None)


@pytest.mark.parametrize(
    ("override", "last"),
    [(own("data", "broken"), "KeyError: 'not there'"), (own("objective", "raising"), "KeyError: 'mine'")],
)
def test_the_users_own_error_keeps_its_traceback(ends, override, last):
    told = ends(1, override)
    assert "Traceback" in told
    assert last in told
    assert "test_bad_code.py" in told


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("script_that_exits", "import sys\nsys.exit(0)", "ended the program (SystemExit: 0); put its script"),
        (
            "script_with_arguments",
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--epochs', required=True)\n"
            "p.parse_args([])",
            "importing script_with_arguments ended the program (SystemExit: 2); put its script part under if "
            '__name__ == "__main__":',
        ),
        (
            "own_import",
            "\n\nimport notthere_at_all",
            "own_import.py:3 imports 'notthere_at_all', which is not",
        ),
        ("datasets", "def data(split): ...", "; ./datasets.py is hidden by it: rename your file"),
        ("code", "def data(split): ...", "; ./code.py is hidden by it: rename your file"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(ends, name, text, message):
    with open(f"{name}.py", "w") as file:
        file.write(text)
    told = ends(2, f"data.kind={name}:data", "data.args={}")
    assert "Traceback" not in told
    (line,) = [line for line in told.splitlines() if line.startswith("error:")]
    assert message in line


def test_a_model_in_half_precision_is_trained_from_fp32(ends):
    told = ends(0, own("model", "in_half"))
    assert "test_bad_code:in_half: 16 parameters are fp16 and were cast to fp32" in told


def test_a_batch_and_an_evaluation_without_a_label_are_events(ends, tmp_path):
    ends(0, own("data", "nothing_to_learn"), "run_dir=runs/none", "log.every=1", "eval.every=3")
    rows = list(map(json.loads, (tmp_path / "runs" / "none" / "metrics.jsonl").read_text().splitlines()))
    told = [row["message"] for row in rows if row.get("event") == "no_targets"]
    assert any("no target counts in any held-out sample of eval" in message for message in told)
    of_steps = [
        message
        for message in told
        if "the global batch of 1 of 1 steps, the first at step 2; samples:" in message
    ]
    assert len(of_steps) == 1
    assert "train " in of_steps[0]
    assert not any(row.get("eval/loss") == 0 for row in rows)


def test_a_softmax_before_a_cross_entropy_is_an_error(ends):
    told = ends(2, own("model", "probabilities"))
    (line,) = [line for line in told.splitlines() if line.startswith("error:")]
    assert "the model's outputs are probabilities (0 or more, of sum 1)" in line
    assert "leave the model's softmax out" in line


@pytest.mark.daily("torchs_mean")
@pytest.mark.parametrize("objective", ["torchs_mean", "plain_mean"])
def test_a_loss_that_is_a_mean_is_an_error_until_the_recipe_says_what_it_is(ends, objective):
    told = ends(2, own("objective", objective))
    (line,) = [line for line in told.splitlines() if line.startswith("error:")]
    assert "returned a mean; expected the sum over the micro-batch's 4 samples" in line
    for reduction in ("mean", "sum"):
        assert f"objective.reduction: {reduction}" in line
        ends(0, own("objective", objective), f"objective.reduction={reduction}", f"name={reduction}")
    ends(0, own("objective", objective), "batch.micro_batch_size=1", "name=one")
    ends(0, own("objective", "own_cross_entropy"), "name=sum_of_all")


def test_a_mean_trains_as_the_sum_does_in_any_micro_batches(ends, tmp_path):
    def losses(name, *overrides):
        ends(0, f"name={name}", f"run_dir=runs/{name}", "log.every=1", *overrides)
        rows = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
        return [row["train/loss"] for row in rows if "train/loss" in row]

    expected = losses("sum", own("objective", "own_cross_entropy"))
    assert len(expected) == 3
    for size in (1, 2, 4):
        mean = own("objective", "torchs_mean"), "objective.reduction=mean"
        assert losses(f"mean_{size}", *mean, f"batch.micro_batch_size={size}") == pytest.approx(expected)


def test_a_run_goes_on_where_its_loss_is_declared_a_sum(ends):
    function = own("objective", "own_cross_entropy"), "run_dir=runs/declared"
    ends(0, *function)
    assert "from step-00000003 on" in ends(0, *function, "max_steps=4", "objective.reduction=sum")
