"""The code that a run was started with: the commit, and what was changed since."""

from __future__ import annotations

import shutil
import subprocess

from pipeline.redaction import redact_text

MOST_CHARACTERS = 2**20
SECONDS = 20.0  # on a slow file system a run starts without


def git_commit() -> str | None:
    """The commit of the folder the run is started from; None outside a repository or without git."""
    return (_git("rev-parse", "HEAD") or "").strip() or None


def git_diff() -> str | None:
    """What tracked files differ in from that commit, without secrets, up to a million characters; None:
    in nothing, or as git_commit.
    """
    diff = _git("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    if not diff:
        return None
    said = redact_text(diff[:MOST_CHARACTERS])
    return said if len(diff) <= MOST_CHARACTERS else f"{said}\n... cut: it has {len(diff):,} characters\n"


def _git(*words: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, *words]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return answer.stdout if answer.returncode == 0 else None
