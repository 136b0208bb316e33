"""Writes the training data of sft.yaml, lora.yaml, dpo.yaml and reward.yaml, without a network.

    python launch/recipes/make_data.py data

The data are questions about Python's standard library. Its own source, which every machine has, answers them.
instructions.jsonl asks for the purpose of a function and for its module, signatures.jsonl for its arguments.
preferences.jsonl asks for the purpose of other functions, and has a plain answer and one with doubts.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import CommandLineParser, PipelineError, report_errors

LONGEST = 160  # characters of an answer
PREFERRED = 3  # one of this many functions is used for preferences only
DOUBTS = ("I am not sure, but perhaps: ", "It is hard to say. ", "Well, maybe this: ", "I would guess: ")


class Function(NamedTuple):
    """A documented function of a module."""

    module: str
    name: str
    arguments: str
    what: str


def functions() -> Iterator[Function]:
    """Yield the public functions and methods of all top-level modules and packages, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*library.glob("*.py"), *library.glob("*/__init__.py")]):
        module = path.parent.name if path.name == "__init__.py" else path.stem
        if module.startswith(("_", "test", "idlelib", "site")):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
        for prefix, body in [("", tree.body), *((f"{each.name}.", each.body) for each in classes)]:
            for node in body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    documented = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
                    what = " ".join(documented.split())
                    if 20 < len(what) <= LONGEST:
                        yield Function(module, prefix + node.name, ast.unparse(node.args), what)


def chat(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main(folder: Path) -> None:
    """Write the three files into `folder`.

    Raises:
        PipelineError: The folder cannot be written to.
    """
    found = list(functions())
    owners = Counter(each.name for each in found)
    instructions = []
    signatures = []
    preferences = []
    for number, each in enumerate(found):
        name = f"{each.module}.{each.name}"
        question = f"What does {name} do?"
        if number % PREFERRED == 0:
            doubtful = DOUBTS[number // PREFERRED % len(DOUBTS)] + each.what
            preferences.append(
                {
                    "prompt": [{"role": "user", "content": question}],
                    "chosen": [{"role": "assistant", "content": each.what}],
                    "rejected": [{"role": "assistant", "content": doubtful}],
                }
            )
            continue
        instructions.append(chat(question, each.what))
        if owners[each.name] == 1:  # otherwise several modules would be right
            instructions.append(chat(f"Which module has {each.name}?", f"It is in {each.module}."))
        if len(each.arguments) <= LONGEST // 2:
            signatures.append(chat(f"How is {name} called?", f"{name}({each.arguments})"))
    files = {"instructions": instructions, "signatures": signatures, "preferences": preferences}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for title, rows in files.items():
            path = folder / f"{title}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            print(f"{path}: {len(rows):,} rows")
    except OSError as error:
        raise PipelineError(f"{folder}: {error.strerror}; give a folder that can be written to") from None


if __name__ == "__main__":
    parser = CommandLineParser(prog="make_data.py", description="Write the data of the fine-tuning recipes.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder for the files, for example data")
    arguments = parser.parse_args()
    sys.exit(report_errors(lambda: main(arguments.folder)))
