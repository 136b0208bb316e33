"""Commands that messages give to a user: they do the same from any folder."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

SCRIPT = "ds-pipeline"
Word = str | Path


def format_pipeline_command(*words: Word) -> str:
    """Return `ds-pipeline` with these words, or `python -m pipeline` where that script is not installed.

    A `Path` becomes absolute.
    """
    script = find_installed_program(SCRIPT)
    own = [script] if script else [find_installed_program("python") or sys.executable, "-m", "pipeline"]
    return format_shell_line(*own, *words)


def format_train_command(num_gpus: int, *words: Word) -> str:
    """Return the command that trains under `deepspeed` on GPUs of one machine. A `Path` becomes absolute."""
    launcher = [find_installed_program("deepspeed") or "deepspeed", "--num_gpus", str(num_gpus)]
    return format_shell_line(*launcher, "--module", "pipeline", "train", *words)


def format_shell_line(*words: Word) -> str:
    """Return the words as a shell reads them. A `Path` becomes absolute."""
    return shlex.join(str(word.absolute()) if isinstance(word, Path) else word for word in words)


def find_installed_program(name: str) -> str | None:
    """Return the name if it starts the program beside this Python, else that program's path.

    `None`: nothing of that name is beside this Python.
    """
    beside = Path(sys.executable).with_name(name)
    if not beside.exists():
        return None
    on_path = shutil.which(name)
    return name if on_path is not None and Path(on_path).parent.samefile(beside.parent) else str(beside)
