"""Makes the data of the shipped tasks: docstrings of the standard library, and sums.

The modules have equal docstrings in Python 3.11 to 3.13, so results of different Pythons can be compared. The
`custom_dataset` of a YAML file calls a function with the file's metadata, and gets the splits.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from pathlib import Path
from typing import Any

from datasets import Dataset

MODULES = """\
bz2 cmd codecs compileall contextlib difflib fileinput graphlib heapq hmac imaplib lzma operator optparse
pickle pickletools pkgutil secrets selectors socketserver subprocess textwrap timeit tokenize weakref"""
MIN_CHARACTERS = 150  # of a docstring whose perplexity is measured
MIN_WORDS = 6  # of a sentence whose last word is scored
CHOICE_CHARACTERS = range(20, 81)  # lengths of a sentence to choose
NUM_CHOICES = 4
NUM_SUMS = 200
NUM_SOLVED_SUMS = 50  # for few-shot prompts


def stdlib_perplexity(**_metadata: Any) -> dict[str, Dataset]:
    """Return whole docstrings."""
    texts = [docstring for _, docstring in _read_functions() if len(docstring) >= MIN_CHARACTERS]
    return {"test": Dataset.from_dict({"text": texts})}


def stdlib_cloze(**_metadata: Any) -> dict[str, Dataset]:
    """Return first sentences of docstrings without their last word, and this word."""
    rows = []
    for _, docstring in _read_functions():
        context, _, word = _get_first_sentence(docstring).rstrip(".").rpartition(" ")
        if word.isalpha() and len(context.split()) >= MIN_WORDS:
            rows.append({"context": context, "word": word})
    return {"test": Dataset.from_list(rows)}


def stdlib_choice(**_metadata: Any) -> dict[str, Dataset]:
    """Return heads of functions with the first sentences of four docstrings, of which one is right."""
    sentences = [(head, _get_first_sentence(docstring)) for head, docstring in _read_functions()]
    functions = [pair for pair in sentences if len(pair[1]) in CHOICE_CHARACTERS]
    numbers = random.Random(0)
    rows = []
    for head, sentence in functions:
        choices = [sentence]
        while len(choices) < NUM_CHOICES:
            other = functions[_draw(numbers, len(functions))][1]
            if other not in choices:
                choices.insert(_draw(numbers, len(choices) + 1), other)
        rows.append({"head": head, "choices": choices, "answer": choices.index(sentence)})
    return {"test": Dataset.from_list(rows)}


def addition(**_metadata: Any) -> dict[str, Dataset]:
    """Return sums of two numbers below 100 with four answers, of which one is right."""
    numbers = random.Random(0)
    rows = []
    for _ in range(NUM_SUMS + NUM_SOLVED_SUMS):
        first = _draw(numbers, 100)
        second = _draw(numbers, 100)
        right = first + second
        answer = _draw(numbers, NUM_CHOICES)
        choices = [str(right + distance) for distance in range(-answer, NUM_CHOICES - answer)]
        question = f"{first} + {second} ="
        rows.append({"question": question, "sum": str(right), "choices": choices, "answer": answer})
    return {"test": Dataset.from_list(rows[:NUM_SUMS]), "train": Dataset.from_list(rows[NUM_SUMS:])}


def _read_functions() -> list[tuple[str, str]]:
    """Return head and docstring of the modules' public functions; no docstring occurs twice."""
    functions: dict[str, str] = {}
    for module in MODULES.split():
        tree = ast.parse((Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                docstring = ast.get_docstring(node) or ""
                if docstring.isascii() and docstring:
                    functions.setdefault(docstring, f"def {node.name}({ast.unparse(node.args)}):")
    return [(head, docstring) for docstring, head in functions.items()]


def _get_first_sentence(docstring: str) -> str:
    return " ".join(docstring.split("\n\n")[0].split()).partition(". ")[0]


def _draw(numbers: random.Random, bound: int) -> int:
    """Return a number from 0 to `bound` - 1, by random(), which is the same in all versions of Python."""
    return int(numbers.random() * bound)
