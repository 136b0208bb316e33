"""Command lines for messages. A user can paste them into a shell in any folder."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

SCRIPT = "ds-pipeline"
"""Name of the installed command."""
Word = str | Path
"""Word of a command line."""


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
    """Return the word that starts a program in the folder of this Python; `None` if it is not there.

    The word is the program's name if the shell finds this program by its name, else its path.
    """
    program = Path(sys.executable).with_name(name)
    if not program.exists():
        return None
    on_path = shutil.which(name)
    shell_finds_it = on_path is not None and Path(on_path).parent.samefile(program.parent)
    return name if shell_finds_it else str(program)
