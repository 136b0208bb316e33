"""The recipe: keys, types, ranges, and values that do not go together."""

from __future__ import annotations

from typing import Any

from bad_inputs.case import Case, nightly


def key(wrong: str, dotted: str, value: Any, *says: str, base: str = "text") -> Case:
    """One key is wrong: the error names the file's line and the key."""
    return Case(wrong, ["recipe.yaml:", dotted, *says], base=base, recipe={dotted: value})


def whole(wrong: str, text: str | bytes, *says: str) -> Case:
    return Case(wrong, ["recipe.yaml", *says], recipe=text)


TYPOS = [
    key("typo at the top", "max_step", 3, 'did you mean "max_steps"'),
    key("typo in a model of one's own", "model.arg", {}, 'did you mean "args"', base="own"),
    key("typo in data of one's own", "data.argss", {}, 'did you mean "args"', base="own"),
    key("typo in objective", "objective.smoothing", 0.1, "label_smoothing"),
    key(
        "DeepSpeed's JSON in the recipe",
        "deepspeed",
        "ds_configs/zero2.json",
        "an option of the command: --d",
    ),
    Case("five mistakes at once", ["and 3 more"], recipe=dict.fromkeys(("a1", "b1", "c1", "d1", "e1"), 1)),
]

TYPES = [
    key("steps of a float too large", "max_steps", 1e30, "given 1e+30"),
    key("a directory called None", "run_dir", "None", "'None' is a text; write null"),
    key("a weight for no class", "objective.class_weights", [0, 0], "all weights are 0", base="digits"),
    key("a name with a slash", "name", "a/b", "given 'a/b'"),
    key("an import path without a function", "model.kind", "own_code:", "own_code:", base="own"),
    key("an unknown attention", "model.attention", "flash", "flash_attention_2", "given 'flash'"),
    key("nothing in freeze", "model.freeze", [], "at least 1"),
    key("digits without held-out ones", "data.eval_fraction", 0, "given 0", base="digits"),
    key("means of other channels", "data", {"kind": "images", "path": "x", "mean": [0.5]}, "1 numbers for 3"),
    key("a deviation of zero", "data.std", [0, 1, 1], "above 0", base="images"),
    key("momentum of AdamW", "optimizer.momentum", 0.5, "adamw does not read it"),
    key("a group without a pattern", "optimizer.groups", [{"patterns": []}], "groups.0.patterns"),
    key(
        "a group at no rate", "optimizer.groups", [{"patterns": ["*"], "learning_rate_factor": 0}], "given 0"
    ),
    key("a group of an unknown kind", "optimizer.groups", [{"patterns": ["*"], "kind": "moun"}], "'muon'"),
    Case(
        "a vector for muon",
        ["optimizer.groups.0.kind: muon is for matrices, and ", "has 1 dimension"],
        base="digits",
        recipe={"optimizer.groups": [{"patterns": ["*bias"], "kind": "muon"}]},
    ),
    Case(
        "a group of no parameter",
        ["optimizer.groups.0.patterns: 'conv9.*' matches no parameter", "nearest: "],
        base="digits",
        recipe={"optimizer.groups": [{"patterns": ["conv9.*"]}]},
    ),
    key("typo in a sink", "log.trackers", [{"kind": "os:system", "arg": {}}], 'did you mean "args"'),
    Case(
        "a sink that is nowhere",
        ["log_sinks:Mine", "there is no module 'log_sinks'"],
        recipe={"log.trackers": [{"kind": "log_sinks:Mine"}]},
    ),
    Case(
        "a sink that takes nothing",
        ["log.trackers: builtins:object cannot be called with (run_dir, start_step, run_config)"],
        recipe={"log.trackers": [{"kind": "builtins:object"}]},
    ),
    Case(
        "a program to notify that is nowhere",
        ["notify.command: there is no program 'no-such'"],
        recipe={"notify.command": "no-such --at all"},
    ),
    Case(
        "a webhook that is not set",
        ["notify.webhook_env: NO_SUCH_HOOK is not set", "export NO_SUCH_HOOK="],
        recipe={"notify.webhook_env": "NO_SUCH_HOOK"},
    ),
    key("a command with one quote", "notify.command", "mail 'me", "No closing quotation"),
    key("a command of nothing", "notify.command", " ", "is empty"),
    key("an address in place of a name", "notify.webhook_env", "https://x/y", "write its name here"),
    key("a profile behind the end", "profile.start_step", 10**6, "is after the last step"),
    whole(
        "an endless number of epochs",
        "model: {kind: cnn}\ndata: {kind: digits}\nmax_epochs: .inf\n",
        ":3: max_epochs",
        "finite",
    ),
]

