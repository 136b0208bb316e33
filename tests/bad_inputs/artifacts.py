"""Weights, checkpoints, images, code of one's own, and the commands that look at what there is."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_inputs.case import Case, Content, nightly
from bad_inputs.documents import link, pipe

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"


def changed(name: str, change: Callable[[Path], object]) -> Content:
    """Copy what the good run left under that name and change something in it."""

    def write(path: Path) -> None:
        shutil.copytree(path.parents[2] / "home" / name, path)
        change(path)

    return write


def writes(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def replaced(name: str, make: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def indexed(place: str, make: Content = "") -> Callable[[Path], object]:
    """Write the weights behind an index that names `place`."""

    def change(folder: Path) -> None:
        (folder / MODEL).rename(folder / "weights.safetensors")
        if callable(make):
            make(folder / place)
        index = {"metadata": {}, "weight_map": {"model.norm.weight": place}}
        (folder / INDEX).write_text(json.dumps(index))

    return change


def configured(**fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def renamed(old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = {name.replace(old, new): each for name, each in load_file(folder / MODEL).items()}
        save_file(tensors, folder / MODEL, metadata={"format": "pt"})

    return change


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def pretrained(wrong: str, change: Callable[[Path], object], *says: str) -> Case:
    model = {"kind": "causal_lm", "pretrained": "{here}/m"}
    data = {"pretrained": "{home}/model"}
    return Case(
        wrong,
        ["model.pretrained", *says],
        recipe={"model": model, "data.tokenizer": data},
        files={"m": changed("model", change)},
    )


PRETRAINED = [
    Case(
        "a model's folder that is not there",
        ["model.pretrained", "there is no such folder"],
        recipe={
            "model": {"kind": "causal_lm", "pretrained": "./nowhere"},
            "data.tokenizer": {"pretrained": "{home}/model"},
        },
    ),
    pretrained(
        "a model without config.json", lambda folder: (folder / "config.json").unlink(), "no config.json"
    ),
    pretrained("a model without weights", lambda folder: (folder / MODEL).unlink(), MODEL),
    pretrained(
        "what a run says of its model",
        lambda folder: ((folder / MODEL).unlink(), (folder.parent / "checkpoints").mkdir()),
        "has no weights; export the run (with --merge if it has an adapter): ",
    ),
    pretrained(
        "weights under another name", renamed("mlp.gate_proj", "mlp.gate"), "missing: ", "unexpected: "
    ),
    Case(
        "a folder with a config alone",
        ["data.tokenizer.pretrained: the folder m has no tokenizer; name the one that the"],
        recipe={"model": {"kind": "causal_lm", "pretrained": "m"}, "data.tokenizer": None},
        files={"m/config.json": '{"model_type": "llama"}'},
    ),
    pretrained("weights cut off", cut(MODEL), "its weights cannot be read as safetensors"),
    pretrained("a config that is no JSON", writes("config.json", "{"), "config.json"),
    pretrained("a config that is a list", writes("config.json", "[]")),
    pretrained("a config of an unknown model", configured(model_type="lama"), "lama"),
    pretrained(
        "a config of another width",
        configured(hidden_size=48, head_dim=12),
        "do not fit the model",
        "mismatched",
    ),
    pretrained("a config of more layers", configured(num_hidden_layers=3), "do not fit the model", "missing"),
    pretrained(
        "a config that brings code",
        configured(
            auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, model_type="evil"
        ),
        "custom code",
        "model.trust_remote_code",
    ),
    pretrained("a pipe as a config", replaced("config.json", os.mkfifo), "config.json: it is a pipe"),
    pretrained("a pipe as weights", replaced(MODEL, os.mkfifo), f"'{MODEL}' is a pipe"),
    pretrained(
        "an index that points upwards",
        indexed("../x.safetensors"),
        INDEX,
        "names a file outside of the folder",
    ),
    pretrained(
        "an index with a link that leads elsewhere",
        indexed("x.safetensors", link("/etc/passwd")),
        INDEX,
        "names a file outside of the folder",
    ),
    pretrained(
        "an index of nothing there", indexed("x.safetensors"), INDEX, "'x.safetensors', which is not a file"
    ),
    pretrained("an adapter in place of a model", writes("adapter_config.json", "{}"), "adapter", "merge it"),
    *nightly(
        pretrained("weights of nothing", writes(MODEL, ""), "its weights cannot be read as safetensors"),
        pretrained(
            "a header of a petabyte",
            writes(MODEL, struct.pack("<Q", 1 << 50) + b"{}"),
            "its weights cannot be read as safetensors",
        ),
        pretrained("a config of deep JSON", writes("config.json", "[" * 100_000)),
        pretrained(
            "a device as a config", replaced("config.json", link("/dev/zero")), "config.json: it is a device"
        ),
        pretrained(
            "a pipe as a generation config", replaced("generation_config.json", os.mkfifo), "is a pipe"
        ),
        pretrained(
            "a pipe beside the model", lambda folder: os.mkfifo(folder / "extra"), "'extra' is a pipe"
        ),
        pretrained(
            "an index that points elsewhere",
            indexed("/etc/passwd"),
            INDEX,
            "names a file outside of the folder",
        ),
        pretrained("an index of a pipe", indexed("x.safetensors", pipe), "is a pipe"),
        pretrained("an index of escapes", indexed("\x1b[2J"), INDEX, "x1b"),
        pretrained(
            "an index that is a list",
            lambda folder: (replaced(MODEL, lambda path: None)(folder), writes(INDEX, "[]")(folder)),
            INDEX,
            "cannot be read",
        ),
        pretrained(
            "an index of deep JSON",
            lambda folder: (replaced(MODEL, lambda path: None)(folder), writes(INDEX, "[" * 100_000)(folder)),
            INDEX,
        ),
    ),
]


def weights(wrong: str, name: str, content: Content, *says: str) -> Case:
    return Case(
        wrong, ["model.weights", *says], recipe={"model.weights": "{here}/" + name}, files={name: content}
    )


class Evil:
    """Unpickled, it would leave a file."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def tensors(**shapes: int) -> Content:
    def write(path: Path) -> None:
        import torch

        torch.save({name: torch.zeros(size) for name, size in shapes.items()}, path)

    return write


