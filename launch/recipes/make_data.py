"""Writes the data of sft.yaml, lora.yaml, dpo.yaml and reward.yaml, and a task for `evaluate`, all offline.

    python launch/recipes/make_data.py data

The data are questions about Python's standard library. Its own source, which every machine has, answers them.
instructions.jsonl asks for the purpose of a function and for its module, signatures.jsonl for its arguments.
preferences.jsonl asks for the purpose of other functions, and has a plain answer and one with doubts.
calls.yaml is a task of lm-evaluation-harness: which of four lines calls the function that is asked for? Its
functions are those of preferences.jsonl, so no training data has one of its answers.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import CommandLineParser, PipelineError, report_errors

LONGEST = 160  # characters of an answer
NUM_CHOICES = 4
NUM_CALLS = 250  # questions of the task
PREFERRED = 3  # one of this many functions is used for preferences only
DOUBTS = ("I am not sure, but perhaps: ", "It is hard to say. ", "Well, maybe this: ", "I would guess: ")

TASK = """\
# Which of four lines calls a function?
#
#   python -m pipeline evaluate runs/lora --tasks {folder}/calls.yaml --apply-chat-template

task: calls
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1}}
"""


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


def call(function: Function) -> tuple[str, str]:
    """Return the question for a function's arguments, and the answer."""
    name = f"{function.module}.{function.name}"
    return f"How is {name} called?", f"{name}({function.arguments})"


def choose_calls(asked: list[Function]) -> Iterator[dict[str, str | int | list[str]]]:
    """Yield the rows of the task. The wrong lines call the next functions, most of the same module."""
    for number in range(NUM_CALLS):
        lines = [call(each)[1] for each in asked[number : number + NUM_CHOICES]]
        answer = number % NUM_CHOICES
        question, right = call(asked[number])
        yield {
            "question": question,
            "choices": [*lines[1 : answer + 1], right, *lines[answer + 1 :]],
            "answer": answer,
        }


def main(folder: Path) -> None:
    """Write the files into `folder`.

    Raises:
        PipelineError: The folder cannot be written to.
    """
    found = list(functions())
    owners = Counter(each.name for each in found)
    instructions = []
    signatures = []
    preferences = []
    asked = []
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
            if len(each.arguments) <= LONGEST // 2:
                asked.append(each)
            continue
        instructions.append(chat(question, each.what))
        if owners[each.name] == 1:  # otherwise several modules would be right
            instructions.append(chat(f"Which module has {each.name}?", f"It is in {each.module}."))
        if len(each.arguments) <= LONGEST // 2:
            signatures.append(chat(*call(each)))
    files: dict[str, list[Any]] = {
        "instructions": instructions,
        "signatures": signatures,
        "preferences": preferences,
        "calls": list(choose_calls(asked)),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for title, rows in files.items():
            path = folder / f"{title}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            print(f"{path}: {len(rows):,} rows")
        task = TASK.format(folder=folder, rows=json.dumps(str(folder / "calls.jsonl")))
        (folder / "calls.yaml").write_text(task, "utf-8")
    except OSError as error:
        raise PipelineError(f"{folder}: {error.strerror}; give a folder that can be written to") from None


if __name__ == "__main__":
    parser = CommandLineParser(prog="make_data.py", description="Write the data of the fine-tuning recipes.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder for the files, for example data")
    arguments = parser.parse_args()
    sys.exit(report_errors(lambda: main(arguments.folder)))
