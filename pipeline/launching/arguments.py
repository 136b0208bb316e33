"""Where a launcher's options end and train.py's arguments begin; which text a shell leaves as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

# pdsh hands a line to a shell on every node, after putting its own words in place of %h, %n and %u.
PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
TRAINING_OPTIONS = ("--deepspeed", "--config", "--dry-run", "--world-size", "--no-import-paths")


def is_plain(text: str) -> bool:
    """Whether no shell, and no pdsh, makes something else of it."""
    return PLAIN.fullmatch(text) is not None


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the launcher's, train.py's): those begin at --deepspeed, --config, a key=value, or after --."""
    for number, argument in enumerate(arguments):
        if argument == "--":
            return list(arguments[:number]), list(arguments[number + 1 :])
        name, equals, _ = argument.partition("=")
        if name in TRAINING_OPTIONS or (equals and not argument.startswith("-")):
            return list(arguments[:number]), list(arguments[number:])
    return list(arguments), []