def several(path: Path) -> None:
    import torch

    torch.save({"model": {"a": torch.zeros(1)}, "state_dict": {"b": torch.zeros(1)}}, path)


WEIGHTS = [
    Case(
        "weights that are not there",
        ["model.weights: nowhere does not exist"],
        recipe={"model.weights": "./nowhere"},
    ),
    weights("weights of an unknown suffix", "w.npz", "x", "w.npz is of no known format", ".safetensors"),
    weights("safetensors of nothing", "w.safetensors", "", "cannot be read as safetensors"),
    weights(
        "safetensors that are text", "w.safetensors", "hello, this is text", "cannot be read as safetensors"
    ),
    weights("a pickle of nothing", "w.pt", "", "w.pt", "cannot be read as weights"),
    weights(
        "a pickle that runs code", "w.pt", pickle.dumps(Evil(), protocol=2), "w.pt", "code and is not run"
    ),
    weights("a pickle that is a list", "w.pt", pickle.dumps([1, 2], protocol=2), "w.pt"),
    weights("several models in one file", "w.pt", several, "several models"),
    weights("weights of another model", "w.pt", tensors(a=3, b=4), "unexpected: a, b"),
    Case(
        "a folder without weights",
        ["model.weights: {here}/w has no weights", "a run directory"],
        recipe={"model.weights": "{here}/w"},
        files={"w/a.txt": "x"},
    ),
    weights("a pipe as a file of weights", "w.safetensors", pipe, "is not a file"),
    weights("a device as a file of weights", "w.pt", link("/dev/zero"), "is not a file"),
    Case(
        "a folder whose weights lie elsewhere",
        ["names a file outside of itself: 'model.safetensors'"],
        recipe={"model.weights": "{here}/w"},
        files={"w/model.safetensors": link("/etc/passwd")},
    ),
    Case(
        "DeepSpeed's own checkpoint",
        ["zero_to_fp32.py"],
        recipe={"model.weights": "{here}/w"},
        files={"w/mp_rank_00_model_states.pt": "x"},
    ),
]


