"""Command lines for messages. A user can paste them into a shell in any folder."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

SCRIPT = "ds-pipeline"
Word = str | Path


def format_pipeline_command(*words: Word) -> str:
    """Return the command line of `ds-pipeline`, or of `python -m pipeline` if that script is not installed.

    A `Path` among the words becomes absolute.
    """
    script = find_installed_program(SCRIPT)
    program = [script] if script else [find_installed_program("python") or sys.executable, "-m", "pipeline"]
    return format_shell_line(*program, *words)


def format_train_command(num_gpus: int, *words: Word) -> str:
    """Return the command line that trains with the `deepspeed` launcher on GPUs of one machine.

    A `Path` among the words becomes absolute.
    """
    launcher = [find_installed_program("deepspeed") or "deepspeed", "--num_gpus", str(num_gpus)]
    return format_shell_line(*launcher, "--module", "pipeline", "train", *words)


def format_shell_line(*words: Word) -> str:
    """Return the words, quoted for a shell. A `Path` becomes absolute."""
    return shlex.join(str(word.absolute()) if isinstance(word, Path) else word for word in words)


def find_installed_program(name: str) -> str | None:
    """Return how to start a program from the folder of this Python.

    The result is the name if the shell's path leads to that program, else its path. It is `None` if the
    folder has no such program.
    """
    beside = Path(sys.executable).with_name(name)
    if not beside.exists():
        return None
    on_path = shutil.which(name)
    return name if on_path is not None and Path(on_path).parent.samefile(beside.parent) else str(beside)
