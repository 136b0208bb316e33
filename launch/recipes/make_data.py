"""Writes what sft.yaml, lora.yaml and dpo.yaml train on: questions about Python's standard library, answered
by its own source, which every machine has. No network is needed.

    python launch/recipes/make_data.py data

instructions.jsonl: what a function does, and where it is. signatures.jsonl: how it is called.
preferences.jsonl: the right answer, and one that is unsure and wrong.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONGEST = 160  # characters of an answer


class Function(NamedTuple):
    """One of a module that documents it."""

    module: str
    name: str
    arguments: str
    what: str


def functions() -> Iterator[Function]:
    """The public ones of all top-level modules and packages, in an order that is the same everywhere."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*library.glob("*.py"), *library.glob("*/__init__.py")]):
        module = path.parent.name if path.name == "__init__.py" else path.stem
        if module.startswith(("_", "test", "idlelib", "site")):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                documented = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
                what = " ".join(documented.split())
                if 20 < len(what) <= LONGEST:
                    yield Function(module, node.name, ast.unparse(node.args), what)


def chat(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main(folder: Path) -> None:
    """Writes the three files into `folder`."""
    found = list(functions())
    instructions, signatures, preferences = [], [], []
    for number, each in enumerate(found):
        name = f"{each.module}.{each.name}"
        instructions.append(chat(f"What does {name} do?", each.what))
        instructions.append(chat(f"Which module has {each.name}?", f"It is in {each.module}."))
        if len(each.arguments) <= LONGEST // 2:
            signatures.append(chat(f"How is {name} called?", f"{name}({each.arguments})"))
        other = found[(number * 7 + 11) % len(found)]
        preferences.append(
            {
                "prompt": [{"role": "user", "content": f"What does {name} do?"}],
                "chosen": [{"role": "assistant", "content": each.what}],
                "rejected": [{"role": "assistant", "content": f"I am not sure. Maybe: {other.what}"}],
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    for title, rows in (
        ("instructions", instructions),
        ("signatures", signatures),
        ("preferences", preferences),
    ):
        path = folder / f"{title}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        print(f"{path}: {len(rows):,} rows")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: give one folder to write to: python launch/recipes/make_data.py data")
    main(Path(sys.argv[1]))