def step(path: Path) -> Path:
    return next(iter(sorted((path / "checkpoints").iterdir())))


def damaged_manifest(folder: Path) -> None:
    (step(folder) / "manifest.json").write_text("{}")


def command(wrong: str, argv: list[str], *says: str, **files: Content) -> Case:
    return Case(wrong, says, entry="pipeline", argv=argv, files=files)


COMMANDS = [
    command("no command", [], "COMMAND", "--help"),
    command("an unknown command", ["prepair"], "'prepair'", "prepare"),
    command("prepare without a recipe", ["prepare"], "--config", "--help"),
    command("prepare a recipe that is not there", ["prepare", "--config", "{here}/x.yaml"], "no such file"),
    command(
        "prepare with an unknown option",
        ["prepare", "--config", "{here}/recipe.yaml", "--shards", "0/2"],
        "unrecognized argument --shards; did you mean --shard?",
    ),
    command(
        "a shard in words",
        ["prepare", "--config", "{here}/recipe.yaml", "--shard", "first"],
        "--shard first",
        "as 0/16",
    ),
    command(
        "a shard that is not there",
        ["prepare", "--config", "{here}/recipe.yaml", "--shard", "2/2"],
        "--shard 2/2",
        "from 0 to n - 1",
    ),
    command(
        "an override of prepare misspelt",
        ["prepare", "--config", "{here}/recipe.yaml", "data.pathes=[x]"],
        "command line: data.pathes",
        'did you mean "paths"',
    ),
    command(
        "inspect fewer than no samples",
        ["inspect", "--config", "{here}/recipe.yaml", "--samples", "-1"],
        "--samples",
    ),
    command(
        "inspect samples in words",
        ["inspect", "--config", "{here}/recipe.yaml", "--samples", "all"],
        "--samples",
        "'all'",
    ),
    command(
        "inspect data that is not there",
        ["inspect", "--config", "{here}/recipe.yaml", "data.paths=[/none]"],
        "data.paths: /none does not exist",
    ),
    command(
        "a pipe in place of a manifest",
        ["checkpoints", "{here}/r"],
        "is damaged",
        r=changed("run", lambda run: replaced("manifest.json", os.mkfifo)(step(run))),
    ),
    command("export of nothing", ["export", "{here}/run", "{here}/out"], "{here}/run does not exist"),
    command("export to a folder that is full", ["export", "{home}/run", "{home}"], "{home}", "empty"),
    command(
        "export of a step that is not there",
        ["export", "{home}/run", "{here}/o", "--step", "9"],
        "no checkpoint of step 9",
        "it has 1",
    ),
    command(
        "export of a step in words", ["export", "{home}/run", "{here}/o", "--step", "newest"], "--step newest"
    ),
    command(
        "export in an unknown type",
        ["export", "{home}/run", "{here}/o", "--dtype", "int8"],
        "--dtype",
        "'int8'",
        "bf16",
    ),
    command(
        "export of the best that was not measured",
        ["export", "{here}/r", "{here}/o", "--step", "best"],
        "r",
        r=changed("run", damaged_manifest),
    ),
    command("export under a file", ["export", "{home}/run", "{here}/recipe.yaml/x"], "recipe.yaml"),
    command(
        "export of a damaged run",
        ["export", "{here}/r", "{here}/o"],
        "no complete checkpoint",
        r=changed("run", damaged_manifest),
    ),
    command("the doctor with an unknown option", ["doctor", "--hostfiel", "x"], "--hostfiel"),
    command("the doctor without a hostfile there", ["doctor", "--hostfile", "{here}/hosts"], "hosts"),
]


