"""Hostile files: code in recipes, bombs, pipes and devices, terminal escapes, links out of folders."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from bad_inputs.case import Case, nightly

ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e"
BOMB = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has 108 bytes at most
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


CODE = [
    Case(
        "a stranger's model",
        ["recipe.yaml:", "model.kind: 'own_code:model' would run code"],
        base="own",
        more=["--no-import-paths"],
    ),
    Case(
        "a stranger's data",
        ["recipe.yaml:", "data.kind: 'own_code:data' would run code"],
        base="digits",
        recipe={"data": {"kind": "own_code:data"}},
        more=["--no-import-paths"],
    ),
    Case(
        "a stranger's loss",
        ["recipe.yaml:", "objective.kind: 'os:system' would run code"],
        base="digits",
        recipe={"objective.kind": "os:system"},
        more=["--no-import-paths"],
    ),
    Case(
        "a stranger's documents",
        ["recipe.yaml:", "data.sources.0.iterable: 'os:system' would run code"],
        recipe={"data.paths": None, "data.sources": [{"iterable": "os:system"}]},
        more=["--no-import-paths"],
    ),
    Case(
        "a stranger's set to evaluate on",
        ["recipe.yaml:", "data.eval_sets.more.iterable", "would run"],
        recipe={"data.eval_sets": {"more": {"iterable": "os:system"}}},
        more=["--no-import-paths"],
    ),
    Case(
        "code from the hub",
        ["recipe.yaml:", "model.trust_remote_code", "would run code"],
        recipe={"model": {"kind": "causal_lm", "pretrained": "a/b", "trust_remote_code": True}},
        more=["--no-import-paths"],
    ),
    Case(
        "a stranger's sink",
        ["recipe.yaml:", "log.trackers.0.kind: 'os:system' would run code"],
        recipe={"log.trackers": [{"kind": "os:system"}]},
        more=["--no-import-paths"],
    ),
    Case(
        "a stranger's command",
        ["recipe.yaml:", "notify.command: 'reboot' would run code"],
        recipe={"notify.command": "reboot"},
        more=["--no-import-paths"],
    ),
    Case(
        "a stranger's documents prepared",
        ["data.sources.0.iterable", "--no-import-paths"],
        entry="pipeline",
        recipe={"data.paths": None, "data.sources": [{"iterable": "os:system"}]},
        argv=["prepare", "--config", "{here}/recipe.yaml", "--no-import-paths"],
    ),
    Case(
        "a stranger's data looked at",
        ["data.kind", "--no-import-paths"],
        base="own",
        entry="pipeline",
        recipe={"model": {"kind": "cnn"}},
        argv=["inspect", "--no-import-paths", "--config", "{here}/recipe.yaml"],
    ),
]

BOMBS = [
    Case(
        "a deep chain of aliases",
        ["recipe.yaml:", "nested too deeply"],
        recipe="a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}]\n" for n in range(400)),
    ),
    Case(
        "a huge recipe",
        ["r.yaml", "larger than"],
        files={"r.yaml": sparse},
        argv=["--config", "{here}/r.yaml"],
    ),
    Case(
        "a deep split that is whole",
        ["split.json"],
        split='{"zero_optimization": ' + "[" * 500 + "]" * 500 + "}",
    ),
    Case(
        "a huge split",
        ["s.json", "larger than"],
        files={"s.json": sparse},
        more=["--deepspeed", "{here}/s.json"],
    ),
]

NO_FILES = [
    Case(
        f"{what} as {name}", [place, words], files={"x": make, **files}, argv=argv, entry=entry, recipe=recipe
    )
    for what, make, words in [
        ("a pipe", pipe, "it is a pipe, not a file"),
        ("a device", zeros, "it is a device, not a file"),
        ("a socket", listening, "it is not a regular file"),
    ]
    for name, place, argv, entry, recipe, files in [
        ("a recipe", "{here}/x", ["--config", "{here}/x"], "train", {}, {}),
        (
            "a split",
            "{here}/x",
            ["--config", "{here}/recipe.yaml", "--deepspeed", "{here}/x"],
            "train",
            {},
            {},
        ),
        ("a hostfile", "{here}/x", ["{here}/x", "--deepspeed", "x.json"], "multi_node", {}, {}),
    ]
]

ECHOES = [
    Case("a key of escapes", ["recipe.yaml:1: \\x1b[2J", "unknown key"], recipe=r'{"\e[2J\e]0;owned\a": 1}'),
    Case("a value of escapes", ["recipe.yaml:", "name", "x1b[2J"], recipe={"name": ESCAPES}),
    Case("a value of a megabyte", ["recipe.yaml:", "name", "aaa ... aaa"], recipe={"name": "a" * 1_000_000}),
    Case(
        "an architecture of escapes", ["model.architecture", "x1b[2J"], recipe={"model.architecture": ESCAPES}
    ),
    Case("a split's key of escapes", ["split.json", "x1b[2J", "unknown key"], split={ESCAPES: 1}),
    Case(
        "a split's value of a megabyte",
        ["split.json", "bf16.enabled", " ... "],
        split={"bf16": {"enabled": "a" * 1_000_000}},
    ),
    Case("an override of escapes", ["command line", "name", "x1b[2J"], more=[f"name='{ESCAPES}'"]),
    Case("a flag of escapes", ["unrecognized argument", "x1b[2J"], more=[f"--{ESCAPES}"]),
    Case(
        "a path of escapes",
        ["data.paths", "x1b", "u202e", "does not exist"],
        recipe={"data.paths": ["{here}/\x1bc\u202e"]},
    ),
    Case(
        "a path with a line break", ["data.paths", "does not exist"], recipe={"data.paths": ["{here}/a\nb"]}
    ),
    Case("a path with a NUL", ["recipe.yaml:", "a NUL character"], recipe={"data.paths": ["a\0b"]}),
    Case("a run's folder with a NUL", ["recipe.yaml:", "a NUL character"], recipe={"run_dir": "{here}/a\0b"}),
    Case("a name that turns text round", ["recipe.yaml:", "name", "u202e"], recipe={"name": "a\u202eb"}),
    *nightly(
        Case(
            "a list of a megabyte",
            ["recipe.yaml:", "max_steps", " ... "],
            recipe={"max_steps": [12345] * 90_000},
        ),
    ),
]

LONG = "{here}/" + "n" * 300
NAMES = [
    Case(f"a name of 300 letters as {key}", ["File name too long"], base=base, recipe={**more, key: value})
    for base, key, value, more in [
        ("digits", "runs_dir", LONG, {}),
        ("digits", "run_dir", LONG, {}),
        ("digits", "model.weights", LONG, {}),
        ("text", "data.cache_dir", LONG, {}),
        ("text", "data.paths", [LONG], {}),
        ("text", "data.tokenizer", {"pretrained": LONG}, {}),
        ("text", "model", {"kind": "causal_lm", "pretrained": LONG}, {"data.tokenizer": {"vocab_size": 300}}),
        ("text", "data.sources", [{"dataset": LONG}], {"data.paths": None}),
        ("chat", "data.chat_template", LONG, {}),
        ("images", "data.path", LONG, {}),
    ]
]

CASES = [*CODE, *BOMBS, *NO_FILES, *ECHOES, *NAMES[:3], *nightly(*NAMES[3:])]