TOGETHER = [
    Case("classification of text", ["objective"], recipe={"objective": {"kind": "classification"}}),
    Case(
        "a language loss on images", ["objective"], base="digits", recipe={"objective": {"kind": "causal_lm"}}
    ),
    Case(
        "paths and sources",
        ["recipe.yaml:", "data", "exactly one of paths and sources"],
        recipe={"data.sources": [{"paths": ["x"]}]},
    ),
    Case(
        "a source from two places",
        ["recipe.yaml:", "data.sources.0", "given: paths, dataset"],
        recipe={"data.paths": None, "data.sources": [{"paths": ["x"], "dataset": "y"}]},
    ),
    *[
        Case(
            f"{name} beside paths",
            ["recipe.yaml:", f"data.sources.0.{name} is read only with {origin}"],
            recipe={"data.paths": None, "data.sources": [{"paths": ["x"], name: value}]},
        )
        for name, value, origin in [
            ("revision", "main", "dataset"),
            ("args", {"a": 1}, "iterable"),
        ]
    ],
    Case(
        "a subset of a folder of images",
        ["recipe.yaml:", "data.subset: unknown key; images are read from one folder for each class"],
        base="images",
        recipe={"data.subset": "en"},
    ),
    Case(
        "an unknown architecture",
        ["model.architecture", "'lama'", 'did you mean "llama"'],
        recipe={"model.architecture": "lama"},
    ),
    Case("extra of another model", ["rope_thet", "llama"], recipe={"model.extra": {"rope_thet": 1}}),
    Case("extra that cannot be", ["llama"], recipe={"model.extra": {"hidden_act": 3.5}}),
    Case(
        "extra that the recipe has a word for",
        ["model.extra.num_hidden_layers", "model.num_layers"],
        recipe={"model.extra": {"num_hidden_layers": 3}},
    ),
    Case(
        "a vocabulary smaller than the tokenizer's",
        ["model.vocab_size is 299", "300", "leave model.vocab_size out"],
        recipe={"model.vocab_size": 299},
    ),
    Case(
        "sequences longer than the model takes",
        ["data.sequence_length is 32", "31 positions"],
        recipe={"model.max_sequence_length": 31},
    ),
    Case("a cnn of fewer classes", ["num_classes", "10"], base="digits", recipe={"model.num_classes": 4}),
    Case(
        "class weights of another number",
        ["objective.class_weights has 9 weights", "10"],
        base="digits",
        recipe={"objective.class_weights": [1] * 9},
    ),
    Case(
        "an unknown augmentation",
        ["data.augmentations", "RandomHorizontalFlp", "RandomHorizontalFlip"],
        base="images",
        recipe={"data.augmentations": {"RandomHorizontalFlp": {}}},
    ),
    Case(
        "an augmentation's unknown argument",
        ["data.augmentations", "RandomHorizontalFlip"],
        base="images",
        recipe={"data.augmentations": {"RandomHorizontalFlip": {"prob": 0.5}}},
    ),
    Case(
        "a run directory under a file",
        ["{here}/file/runs", "cannot be written"],
        recipe={"runs_dir": "{here}/file/runs"},
        files={"file": ""},
    ),
    Case(
        "a run directory that is a file",
        ["{here}/file", "cannot be written"],
        recipe={"run_dir": "{here}/file"},
        files={"file": ""},
    ),
    Case(
        "nothing to go on with",
        ["checkpoint.resume is required", "no unfinished run"],
        recipe={"checkpoint": {"resume": "required"}},
    ),
    Case(
        "nothing to go on with in a folder",
        ["{here}/fresh has no complete checkpoint"],
        recipe={"run_dir": "{here}/fresh", "checkpoint": {"resume": "required"}},
    ),
    Case(
        "a run directory that is taken",
        ["run_dir", "already has a run"],
        recipe={"run_dir": "{home}/run", "checkpoint": {"resume": "never"}},
    ),
    Case(
        "a run directory of another run",
        ["run_dir", "another run", "seed was 0, is 7"],
        recipe={"run_dir": "{home}/run", "seed": 7, "max_steps": 3},
    ),
    Case(
        "a cache that is a file",
        ["data.cache_dir", "{here}/file", "cannot be"],
        recipe={"data.cache_dir": "{here}/file/x"},
        files={"file": ""},
    ),
    *nightly(
        Case(
            "an architecture that is no language model",
            ["vit"],
            recipe={"model.architecture": "vit"},
        ),
    ),
]

TEXTS = [
    whole("a NUL in the recipe", b"name: a\x00b\n", "not valid YAML"),
    whole("a key that is true", "model: {kind: cnn}\non: 2\n", ":2:1:", "'on' is read as true or false"),
    whole(
        "a no-break space",
        "max_steps: 1\nmodel: {kind: cnn}\ndata: {kind: digits}\nloader:\n\xa0\xa0num_workers: 1\n".encode(),
        ":5: \\xa0\\xa0num_workers: unknown key",
        "plain spaces",
    ),
]

COMMAND_LINE = [
    Case("an empty --config", ["--config: empty"], argv=["--config", ""]),
    Case("an empty --deepspeed", ["--deepspeed: empty"], more=["--deepspeed", ""]),
]

CASES = [*TYPOS, *TYPES, *TOGETHER, *TEXTS, *COMMAND_LINE]