def images(wrong: str, *says: str, recipe: dict[str, Any] | None = None, **files: Content) -> Case:
    given = {"data.path": "{here}/i"} | (recipe or {})
    named = {f"i/{name.replace('__', '.').replace('_', '/')}": each for name, each in files.items()}
    return Case(wrong, says, base="images", recipe=given, files=named)


IMAGES = [
    images("a folder of images that is not there", "data.path", "no such folder"),
    images("a folder without classes", "has no folders", "for each class", a__png="x"),
    images("a class without images", "class folder", "cat has no images", cat_a__txt="x", dog_a__png="x"),
    images("one class of images", "data.path", "cat", cat_a__png="x"),
    images("an image that is text", "a.png", "not a readable image", cat_a__png="hello", dog_a__png="x"),
    images("a pipe as an image", "a.png", cat_a__png=pipe, dog_a__png=pipe),
    Case(
        "a held-out class that was not trained on",
        ["data.eval_path", "bird"],
        base="images",
        recipe={"data.eval_path": "{here}/e"},
        files={"e/bird/a.png": "x", "e/cat/a.png": "x"},
    ),
]


def own(wrong: str, recipe: dict[str, Any], *says: str) -> Case:
    return Case(wrong, says, base="own", recipe=recipe)


OWN = [
    own(
        "a module that is not there", {"model.kind": "no.such:thing"}, "there is no module 'no'", "installed"
    ),
    own(
        "a function that is not there",
        {"model.kind": "own_code:modell"},
        "no 'modell'",
        "did you mean 'model'?",
    ),
    own("a number in place of a model", {"model.kind": "own_code:NUMBER"}, "'NUMBER'", "int", "not callable"),
    own(
        "a model's unknown argument",
        {"model.args": {"size": 3}},
        "model.args do not fit own_code:model",
        "size",
    ),
    own("a model's missing argument", {"model.kind": "own_code:sized"}, "model.args do not fit", "size"),
    own("a model that is a text", {"model.kind": "own_code:no_model"}, "returned a str, not an nn.Module"),
    own("all parameters frozen", {"model.freeze": ["1.*"]}, "model.freeze: 1.* match every parameter"),
    own("nothing of that name to freeze", {"model.freeze": ["2.weight"]}, "2.weight", "nearest: 1.weight"),
    own("a model without anything to train", {"model.kind": "own_code:frozen"}, "requires a gradient"),
    own("data that is not there", {"data.kind": "own_code:dat"}, "has no 'dat'", "did you mean 'data'?"),
    own(
        "data's unknown argument",
        {"data.args": {"path": "x"}},
        "data.kind own_code:data",
        "path",
        "data.args",
    ),
    own("data that is nothing", {"data.kind": "own_code:nothing"}, "returned None", "data set"),
    own("data that is empty", {"data.kind": "own_code:empty"}, "is empty"),
    own("data that is a generator", {"data.kind": "own_code:generator"}, "generator", "map-style"),
    own(
        "held-out data of a bad name",
        {"data.kind": "own_code:badly_named"},
        "'a/b'",
        "a name may have letters, digits and _ . -",
    ),
    own(
        "an objective that cannot be guessed",
        {"objective": {}},
        "objective.kind",
        "write causal_lm, classification",
    ),
    own("a loss that is not there", {"objective.kind": "no.such:loss"}, "there is no module 'no'"),
    own("a loss that is a number", {"objective.kind": "own_code:NUMBER"}, "'NUMBER'", "not callable"),
    Case(
        "documents of a function that is not there",
        ["own_code", "'texts'"],
        recipe={"data.paths": None, "data.sources": [{"iterable": "own_code:texts"}]},
    ),
    Case(
        "documents of a function's unknown argument",
        ["own_code:model", "size", "change args"],
        recipe={"data.paths": None, "data.sources": [{"iterable": "own_code:model", "args": {"size": 1}}]},
    ),
    Case(
        "documents that are no list",
        ["own_code:no_model", "iterable"],
        recipe={"data.paths": None, "data.sources": [{"iterable": "own_code:no_model"}]},
    ),
]

CASES = [*PRETRAINED, *WEIGHTS, *COMMANDS, *IMAGES, *OWN]
