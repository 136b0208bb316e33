"""One bad input: what is wrong, what is given, and the words that the error must hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Content = str | bytes | Callable[[Path], object]

MODEL = {
    "kind": "causal_lm",
    "architecture": "llama",
    "num_layers": 2,
    "num_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
}
DOCUMENTS = {"sequence_length": 32, "eval_fraction": 0.3, "cache_dir": "{home}/cache", "prepare_workers": 1}
# Recipes that run: each case changes one. `{home}` is what all cases share, `{here}` is the case's own.
BASES: dict[str, dict[str, Any]] = {
    "text": {
        "model": MODEL,
        "data": {"kind": "text", "paths": ["{home}/texts"], "tokenizer": {"vocab_size": 300}, **DOCUMENTS},
    },
    "chat": {
        "model": MODEL,
        "data": {
            "kind": "chat",
            "paths": ["{home}/chats.jsonl"],
            "chat_template": "chatml",
            "tokenizer": {"vocab_size": 300},
            **DOCUMENTS,
        },
    },
    "digits": {"model": {"kind": "cnn", "channels": 2}, "data": {"kind": "digits"}},
    "images": {
        "model": {"kind": "cnn", "channels": 2},
        "data": {"kind": "images", "path": "{home}/images", "image_size": 8, "eval_fraction": 0},
    },
    "own": {
        "model": {"kind": "own_code:model"},
        "data": {"kind": "own_code:data"},
        "objective": {"kind": "classification"},
    },
}
COMMON = {
    "name": "tiny",
    "runs_dir": "{here}/runs",
    "max_steps": 1,
    "batch": {"global_batch_size": 4},
    "wandb": {"mode": "disabled"},
    "sample": {"max_new_tokens": 0},
}


@dataclass(frozen=True)
class Case:
    """Ends with code 2 and an error of at most three lines that holds all of `says`."""

    wrong: str
    says: Sequence[str]
    base: str = "text"
    recipe: Mapping[str, Any] | str | bytes = field(default_factory=dict)
    """Dotted keys and their values (None: without the key), or the file's whole content."""
    split: Mapping[str, Any] | str | bytes | None = None
    """The DeepSpeed JSON after --deepspeed; None: plain PyTorch."""
    argv: Sequence[str] | None = None
    """Whole command; `None` builds it from `--config`, `--deepspeed` and `more`."""
    more: Sequence[str] = ()
    """Arguments behind those of the two files."""
    entry: str = "train"
    """train, pipeline (python -m pipeline) or multi_node."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Content] = field(default_factory=dict)
    """Files of the case's own folder, which is the working directory; a function is called with the path."""

    is_nightly: bool = False
    """Whether `make test` leaves it out."""

    @property
    def id(self) -> str:
        return re.sub(r"\W+", "-", self.wrong).strip("-")

    def request(self, home: Path, here: Path) -> dict[str, Any]:
        """Write the case's files and return the command to run."""

        def filled(value: Any) -> Any:
            if isinstance(value, str):
                return value.replace("{home}", str(home)).replace("{here}", str(here))
            if isinstance(value, Mapping):
                return {filled(key): filled(each) for key, each in value.items()}
            return [filled(each) for each in value] if isinstance(value, list | tuple) else value

        files: dict[str, Content] = dict(self.files)
        arguments = ["--config", f"{here}/recipe.yaml"]
        files["recipe.yaml"] = self.recipe if isinstance(self.recipe, str | bytes) else self._recipe_text()
        if self.split is not None:
            arguments += ["--deepspeed", f"{here}/split.json"]
            is_text = isinstance(self.split, str | bytes)
            files["split.json"] = self.split if is_text else json.dumps(self.split, indent=1)
        for name, content in files.items():
            path = here / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content if isinstance(content, bytes) else filled(content).encode())
        argv = arguments + list(self.more) if self.argv is None else list(self.argv)
        return {"entry": self.entry, "argv": filled(argv), "cwd": str(here), "env": filled(dict(self.env))}

    def words(self, home: Path, here: Path) -> list[str]:
        return [word.replace("{home}", str(home)).replace("{here}", str(here)) for word in self.says]

    def _recipe_text(self) -> str:
        assert isinstance(self.recipe, Mapping)
        tree = json.loads(json.dumps(COMMON | BASES[self.base]))
        for dotted, value in self.recipe.items():
            *sections, last = dotted.split(".")
            section = tree
            for name in sections:
                section = section.setdefault(name, {})
            if value is None:
                del section[last]
            else:
                section[last] = value
        return json.dumps(tree, indent=1)  # JSON is YAML


def nightly(*cases: Case) -> list[Case]:
    """Return cases that take seconds, or resemble others, for `make test-all` alone."""
    return [replace(case, is_nightly=True) for case in cases]
